"""Every key that works on the screen one came from."""

from __future__ import annotations

from collections.abc import Sequence

from console.tui.context import Context
from console.tui.frame import help_lines
from console.tui.keys import Key
from console.tui.lines import Line, line, toned
from console.tui.pages.detail import DetailPage

WORDS = (
    ("hit rate", "prompt tokens served from any tier / prompt tokens requested"),
    ("cache", "bytes of blocks in DRAM slabs / their capacity"),
    ("evictions", "blocks removed by an eviction policy; purges are not counted"),
    ("write queue", "blocks waiting to be stored / bound"),
    ("moved", "KV bytes between nodes; shared memory on one node is not moved"),
    ("TTFT", "request read by the gateway until its first token is sent"),
    ("TBT", "time between two streamed tokens (inter_token_latency_seconds)"),
    ("KV wait", "decode time a request stood still for blocks / its decode time"),
    ("rejected", "429 by admission / requests"),
    ("events", "under a time axis: P policy R restart D drain J joined L lost, 2-9 several"),
    ("marks", "-- unknown   - no traffic   ~ stale   / no data   ! breach"),
)


class HelpPage(DetailPage):
    """The list is made from the key table, so it cannot be out of date."""

    def __init__(self) -> None:
        super().__init__("request")
        self.noun = "help"
        self.title = "Help"
        self._keys: Sequence[Key] = ()
        self._twin = ""

    def of(self, keys: Sequence[Key], twin: str) -> None:
        """Which screen's keys to show."""
        self._keys, self._twin = keys, twin
        self._draw = self._all_lines

    def path(self) -> list[str]:
        """`Help`."""
        return ["Help"]

    def _all_lines(self, context: Context, name: str, width: int) -> list[Line]:
        lines = help_lines(self._keys, self._twin)
        lines.append(line(""))
        lines.append(line(toned(" words", "strong")))
        lines.extend(line(f"   {word:<12} ", toned(text, "muted")) for word, text in WORDS)
        return lines
