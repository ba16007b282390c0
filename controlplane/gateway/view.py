"""Follows the control plane's view by a long poll; its absence changes nothing but freshness."""

import asyncio
from collections.abc import Callable
from time import monotonic
from urllib.parse import quote

import msgspec
import structlog

from controlplane.gateway.api_client import ApiClient
from controlplane.gateway.upstream import UpstreamError
from controlplane.gateway.wire import View

log = structlog.get_logger(__name__)

WAIT_SECONDS = 25
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_decoder = msgspec.json.Decoder(View)


class ViewFollower:
    """`run` until cancelled; every new view goes to `apply` before it is acknowledged."""

    def __init__(self, client: ApiClient, gateway_id: str, apply: Callable[[View], None]) -> None:
        self._client = client
        self._path = f"/api/v1/view?gateway={quote(gateway_id)}&wait={WAIT_SECONDS}"
        self._apply = apply
        self._revision: int | None = None
        self._boot_id = ""
        self.connected = False

    async def run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            since = monotonic()
            try:
                has_news = await self._poll()
            except (UpstreamError, msgspec.DecodeError, ValueError) as error:
                if self.connected:
                    log.warning("control_plane_lost", error=str(error), effect="last view is kept")
                self.connected = False
                self._revision = None  # a restarted control plane counts anew
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            else:
                pause = FIRST_PAUSE_SECONDS
                self.connected = True
                if not has_news and monotonic() - since < pause:
                    await asyncio.sleep(pause)  # what stands before it may not know of long polls

    async def _poll(self) -> bool:
        """Whether there was news."""
        path = self._path
        if self._revision is not None:
            path += f"&after={self._revision}"
        status, body = await self._client.call("GET", path, seconds=WAIT_SECONDS + 10)
        if status == 304:
            return False
        if status != 200:
            raise ValueError(f"the control plane answered {status}: {body[:200]!r}")
        view = _decoder.decode(body)
        if view.boot_id == self._boot_id and view.revision == self._revision:
            return False
        try:
            self._apply(view)
        except Exception as error:
            log.exception("view_not_applied", revision=view.revision)
            raise ValueError(f"its view {view.revision} cannot be applied: {error!r}") from error
        self._revision, self._boot_id = view.revision, view.boot_id
        return True
