"""The doctor's run as lines: how it went, what it counted, the bound of disaggregation."""

from __future__ import annotations

from textwrap import wrap

from console.tui.context import Context
from console.tui.frame import SMALL_HEIGHT
from console.tui.lines import Line, line, table_lines, toned
from console.viewmodel import doctor
from console.viewmodel.doctor import DoctorHead
from console.viewmodel.table import Text

HOW_TO_RUN = "T runs it: each node says facts, each pair is probed."


def head_lines(context: Context) -> list[Line]:
    """Above every view of the doctor."""
    head = doctor.head(
        context.snapshot.doctor, now=context.server_now, tz=context.tz, nodes=context.snapshot.nodes
    )
    width = context.width
    if not head.counts:
        hint = HOW_TO_RUN if context.can_act else "An operator's token runs it."
        return [*wrapped(head.state, width), line(toned(f" {hint}", "muted")), line("")]
    lines = wrapped(head.state, width)
    if head.progress is not None:
        lines.append(line(" ", toned(head.bar, "accent")))
    lines.append(_counts(head))
    if context.height < SMALL_HEIGHT:
        return lines  # its checks matter more than the bound
    lines.extend(wrapped(head.bound, width))
    return [*lines, line("")]


def _counts(head: DoctorHead) -> Line:
    spans = [toned(f" {text.text}  ", text.tone) for text in head.counts]
    return (*spans, toned(f" {head.scope.text}", head.scope.tone))


def wrapped(text: Text, width: int) -> list[Line]:
    """A sentence over as many lines as it needs."""
    return [line(" ", toned(part, text.tone)) for part in wrap(text.text, max(20, width - 2))]


def pair_doctor_lines(context: Context, source: str, target: str, width: int) -> list[Line]:
    """What the last run said of a pair."""
    report = context.snapshot.doctor
    group = doctor.of_pair(report, source, target)
    if report is None:
        return []
    if group is None:
        words = " DOCTOR  this pair was not in the last run; T probes it"
        return [line(""), line(toned(words, "muted"))]
    head = doctor.head(report, now=context.server_now, tz=context.tz)
    title = line(toned(" DOCTOR  ", "strong"), toned(group.state.text, group.state.tone),
                 toned(f"  {group.summary}; {head.state.text}", "muted"))  # fmt: skip
    return [line(""), title, *(line(" ", *row) for row in table_lines(group.checks, width - 2))]
