"""Headers of requests: which ones engines are told, and what several lines of one name mean.

told to engines, not read here      all lines, in their order
a list that is read here            one list of all lines (RFC 9110, 5.3)
read here, of one value             said alike in all lines, or the request is refused: whoever
                                    reads another line than we do would see another client
anything else                       neither read nor told: the last line, as `x-request-id`, which
                                    the hop nearest to us wrote last
"""

from typing import Final

from controlplane.gateway.answers import AnswerError

Line = tuple[bytes, bytes]

TOLD: Final = (
    b"traceparent", b"tracestate", b"baggage", b"x-session-id", b"x-vllm-priority",
    b"endpoint-load-metrics-format",
)  # fmt: skip
"""What engines get of a client's headers. No other: a header may be a secret, or move an engine."""
IS_TOLD: Final = frozenset(TOLD)
USUAL_CONNECTION: Final = frozenset((b"keep-alive", b"close", b"Keep-Alive", b"Close"))
"""Values of `connection` that name no header."""
_LISTS: Final = frozenset((b"connection", b"content-encoding", b"transfer-encoding"))
_OF_ONE_VALUE: Final = frozenset((
    b"authorization", b"content-type", b"expect", b"x-perilune-priority", b"x-perilune-session",
    b"x-perilune-class", b"x-perilune-actor",
))  # fmt: skip


def settle(headers: dict[bytes, bytes], further: list[Line], *, http_1_0: bool) -> None:
    """Makes one value of each name. `headers` has the first line of each, in lower case, `further`
    the others. Raises `AnswerError` for a head that may be read in two ways."""
    if further:
        _merge(headers, further)
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        _check_coding(coding, http_1_0=http_1_0)
    connection = headers.get(b"connection")
    if connection is not None:
        for name in tokens(connection):
            if name in IS_TOLD:  # of this hop, says its sender
                headers.pop(name, None)


def tokens(value: bytes) -> list[bytes]:
    """Of a list in a header, in lower case."""
    return [token for part in value.lower().split(b",") if (token := part.strip())]


def _merge(headers: dict[bytes, bytes], further: list[Line]) -> None:
    lines: dict[bytes, list[bytes]] = {}
    for name, value in further:
        if name not in lines:
            lines[name] = [headers[name]]
        lines[name].append(value)
    for name, values in lines.items():
        headers[name] = _one_of(name, values)


def _one_of(name: bytes, values: list[bytes]) -> bytes:
    if name in IS_TOLD:
        return (b"\r\n%b: " % name).join(values)  # goes on as it came, line by line
    if name in _LISTS:
        return b", ".join(values)
    if name == b"host":  # even alike (RFC 9112, 3.2)
        raise _refusal("host: comes more than once; send it once")
    if name not in _OF_ONE_VALUE:
        return values[-1]
    first = values[0].strip()
    if any(value.strip() != first for value in values):
        raise _refusal(f"{name.decode()}: comes in several lines that differ; send it once")
    return first


def _refusal(message: str) -> AnswerError:
    return AnswerError(400, message, "repeated_header")


def _check_coding(coding: bytes, *, http_1_0: bool) -> None:
    """The parser undoes `chunked`, wherever it stands last, and leaves other codings in the body."""
    if http_1_0:
        message = "transfer-encoding: HTTP/1.0 has none; send content-length, or HTTP/1.1"
        raise AnswerError(400, message, "transfer_encoding")
    if tokens(coding) != [b"chunked"]:
        name = coding[:100].decode("latin-1")
        message = f"transfer-encoding = {name}: is not understood; send chunked or content-length"
        raise AnswerError(501, message, "transfer_encoding")
