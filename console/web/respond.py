"""How pages leave: strict policy headers, ETag, gzip, no caching of what is live."""

from __future__ import annotations

import gzip
import hashlib

from fastapi import Request
from fastapi.responses import Response

GZIP_FROM_BYTES = 800
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
"""`data:` is for the picture that plotly.js paints a heatmap into. No inline style or script."""

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LIVE = "no-cache"
FOREVER = "public, max-age=31536000, immutable"


def send(
    request: Request,
    body: bytes,
    media_type: str,
    *,
    status: int = 200,
    cache: str = LIVE,
    gzipped: bytes | None = None,
    vary: str = "Accept-Encoding",
) -> Response:
    """A reply with an ETag over the body: 304 when the browser holds the same one."""
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = {**SECURITY_HEADERS, "ETag": etag, "Cache-Control": cache, "Vary": vary}
    if status == 200 and etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if len(body) >= GZIP_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzipped or gzip.compress(body, 4, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status_code=status, headers=headers, media_type=media_type)
