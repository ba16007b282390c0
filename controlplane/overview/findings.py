"""One line for NEEDS ATTENTION before it knows since when it holds."""

from __future__ import annotations

from typing import Literal

Severity = Literal["critical", "warn"]
Finding = tuple[str, Severity, str, str]
"""(key, severity, text, what it opens); the key stays while the text's numbers move."""
