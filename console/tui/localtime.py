"""The viewer's zone, with the rules of the system: right over the change of summer time."""

from __future__ import annotations

import calendar
import time
from datetime import datetime, timedelta, timezone, tzinfo


class LocalZone(tzinfo):
    """Asks the C library for the offset at each moment, instead of freezing today's."""

    def fromutc(self, dt: datetime) -> datetime:
        """Local wall time of a UTC moment that carries this zone."""
        seconds = calendar.timegm(dt.replace(tzinfo=None).timetuple())
        return dt + timedelta(seconds=time.localtime(seconds).tm_gmtoff)

    def utcoffset(self, dt: datetime | None) -> timedelta:
        """Offset of local wall time."""
        if dt is None:
            return timedelta(seconds=time.localtime().tm_gmtoff)
        wall = (*dt.timetuple()[:8], -1)
        return timedelta(seconds=time.localtime(time.mktime(wall)).tm_gmtoff)

    def dst(self, dt: datetime | None) -> timedelta | None:
        """Not told apart from the offset."""
        return None

    def tzname(self, dt: datetime | None) -> str:
        """`+01:00`."""
        return str(timezone(self.utcoffset(dt)))[3:] or "UTC"
