"""Cursors of lists in order of time: the last row's time and request id."""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime

from controlplane.errors import InvalidError


def make_cursor(at: datetime, request_id: str) -> str:
    return base64.urlsafe_b64encode(f"{at.isoformat()}|{request_id}".encode()).decode()


def parse_cursor(cursor: str) -> tuple[datetime, str]:
    try:
        text = base64.urlsafe_b64decode(cursor.encode()).decode()
        at, _, request_id = text.partition("|")
        return datetime.fromisoformat(at).astimezone(UTC), request_id
    except (ValueError, binascii.Error, OverflowError) as error:
        raise InvalidError(
            "cursor: not a cursor of this list.",
            field="cursor",
            value=cursor,
            way_out="Pass next_cursor as it came, or leave it out.",
        ) from error
