"""What the gateway itself says on /v1: OpenAI-style error objects.

/v1 clients are OpenAI SDKs: they show `error.message`. So errors here are
`{"error": {"message", "type", "param", "code"}}` and not problem+json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

REASONS = {
    100: "Continue", 200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed", 422: "Unprocessable Content", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip

_NOTHING: Mapping[str, str] = MappingProxyType({})
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "request_timeout",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "slo_rejected",
    431: "invalid_request_error",
    501: "invalid_request_error",
    502: "upstream_error",
    503: "unavailable",
    504: "upstream_timeout",
}


@dataclass(slots=True)
class AnswerError(Exception):
    """An answer that ends a request before any byte of a reply. `code` is stable."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: int | None = None
    request_id: str = ""  # of the decision record, once there is one
    leg: str = ""  # that failed, and on which worker
    worker: str = ""

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        about = {"request_id": self.request_id, "leg": self.leg, "worker": self.worker}
        return error_body(self.status, self.message, self.code, self.param, about)

    def headers(self) -> bytes:
        """Extra header lines."""
        lines = b""
        if self.request_id:
            ours = self.request_id.encode()
            lines += b"x-request-id: %b\r\nx-perilune-request-id: %b\r\n" % (ours, ours)
        if self.retry_after is not None:
            lines += b"retry-after: %d\r\n" % self.retry_after
        if self.status == 401:
            lines += b"www-authenticate: Bearer\r\n"
        return lines


class CancelledByOperatorError(AnswerError):
    """An operator ended the request: no worker's failure, and not to be tried again by itself."""

    __slots__ = ()

    def __init__(self, message: str, request_id: str) -> None:
        AnswerError.__init__(self, 503, message, "cancelled_by_operator", request_id=request_id)

    def headers(self) -> bytes:
        # OpenAI's SDKs would send a 503 again at once: this header tells them not to.
        return AnswerError.headers(self) + b"x-should-retry: false\r\n"


class StoppingError(CancelledByOperatorError):
    """The gateway ends before the request does; another one may serve it."""

    __slots__ = ()

    def __init__(self, request_id: str = "") -> None:
        message = "the gateway is being stopped and waits no longer; ask again, or another gateway"
        AnswerError.__init__(self, 503, message, "stopping", retry_after=1, request_id=request_id)

    def headers(self) -> bytes:
        return AnswerError.headers(self)


def error_body(
    status: int, message: str, code: str, param: str | None = None,
    about: Mapping[str, str] = _NOTHING,
) -> bytes:  # fmt: skip
    """JSON of an error object; what `about` says of request, leg and worker beside."""
    error = {
        "message": message,
        "type": _TYPES.get(status, "internal_error" if status >= 500 else "invalid_request_error"),
        "param": param,
        "code": code,
        **{name: value for name, value in about.items() if value},
    }
    return msgspec.json.encode({"error": error})


def error_event(status: int, message: str, code: str, about: Mapping[str, str] = _NOTHING) -> bytes:
    """The same as one SSE event, for streams that have begun."""
    return b"data: " + error_body(status, message, code, None, about) + b"\n\n"
