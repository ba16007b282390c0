"""A hub model's small files: the engine loads the weights itself, the gateway needs the tokenizer."""

from __future__ import annotations

import subprocess

from workers.core.errors import ConfigError

TIMEOUT_SECONDS = 600
_FETCH = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download(sys.argv[1], allow_patterns=["*.json", "*.jinja", "tokenizer*"]))
"""


def fetch_model_files(hub_id: str, python: str) -> str:
    """Folder with config and tokenizer, by the hub client of the engine's environment."""
    try:
        reply = subprocess.run(  # noqa: S603 - the operator's own interpreter
            [python, "-c", _FETCH, hub_id],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refuse(hub_id, str(error)) from error
    if reply.returncode != 0:
        raise _refuse(hub_id, (reply.stderr.strip().splitlines() or ["no message"])[-1])
    return reply.stdout.strip().splitlines()[-1]


def _refuse(hub_id: str, why: str) -> ConfigError:
    return ConfigError(
        "model",
        hub_id,
        f"cannot be had from the hub: {why[:300]}",
        "Check the id and the network, or give a folder.",
    )
