"""Splices a decode worker's event stream to the client, event by event.

Only whole events are passed on, so that an error event after a cut stands alone. Bytes are not
looked into, but for frames with `usage`, whose `cached_tokens` are corrected (A15).
"""

import re
from collections import deque
from collections.abc import Callable
from operator import sub
from time import monotonic
from typing import Any

import msgspec

from controlplane.gateway.client_connection import ClientConnection
from controlplane.gateway.encodings import Inflater, is_undone
from controlplane.gateway.events import ERROR_DATA, MAX_EVENT_BYTES
from controlplane.gateway.upstream import Reply, UpstreamError
from controlplane.gateway.usage import correct_events

MAX_GAPS = 2048
"""Gaps between pieces of one stream; the last ones are kept."""
TAIL_PIECES = 4
_LONGEST_SPLICED = 4096
_USAGE = b'"prompt_tokens"'
_DONE_MARK = re.compile(rb"(?:\A|\n)data: ?\[DONE\]")
_ERROR_EVENT = re.compile(rb"(?:\A|\n)" + ERROR_DATA)
MAX_SHOWN = 300


def _chunk_heads() -> list[bytes]:
    """For each length of a packet: how it starts if it is one chunk (`1a3\\r\\n`)."""
    heads = [b"no chunk"] * _LONGEST_SPLICED
    for payload in range(1, _LONGEST_SPLICED):
        head = b"%x\r\n" % payload
        size = len(head) + payload + 2
        if size < _LONGEST_SPLICED:
            heads[size] = head
    return heads


_CHUNK_HEADS = _chunk_heads()


