"""Offers of another protocol (RFC 9110, 7.8), which the gateway passes over."""

from controlplane.gateway.several_lines import tokens


def head_without_upgrade(method: bytes, url: bytes, headers: dict[bytes, bytes]) -> bytes:
    """A request's head, without what offers another protocol."""
    offered = tokens(headers.get(b"connection", b""))
    kept = [token for token in offered if token in (b"close", b"keep-alive")]
    dropped = (b"upgrade", b"http2-settings", b"connection")
    lines = [b"%b: %b\r\n" % item for item in headers.items() if item[0] not in dropped]
    if kept:
        lines.append(b"connection: %b\r\n" % b", ".join(kept))
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, url, b"".join(lines))
