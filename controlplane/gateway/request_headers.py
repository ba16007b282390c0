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
from controlplane.gateway.several_lines import Line, by_name, lines_of, tokens

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
    for name, values in by_name(headers, further):
        headers[name] = _one_of(name, values)
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        _check_coding(coding, http_1_0=http_1_0)
    connection = headers.get(b"connection")
    if connection is not None:
        for name in tokens(connection):
            if name in IS_TOLD:  # of this hop, says its sender
                headers.pop(name, None)


def _one_of(name: bytes, values: list[bytes]) -> bytes:
    if name in IS_TOLD:
        return lines_of(name, values)  # goes on as it came, line by line
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
