"""A table of the view model as plain lines, for verbs: no width to keep, nothing left out."""

from __future__ import annotations

from collections.abc import Iterable

from console.viewmodel.table import Table, Text


def table_text(table: Table) -> str:
    """Labels, then a line a row; or the sentence that says why there is none."""
    if not table.rows:
        return table.empty
    columns = table.columns
    lines = [[column.label for column in columns]]
    lines += [[cell.text for cell in row.cells] for row in table.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column.align == "right" else text.ljust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def sentences(texts: Iterable[Text]) -> str:
    """One a line; those that say nothing are left out."""
    return "\n".join(text.text for text in texts if text.text)