class Relay:
    """Sink of one streamed reply, and its timing."""

    __slots__ = (
        "_client", "_head", "_inflater", "_pending", "_tail", "_times", "_write_raw",
        "details", "finished", "first_at", "has_done_mark", "is_opaque", "reply",
    )  # fmt: skip

    def __init__(
        self,
        client: ClientConnection,
        reply: Reply,
        head: bytes,
        details: dict[str, Any] | None,
    ) -> None:
        self._client = client
        self._write_raw = client.raw_writer()
        self._head = head
        self._pending = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_PIECES)
        self._times: deque[float] = deque(maxlen=MAX_GAPS + 1)  # when pieces came
        self.first_at = 0.0
        self.finished = False
        self.reply = reply
        self.details = details
        self.has_done_mark = True  # ends with [DONE]; streams of other protocols just end
        self.is_opaque = False  # packed so that no event can be seen
        self._inflater: Inflater | None = None

    # --- sink ---

    def sink_of(self, encoding: bytes) -> Callable[[bytes], None]:
        """What takes a reply with this content coding; unknown ones go through as they are."""
        if is_undone(encoding):
            self._inflater = Inflater(self.take, self._damaged)
            return self._inflater.take
        if encoding.strip().lower() not in (b"", b"identity"):
            self.is_opaque, self.has_done_mark = True, False
            return self._pass_on
        return self.take

    def _pass_on(self, data: bytes) -> None:
        self.take(data)

    def _damaged(self, reason: str) -> None:
        self.reply.fail(UpstreamError("protocol", reason))

    def splice(self, data: bytes) -> bool:
        """Pass a packet on as it is, framing included, if it is one whole HTTP chunk of whole
        events; else do nothing and say False. The hot path: one call a token, kept flat."""
        try:
            if not data.startswith(_CHUNK_HEADS[len(data)]):
                return False
        except IndexError:
            return False
        # `find`: `in` first tries to take its left side for a number, at ten times the cost.
        if not data.endswith(b"\n\n\r\n") or self._pending or data.find(_USAGE) >= 0:
            return False
        now = self.reply.last_byte_at = monotonic()
        self._times.append(now)
        self._tail.append(data)
        write = self._write_raw
        try:
            write(data)
        except RuntimeError:  # the client has just left; that is about to be told
            return True
        return True

    def take(self, data: bytes) -> None:
        """Any other piece of the reply."""
        now = monotonic()
        if not self._times:
            self.first_at = now
        self._times.append(now)
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        if self.is_opaque:
            self._client.write(data, self._take_head())
            return
        if self._pending or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
            if not data:
                return
        self._tail.append(data)
        if data.find(_USAGE) >= 0:
            data = correct_events(data, self.details)
        if self.reply.complete and self.is_done:
            self._client.finish(data, self._take_head())
            self.finished = True
        else:
            self._client.write(data, self._take_head())

    def end(self) -> None:
        """The reply is complete and has said [DONE]: end the answer, if that has not happened."""
        if not self.finished:
            self.finished = True
            self._client.finish(self._pending, self._take_head())

    def fail(self, event: bytes) -> None:
        """After the first byte: an error event, then the end of stream and connection."""
        self._pending = b""  # a torn event is of no use to anyone
        self.finished = True
        self._client.close_after()
        self._client.finish(event, self._take_head())

    # --- flow ---

    def pause(self) -> None:
        self.reply.pause()

    def resume(self) -> None:
        self.reply.resume()

    # --- what it saw ---

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has been written."""
        return not self._head

    @property
    def is_done(self) -> bool:
        """Whether the stream has said [DONE], or has ended, where nothing is said."""
        if not self.has_done_mark:
            return self.reply.complete and (self._inflater is None or self._inflater.is_whole)
        text = b"".join(self._tail)
        if text.find(b"\ndata: [DONE]") >= 0:  # within a text the line's end would be escaped
            return True
        return _DONE_MARK.search(text) is not None

    @property
    def has_said_done(self) -> bool:
        """Whether nothing is missing, though the reply has not ended."""
        return self.has_done_mark and self.is_done

    def error_said(self) -> tuple[str, int | None] | None:
        """The engine's words and code, where its stream has ended with an error event."""
        text = b"".join(self._tail)
        if text.find(b'"error"') < 0:
            return None
        found = _ERROR_EVENT.search(text)
        if found is None:
            return None
        payload = text[found.end() :].partition(b"\n")[0]
        try:
            error = msgspec.json.decode(payload)["error"]
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
            error = payload.decode(errors="replace")
        if not isinstance(error, dict):
            return str(error)[:MAX_SHOWN], None
        code = error.get("code")
        words = str(error.get("message", error))[:MAX_SHOWN]
        return words, code if isinstance(code, int) else None

    @property
    def finished_by_length(self) -> bool:
        text = b"".join(self._tail)
        places = text.find(b'"finish_reason":"length"'), text.find(b'"finish_reason": "length"')
        return max(places) >= 0

    def usage(self) -> dict[str, Any] | None:
        """The usage frame, if the client asked for one."""
        text = b"".join(self._tail)
        if text.find(b'"usage"') < 0:
            return None
        for event in reversed(text.split(b"\n\n")):
            _, data, payload = event.partition(b"data: ")  # spliced ones have a chunk's size first
            if event.find(b'"usage"') < 0 or not data:
                continue
            try:
                usage = msgspec.json.decode(payload)["usage"]
            except (msgspec.DecodeError, KeyError, TypeError):
                continue
            if isinstance(usage, dict):
                return usage
        return None

    def ordered_gaps(self) -> list[float]:
        """Seconds between pieces, rising."""
        times = list(self._times)
        return sorted(map(sub, times[1:], times))

    # --- inside ---

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def _whole_events(self, data: bytes) -> bytes:
        data = self._pending + data
        end = 0
        for separator in (b"\n\n", b"\r\n\r\n"):
            place = data.rfind(separator)
            if place >= 0:
                end = max(end, place + len(separator))
        if end == 0 and len(data) >= MAX_EVENT_BYTES:
            end = len(data)
        self._pending = data[end:]
        return data[:end]
