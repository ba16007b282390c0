"""How many clients' connections the limit on open files has room for."""

import contextlib
import resource
from typing import Final

from workers.core.errors import ConfigError

RESERVED: Final = 128
"""Of agents, the control plane, probes, tokenizers and logs."""
FILES_A_CONNECTION: Final = 3
"""A client's own, and its request's to workers: two legs may be open at once."""
LEAST_CONNECTIONS: Final = 64
_NAME: Final = "RLIMIT_NOFILE (ulimit -n)"


def raise_limit() -> None:
    """Ask for all open files that this process may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files() -> int:
    """How many this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def connections_for(num_files: int, wanted: int, *, asked: bool) -> int:
    """At most `wanted`. Raises `ConfigError` where an operator `asked` for more than there is room
    for, and where there is room for next to none."""
    room = max(0, num_files - RESERVED) // FILES_A_CONNECTION
    least = wanted if asked else min(wanted, LEAST_CONNECTIONS)
    if room < least:
        problem = f"has room for {room} clients' connections, {least} are needed"
        enough = least * FILES_A_CONNECTION + RESERVED
        lower = ", or lower --max-connections" if asked else ""
        way_out = f"Raise it (ulimit -n {enough}, or LimitNOFILE= of systemd){lower}."
        raise ConfigError(_NAME, num_files, problem, way_out)
    return min(room, wanted)
