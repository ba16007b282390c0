"""Real vLLM engines with upstream's own connectors, one prefill and one decode, on CPU.

What the connectors need lies in .venv-peers (`make peers`), beside much that engines must not see:
so they get a folder of links to just that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2

from workers.engines.vllm import PROJECT_ROOT
from workers.process import die_with_parent

MODEL = "smollm2"
START_SECONDS = 1200.0
ANSWER_SECONDS = 600.0
TIMER_SECONDS = 240
"""After which connectors free what nobody has taken: long, for what frees it earlier to be seen."""
WANTED = {
    "nixl": (
        "nixl",
        "nixl_cu12",
        "nixl_cu12.libs",
        ".nixl_cu12.mesonpy.libs",
        "nixl_meta_utils.py",
    ),
    "mooncake": ("mooncake", "mooncake_transfer_engine_non_cuda.libs"),
}
Connector = Literal["nixl", "mooncake"]
Role = Literal["prefill", "decode"]
_SERIES = re.compile(r"^(vllm:\w+)(\{[^}]*\})? ([\d.e+-]+)$", re.MULTILINE)


def site_of(connector: Connector) -> Path | None:
    """Where the connector's library lies; None: it is not installed."""
    for site in (PROJECT_ROOT / ".venv-peers/lib").glob("python3.*/site-packages"):
        if (site / WANTED[connector][1]).exists():
            return site
    return None


def link_library(connector: Connector, folder: Path) -> None:
    site = site_of(connector)
    assert site is not None
    for name in WANTED[connector]:
        if (site / name).exists():
            (folder / name).symlink_to(site / name)
    (folder / "cpu_mooncake.py").symlink_to(Path(__file__).with_name("cpu_mooncake.py"))


@dataclass
class Process:
    """A server that was started here, and its log."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, **fields: Any) -> httpx2.Response:
        body = {"model": MODEL, "temperature": 0, **fields}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Series, summed over labels."""
        sums: dict[str, float] = {}
        text = httpx2.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS).text
        for name, _, value in _SERIES.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def wait_ready(self, path: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx2.get(self.url + path, timeout=5).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            assert self.process.poll() is None, f"{self.name} ended:\n{last}"
            assert time.monotonic() < deadline, f"{self.name} does not get ready:\n{last}"
            time.sleep(0.5)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


def start_engine(
    connector: Connector, role: Role, folder: Path, model: Path, port: int, side_port: int
) -> Process:
    """`folder` holds the links, and gets the log. `side_port`: where connectors find each other."""
    config: dict[str, Any] = {"kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
    if connector == "nixl":
        config |= {
            "kv_connector": "NixlConnector", "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": TIMER_SECONDS},
        }  # fmt: skip
    else:
        config |= {
            "kv_connector": "MooncakeConnector", "kv_connector_module_path": "cpu_mooncake",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": _core(role),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(side_port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(TIMER_SECONDS),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
        "--port", str(port), "--model", str(model), "--served-model-name", MODEL,
        "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8",
        "--enforce-eager", "--kv-transfer-config", json.dumps(config),
    ]  # fmt: skip
    return start(role, port, command, folder, environment)


def _core(role: Role) -> str:
    """One thread each: with more, every step waits for the one that is not scheduled."""
    return "1" if role == "decode" and (os.cpu_count() or 1) > 1 else "0"


def static_file(connector: Connector, engines: dict[Role, Process], side_port: int) -> str:
    """What the gateway is told. `side_port`: of the prefill engine."""
    tables = []
    for role, engine in engines.items():
        lines = [f'id = "{role}"', f'url = "{engine.url}"', f'role = "{role}"',
                 f'model = "{MODEL}"', f'handshake = "{connector}"']  # fmt: skip
        if connector == "mooncake" and role == "prefill":
            lines.append(f'bootstrap = "http://127.0.0.1:{side_port}"')
        tables.append("[[worker]]\n" + "\n".join(lines) + "\n")
    return "".join(tables)


def start_gateway(folder: Path, port: int, static: str) -> Process:
    file = folder / "workers.toml"
    file.write_text(static)
    command = [sys.executable, "-m", "controlplane.gateway", "--static", str(file)]
    command += ["--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    return start("gateway", port, command, folder, environment)


def start(
    name: str, port: int, command: list[str], folder: Path, environment: dict[str, str]
) -> Process:
    log = folder / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            cwd=folder,
            preexec_fn=die_with_parent,  # a test run that is killed leaves no engine
        )  # fmt: skip
    return Process(name, port, process, log)
