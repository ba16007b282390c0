"""Where this user's clusters and models are kept, unless told otherwise."""

import os
from pathlib import Path


def default_data_dir() -> Path:
    """`$PERILUNE_HOME`, else `~/.local/share/perilune`."""
    configured = os.environ.get("PERILUNE_HOME", "")
    return Path(configured or "~/.local/share/perilune").expanduser()
