"""Processes of the gateway bench: canned workers and control plane, a node agent whose pool holds
the prompts' beginnings, the gateway, and the peer. All end with it."""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx2
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from controlplane.bench.gateway_load import MODEL, Kind
from controlplane.bench.processes import ROOT, free_port, running, wait_port, wait_socket
from controlplane.bench.tokenise import TEXT
from controlplane.gateway.bodies import parse
from controlplane.gateway.prompts import PromptTokenizer
from workers.client import AgentClient, make_hello
from workers.core.errors import PeriluneError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.messages import StoredSlot
from workers.core.stats_messages import NamespaceSpec

PEER_PROGRAM: Final = ROOT / ".venv-peers" / "bin" / "vllm-router"
PEER_POLICY: Final = "cache_aware"
START_SECONDS: Final = 60.0
NODE: Final = "n1"
BLOCK_TOKENS: Final = 64
_SLOT_BYTES: Final = 2048
_NUM_SLOTS: Final = 8192
_SPEC: Final = NamespaceSpec(
    model_id=MODEL, weights_version="1", kv_dtype="float32", page_layout="LBHNC", isa="vec",
    page_bytes=(256,), engine_block_tokens=16, block_tokens=BLOCK_TOKENS, tp_size=1,
    rank_layout="tp1",
)  # fmt: skip
NAMESPACE: Final = namespace_digest(_SPEC)


class NoPeerError(PeriluneError):
    """Asked to compare with a peer that is not installed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Ports:
    """Of what stands behind the proxies."""

    prefill: int
    decode: int
    control_plane: int


@dataclass(slots=True)
class Proxy:
    """One that is measured."""

    port: int
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Of all its threads, to the nanosecond where the kernel counts so."""
        try:
            stats = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
            spent = sum(int(stat.read_text().split()[0]) for stat in stats)
        except (OSError, IndexError):
            spent = 0
        if spent:
            return spent / 1e9
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def upstream(view: Path) -> Iterator[Ports]:
    """The canned ones; `view` may be written until a gateway starts."""
    command = [sys.executable, "-m", "controlplane.bench.upstream", str(view)]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        line = process.stdout.readline() if readable else b""
        if not line:
            raise PeriluneError("the bench's workers did not start")
        yield Ports(*json.loads(line))


@contextmanager
def agent(folder: Path) -> Iterator[str]:
    """A node agent; its address."""
    path, slab = folder / "a.sock", f"perilune-bench-{uuid4().hex[:12]}.slab"
    command = [
        sys.executable, "-m", "workers", "agent", "--node-id", NODE, "--socket", str(path),
        "--slab-name", slab, "--slab-bytes", str(_NUM_SLOTS * _SLOT_BYTES),
        "--block-tokens", str(BLOCK_TOKENS), "--secret-folder", str(folder),
        "--tcp", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    with (folder / "agent.log").open("wb") as log:
        try:
            with running(command, stdout=log, stderr=log) as process:
                wait_socket(path, process, START_SECONDS)
                yield f"unix:{path}"
        finally:
            for left in Path("/dev/shm").glob(f"{slab}*"):
                left.unlink(missing_ok=True)


def fill_pool(address: str, tokenizer: PromptTokenizer, kind: Kind) -> None:
    """Have the node hold the blocks of the beginnings of that kind's prompts."""
    root = root_hash(NAMESPACE, None, None)
    client = AgentClient(address, make_hello("worker", "p1", namespace=_SPEC), START_SECONDS)
    try:
        for head in kind.heads():
            body = parse(json.dumps({"prompt": head}).encode(), chat=False)
            tokens = tokenizer.tokens(body)
            assert tokens is not None
            keys = block_hashes(root, tokens[0], BLOCK_TOKENS)
            slots = client.prepare_store("transfer:bench", NAMESPACE, b"", keys).slots
            # Nobody reads these blocks: their bytes and checksums do not matter.
            stored = [StoredSlot(ref.slot, ref.generation, 0) for ref in slots if ref is not None]
            client.complete_store("transfer:bench", stored)
            client.release("transfer:bench")
    finally:
        client.close()


def write_view(path: Path, ports: Ports, agent_address: str, model_path: Path) -> None:
    """A ClusterView of one prefill and one decode worker on one node, placed by cost."""
    worker = {
        "node_id": NODE, "model": MODEL, "state": "ready", "max_concurrent_requests": 1024,
        "namespace": NAMESPACE.hex(), "block_tokens": BLOCK_TOKENS,
    }  # fmt: skip
    workers = [
        {"id": name, "role": role, "url": f"http://127.0.0.1:{port}", **worker}
        for name, role, port in (("p1", "prefill", ports.prefill), ("d1", "decode", ports.decode))
    ]
    specs: dict[str, dict[str, Any]] = {
        "scheduling": {"placement": "cost", "max_concurrent_per_decode": 1024},
        "admission": {"window_tokens": 10_000_000},  # the peer has no queue before prefill either
    }
    view = {
        "revision": 1, "boot_id": "bench", "workers": workers,
        "nodes": [{"id": NODE, "events_endpoint": agent_address}],
        "models": [{"id": MODEL, "path": str(model_path)}],
        "policies": [
            {"kind": kind, "scope": "default", "revision": 1, "spec": spec}
            for kind, spec in specs.items()
        ],
    }  # fmt: skip
    path.write_text(json.dumps(view))


@contextmanager
def gateway(ports: Ports) -> Iterator[Proxy]:
    """Ours, under the canned control plane."""
    port = free_port()
    command = [sys.executable, "-m", "controlplane.gateway", "--port", str(port),
               "--control-plane", f"http://127.0.0.1:{ports.control_plane}",
               "--log-level", "warning"]  # fmt: skip
    with running(command) as process:
        wait_port(port, process, START_SECONDS)
        proxy = Proxy(port, psutil.Process(process.pid))
        deadline = time.monotonic() + START_SECONDS
        while counters(proxy).get("index_blocks", 0) == 0:
            if time.monotonic() > deadline:
                raise PeriluneError("the gateway has not heard of the agent's blocks")
            time.sleep(0.1)
        yield proxy


def counters(proxy: Proxy) -> dict[str, float]:
    """Of the gateway's /metrics, by name without prefix: those without labels."""
    text = httpx2.get(f"http://127.0.0.1:{proxy.port}/metrics", timeout=START_SECONDS).text
    prefix = "perilune_gateway_"
    rows = (line.removeprefix(prefix).split() for line in text.splitlines() if "{" not in line)
    return {row[0]: float(row[1]) for row in rows if len(row) == 2}


@contextmanager
def peer(ports: Ports) -> Iterator[Proxy]:
    """vllm-router in its P/D mode, with its own settings but for the policy."""
    if not PEER_PROGRAM.exists():
        raise NoPeerError(f"vllm-router is not installed ({PEER_PROGRAM}); run `make peers`")
    port = free_port()
    command = [
        str(PEER_PROGRAM), "--host", "127.0.0.1", "--port", str(port), "--policy", PEER_POLICY,
        "--vllm-pd-disaggregation", "--prefill", f"http://127.0.0.1:{ports.prefill}",
        "--decode", f"http://127.0.0.1:{ports.decode}", "--log-level", "warning",
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    with running(command, stdout=subprocess.DEVNULL) as process:
        wait_port(port, process, START_SECONDS)
        yield Proxy(port, psutil.Process(process.pid))


def make_model(folder: Path) -> Path:
    """A folder with a byte-level tokenizer of the bench's words, where no model is given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder
