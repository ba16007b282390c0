"""`python -m workers VERB ...`: the processes of this package."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

VERBS: Final = {"agent": "workers.agent.main"}
"""Verb -> module whose `main(arguments)` runs it and returns the exit code."""


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in VERBS:
        print(f"usage: python -m workers {{{','.join(VERBS)}}} ...", file=sys.stderr)  # noqa: T201
        return 2
    code: int = import_module(VERBS[sys.argv[1]]).main(sys.argv[2:])
    return code


if __name__ == "__main__":
    sys.exit(main())
