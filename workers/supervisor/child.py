"""`python -m workers.supervisor.child PARENT_PID COMMAND...`: become COMMAND, and end with PARENT.

A process of its own instead of `preexec_fn`, which is unsafe in a parent with threads.
"""

from __future__ import annotations

import os
import sys

from workers.process import PARENT_PID_VARIABLE, die_with_parent


def main(argv: list[str]) -> None:
    """Ask the kernel for SIGTERM at the parent's death, which survives exec, then exec."""
    parent, command = argv[0], argv[1:]
    os.environ[PARENT_PID_VARIABLE] = parent
    die_with_parent()
    # Grandchildren have another parent: one that reads this would end itself.
    del os.environ[PARENT_PID_VARIABLE]
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"Error: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
