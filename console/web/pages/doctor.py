"""The doctor's last run: findings first, then all checks by node and by pair."""

from __future__ import annotations

from console.viewmodel import doctor
from controlplane.doctor import calls as doctor_calls
from controlplane.doctor.schemas import DoctorReport

from .base import MAX_ROWS_FILTERED, Context, Page, filtered

LABELS = {"findings": "Findings", "nodes": "Nodes", "pairs": "Pairs"}
MAX_GROUPS = 24
"""Of nodes or pairs on one page; those that failed come first, a filter finds the others."""


async def doctor_page(context: Context) -> Page:
    """`?view=` is findings, nodes or pairs; with a filter, checks of all of a view in one table."""
    report: DoctorReport = await context.client.send(doctor_calls.last())
    viewer = context.viewer
    view = next((one for one in doctor.VIEWS if one == viewer.view), doctor.VIEWS[0])
    shown = filtered(doctor.checks(report, view), viewer, doctor.FIELDS, MAX_ROWS_FILTERED)
    as_table = view == "findings" or bool(viewer.filter)
    groups = () if as_table else doctor.groups(report, view)
    data = {
        "run": doctor.head(report, now=context.now, tz=viewer.tz, nodes=context.snapshot.nodes),
        "running": doctor.is_running(report),
        "view_name": view,
        "views": [(one, LABELS[one]) for one in doctor.VIEWS],
        "rows": shown.table if as_table else None,
        "count": shown.count,
        "filter_error": shown.error,
        "groups": groups[:MAX_GROUPS],
        "more": max(0, len(groups) - MAX_GROUPS),
        "empty": shown.table.empty,
    }
    return Page("doctor.html", "Doctor", "doctor", [("Doctor", "")], data, has_acts=True)
