"""Asks pip which build of torch it would take, before gigabytes of the wrong one come down.

The engine's CPU build needs torch's CPU build. Where pip only knows the default index, it takes
the CUDA build, which without its libraries does not even import.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements" / "dev.lock"
ADVICE = (
    "Tell pip of PyTorch's CPU wheel index or of a folder of wheels that has it: "
    'make env PIP_ARGS="--extra-index-url <PyTorch\'s CPU wheel index>" '
    'or make env PIP_ARGS="--find-links <folder>".'
)


def main(pip_args: list[str]) -> int:
    match = re.search(r"^torch==(\S+)$", LOCK.read_text(), re.MULTILINE)
    if match is None:
        return 0
    wanted = match[1]
    if installed_cpu_build(wanted):
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--disable-pip-version-check", "--ignore-installed", "--report", "-"]
    reply = subprocess.run(
        [*command, *pip_args, f"torch=={wanted}"], capture_output=True, text=True, check=False
    )
    if reply.returncode != 0:
        last = (reply.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"make env: pip finds no torch {wanted} ({last}). {ADVICE}", file=sys.stderr)
        return 1
    metadata = json.loads(reply.stdout)["install"][0]["metadata"]
    if is_cuda_build(metadata):
        found = metadata["version"]
        print(
            f"make env: pip would take torch {found}, a CUDA build; "
            f"the engine here needs the CPU build of {wanted}. {ADVICE}",
            file=sys.stderr,
        )
        return 1
    return 0


def installed_cpu_build(wanted: str) -> bool:
    code = "import torch; print(torch.__version__, torch.version.cuda or '')"
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    words = reply.stdout.split()
    return reply.returncode == 0 and len(words) == 1 and words[0].partition("+")[0] == wanted


def is_cuda_build(metadata: dict[str, object]) -> bool:
    """Metadata as in pip's installation report."""
    if "+cpu" in str(metadata["version"]):
        return False
    requires = metadata.get("requires_dist") or []
    assert isinstance(requires, list)
    return "+cu" in str(metadata["version"]) or any(
        re.match(r"(nvidia-|cuda-|triton)", str(line)) for line in requires
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
