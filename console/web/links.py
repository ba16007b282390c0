"""Console paths (`node/n1`, `request/7f3a`) and table cells as addresses of pages."""

from __future__ import annotations

from urllib.parse import quote

from console.viewmodel.table import Column, Row, Table

_ROOT_OF = {
    "node": "/nodes",
    "worker": "/workers",
    "link": "/transfers",
    "transfers": "/transfers",
    "request": "/requests",
    "requests": "/requests",
    "rejections": "/rejections",
    "in-flight": "/in-flight",
    "policy": "/policies",
    "policies": "/policies",
    "job": "/jobs",
    "jobs": "/jobs",
    "audit": "/audit",
    "doctor": "/doctor",
    "topology": "/topology",
    "gateway": "/topology",
    "kvwait": "/requests",
    "nodes": "/topology",
    "workers": "/topology",
    "overview": "/",
}
_NUM_NAMES = {
    "/nodes": 1, "/workers": 1, "/requests": 1, "/transfers": 2, "/policies": 2, "/jobs": 1,
}  # fmt: skip
_LISTED_ON = {"/nodes": "/topology", "/workers": "/topology"}
_VIEWS = {"/requests": ("live", "slow")}
"""Views of a list, not names in it."""
_CACHE_VIEWS = ("hit-rate", "evictions", "tiers", "tenants", "what-if", "pins")


def path(*parts: str) -> str:
    """`/nodes/n1` with each name quoted."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def page_of(console_path: str) -> str:
    """Empty for a path without a page, so that templates draw text instead of a dead link."""
    if console_path.startswith("/"):
        return console_path  # made here, already an address
    console_path, _, wanted = console_path.partition("?")
    if wanted:
        return f"{page_of(console_path)}?filter={quote(wanted, safe='')}"
    noun, *names = [part for part in console_path.split("/") if part] or [""]
    if noun == "cache":
        view = names[0].replace("_", "-") if names else ""
        return path("cache", view if view in _CACHE_VIEWS else _CACHE_VIEWS[0])
    root = _ROOT_OF.get(noun, "")
    if root == "/policies":  # its scope may be a model's name, with slashes
        names = [*names[:1], *(["/".join(names[1:])] if names[1:] else [])]
    if not root or root not in _NUM_NAMES:
        return root
    if len(names) != _NUM_NAMES[root] or names[0] in _VIEWS.get(root, ()):
        return _LISTED_ON.get(root, root)
    return root + path(*names)


def head_place(table: Table) -> int:
    """Which column names its row: the first, but for a mark, a state or a time before the name."""
    leading = table.columns[0].key
    named = table.columns[1].key if len(table.columns) > 1 else ""
    return 1 if leading in ("chosen", "state") or (leading, named) == ("at", "request") else 0


def cell_page(row: Row, column: Column, *, is_head: bool) -> str:
    """Where a cell leads: a node's or worker's name to its page, a row's name to the row's."""
    name = row.facts.get(column.key)
    if column.key in ("node", "worker") and isinstance(name, str) and name:
        return path(f"{column.key}s", name)
    return page_of(row.opens) if is_head and row.opens else ""
