"""An engine's two halves of the connector around a real node agent, with plain tensors as cache."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from workers.client import AgentClient, make_hello
from workers.connector.scheduler_half import SchedulerHalf
from workers.connector.settings import ConnectorSettings
from workers.connector.worker_half import WorkerHalf
from workers.core.errors import AgentUnavailableError
from workers.core.stats_messages import NamespaceSpec

ROOT = Path(__file__).resolve().parents[2]
LAYERS, BLOCKS, ENGINE_BLOCK, BLOCK = 7, 40, 4, 8
WAIT = 30.0
TOKENS = list(range(100, 141))


class Agent:
    """A node agent's process."""

    def __init__(self, folder: Path, *extra: str) -> None:
        self.folder = folder
        self.extra = extra
        self.socket = folder / "n1.sock"
        self.slab = f"perilune-halves-{os.getpid()}-{folder.name}.slab"
        self.process: subprocess.Popen[bytes] | None = None
        self.client: AgentClient | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "workers", "agent", "--node-id", "n1"]
        command += ["--socket", str(self.socket), "--block-tokens", str(BLOCK)]
        command += ["--slab-name", self.slab, "--slab-bytes", str(1 << 20), *self.extra]
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        if self.client is not None:
            self.client.close()
        self.client = AgentClient(str(self.socket), make_hello("cli", "test"), 5.0)

    def wait_ready(self) -> None:
        """Until it answers; what it said where it ended instead."""

        def answers() -> bool:
            assert self.process is not None
            log = (self.folder / "agent.log").read_text
            assert self.process.poll() is None, log(errors="replace")
            return self._try_stats() is not None

        until(answers, "the agent's start")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WAIT)

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WAIT)

    def stats(self):
        return until(lambda: self._try_stats(), "the agent's statistics")

    def _try_stats(self):
        try:
            return self.client.stats()
        except AgentUnavailableError:
            return None


def until(check, what, seconds=WAIT):
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


class Engine:
    """What vLLM does with a connector, for one request at a time."""

    def __init__(
        self, agent: Agent, worker_id: str, kv_role: str, spec_changes=None, settings=None
    ) -> None:
        # Stores wait for what the agent says of them: a test of late answers says how long.
        bounds = {
            "call_timeout_seconds": 5.0,
            "start_timeout_seconds": WAIT,
            "store_step_seconds": 5.0,
        }
        self.settings = ConnectorSettings(
            agent_socket=str(agent.socket),
            worker_id=worker_id,
            block_tokens=BLOCK,
            engine_block_tokens=ENGINE_BLOCK,
            kv_role=kv_role,
            model_id="m",
            **(bounds | (settings or {})),
        )
        self.agent = agent
        self.spec_changes = spec_changes or {}
        self.cache = torch.zeros(LAYERS, BLOCKS, 2, ENGINE_BLOCK, 8)
        self.worker = WorkerHalf(self.settings, self.spec)
        self.scheduler: SchedulerHalf | None = None

    def spec(self, paged):
        values = {
            "model_id": "m",
            "weights_version": "1",
            "kv_dtype": paged.format.dtype,
            "page_layout": paged.format.shape,
            "isa": "test",
            "page_bytes": paged.format.page_bytes,
            "engine_block_tokens": ENGINE_BLOCK,
            "block_tokens": BLOCK,
            "tp_size": 1,
            "rank_layout": "tp1",
        }
        return NamespaceSpec(**(values | self.spec_changes))

    def start_without_agent(self) -> None:
        self.worker.register({f"layer.{i}": self.cache[i] for i in range(LAYERS)})
        self.scheduler = SchedulerHalf(self.settings, self.worker.namespace_spec)

    def start(self) -> None:
        self.agent.wait_ready()
        self.start_without_agent()
        until(lambda: self.scheduler._session.welcome, "the scheduler half's handshake")

    def stop(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        self.worker.close()

    def request(self, tokens, request_id="r", params=None, **changes):
        return fake_request(tokens, request_id, params, **changes)

    def begin(self, tokens, request_id="r", first_block=1, params=None, **changes):
        """Admit; the request and its step's orders."""
        request = self.request(tokens, request_id, params, **changes)
        self.scheduler.add(request)
        deadline = time.monotonic() + WAIT
        while (external := self.scheduler.match(request, 0)) is None:
            assert time.monotonic() < deadline, "a match that does not come"
            time.sleep(0.01)
        self.external = external
        ids = list(range(first_block, first_block + -(-len(tokens) // ENGINE_BLOCK)))
        self.scheduler.allocate(request, SimpleNamespace(get_block_ids=lambda: (ids,)), external)
        return request, self.scheduler.step(fake_output(request_id, external, len(tokens), ids))

    def load(self, orders, tokens=(), ids=()):
        """The forward pass; with `tokens` it computes what is not loaded."""
        self.worker.start_loads(orders)
        for layer in range(LAYERS):
            self.worker.before_layer(f"layer.{layer}")
            if tokens:
                fill(self.cache[layer], tokens, ids, self.external, layer)
        self.worker.finish_loads()

    def run(self, tokens, request_id="r", first_block=1, params=None, compute=True, **changes):
        """Admit, load, "compute", store, finish. Returns (external tokens, params, spoiled)."""
        request, orders = self.begin(tokens, request_id, first_block, params, **changes)
        external = self.external
        ids = list(range(first_block, first_block + -(-len(tokens) // ENGINE_BLOCK)))
        self.load(orders, tokens if compute else (), ids)
        self.worker.store(orders)
        spoiled = self.worker.take_spoiled()
        results = self.worker.take_results()
        if results is not None:
            self.scheduler.apply(results)
        return external, self.scheduler.finish(request), spoiled


def fill(layer_cache, tokens, ids, start, layer):
    """A "KV" that depends on token, position and layer."""
    for position in range(start, len(tokens)):
        block = ids[position // ENGINE_BLOCK]
        layer_cache[block, :, position % ENGINE_BLOCK] = tokens[position] + layer * 0.5 + position


def holds(cache, tokens, ids_start, num_tokens):
    expected = torch.zeros_like(cache)
    ids = list(range(ids_start, ids_start + -(-num_tokens // ENGINE_BLOCK)))
    for layer in range(LAYERS):
        fill(expected[layer], tokens[:num_tokens], ids, 0, layer)
    return torch.equal(cache[:, ids], expected[:, ids])


def fake_request(tokens, request_id="r", params=None, **changes):
    values = {
        "request_id": request_id,
        "prompt_token_ids": list(tokens),
        "num_tokens": len(tokens),
        "cache_salt": None,
        "lora_request": None,
        "kv_transfer_params": {"perilune": params} if params else None,
        "sampling_params": object(),
        "prompt_embeds": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "resumable": False,
        "status": SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    }
    return SimpleNamespace(**(values | changes))


def fake_output(request_id, computed, num_tokens, ids):
    new = SimpleNamespace(req_id=request_id, num_computed_tokens=computed, block_ids=(ids,))
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    )
    return SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request_id: num_tokens - computed},
    )
