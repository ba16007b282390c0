"""Calls to the control plane over the gateway's own HTTP client."""

from collections.abc import Sequence

from controlplane.gateway.upstream import Upstream

MAX_REPLY_BYTES = 64 * 1024 * 1024
CONNECT_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 4.0


class ApiClient:
    """Raises `UpstreamError` when the control plane does not answer."""

    def __init__(self, url: str, token: str) -> None:
        self._upstream = Upstream(url, CONNECT_SECONDS, KEEP_ALIVE_SECONDS)
        self._lines = b"host: %b\r\naccept: application/json\r\n" % self._upstream.host_header
        if token:
            self._lines += b"authorization: Bearer %b\r\n" % token.encode()

    async def call(
        self, method: str, path: str, body: Sequence[bytes] = (), *, seconds: float
    ) -> tuple[int, bytes]:
        """Status and body; `seconds` bounds the wait for each. What is sent comes in pieces, so that
        a large one is put together once."""
        lines = self._lines
        if body:
            size = sum(map(len, body))
            lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % size
        target = self._upstream.base_path + path.encode()
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, lines)
        reply = await self._upstream.send(b"".join((head, *body)), head_seconds=seconds)
        if reply.status == 304:
            return 304, b""
        return reply.status, await reply.whole(MAX_REPLY_BYTES, seconds, seconds)

    def close(self) -> None:
        self._upstream.close()
