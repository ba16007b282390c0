"""A gateway over emulated workers and a control plane of the test's own, all on real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from agent_process import AgentProcess
from odd_engines import Rig as OddRig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from controlplane.decisions.schemas import Decision
from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Limits, Settings, Timeouts
from controlplane.gateways.schemas import ClientKey, ClusterView, GatewayReport
from controlplane.nodes.schemas import Node
from workers.engines.emulated.api import Api
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.http import Exchange, Server
from workers.engines.emulated.worker import EngineConfig, WorkerSpec

MODEL = "tiny"
PATIENCE_SECONDS = 20.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE of 400 tokens with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and on"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 8192,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


async def eventually(check: Callable[[], Any], what: str = "") -> Any:
    """The first true value of `check` (which may be async), within a generous bound."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        value = check()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {PATIENCE_SECONDS:g} s: {what}")
        await asyncio.sleep(0.01)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[Any]]:
    return eventually


@pytest.fixture(name="make_tokenizer", scope="session")
def make_tokenizer_fixture() -> Callable[..., Path]:
    return make_tokenizer


class FakeControlPlane:
    """Serves the view and takes reports; checks both against the published schemas."""

    def __init__(self) -> None:
        self.view: dict[str, Any] = {}
        self.reports: list[GatewayReport] = []
        self.acknowledged = 0
        self.tokens: set[str] = set()
        self.fail_reports = False
        self.refusal: tuple[int, dict[str, Any]] | None = None  # of reports
        self._changed = asyncio.Event()
        self._server = Server(self._handle)
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        await self._server.start("127.0.0.1", self._port)
        self._port = self._server.port

    async def stop(self) -> None:
        await self._server.stop()

    async def restart(self, boot_id: str) -> None:
        self._server = Server(self._handle)
        self.view |= {"boot_id": boot_id}
        await self.start()

    def publish(self, **changes: Any) -> int:
        """A new revision."""
        self.view |= changes
        self.view["revision"] = self.view.get("revision", 0) + 1
        ClusterView.model_validate(self.view)
        self._changed.set()
        self._changed = asyncio.Event()
        return int(self.view["revision"])

    def decisions(self) -> dict[str, Decision]:
        """The last record of each request."""
        return {d.request_id: d for report in self.reports for d in report.decisions}

    async def ended(self, status: str | None = None) -> Decision:
        """The only request's record, once it has ended."""

        def found() -> Decision | None:
            rows = [d for d in self.decisions().values() if d.status != "running"]
            rows = [d for d in rows if status in (None, d.status)]
            return rows[-1] if rows else None

        return await eventually(found, f"a decision with status {status}")

    async def _handle(self, exchange: Exchange) -> None:
        self.tokens.add(exchange.headers.get("authorization", ""))
        if exchange.path == "/api/v1/view":
            await self._view(exchange)
        elif self.fail_reports:
            exchange.send(503, {})
        elif self.refusal is not None:
            exchange.send(*self.refusal)
        else:
            self.reports.append(GatewayReport.model_validate_json(bytes(exchange.body)))
            exchange.send(200, {})

    async def _view(self, exchange: Exchange) -> None:
        query = dict(part.split("=") for part in exchange.query.split("&"))
        after = int(query["after"]) if "after" in query else None
        if after is not None:
            self.acknowledged = max(self.acknowledged, after)
            if after == self.view["revision"]:
                await self._changed.wait()
        exchange.send(200, self.view)


@dataclass
class Rig:
    """Everything of one test. `settings` and `engine` may be changed before `start`."""

    folder: Path
    workers: tuple[str, ...] = ("p1:prefill", "p2:prefill", "d1:decode", "d2:decode")
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            model=MODEL, prefill_ms_per_token=0.02, decode_ms=1.0, prompt_tokens_details=True
        )
    )
    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(
        default_factory=lambda: Timeouts(prefill=20, first_byte=20, idle=20, drain=1)
    )
    policies: list[dict[str, Any]] = field(default_factory=list)
    agent: str = ""

    async def start(self) -> Rig:
        engine = replace(self.engine, model_path=str(self.folder))
        specs = [WorkerSpec(*spec.split(":"), port=0) for spec in self.workers]  # type: ignore[arg-type]
        self.fleet = Fleet(specs, engine, self.agent or None)
        await self.fleet.start()
        self.control_plane = FakeControlPlane()
        await self.control_plane.start()
        self.control_plane.publish(**self.make_view())
        settings = replace(
            self.settings, port=0, control_plane=self.control_plane.url, token="secret",
            limits=self.limits, timeouts=self.timeouts,
            agents=(self.agent,) if self.agent else (),
        )  # fmt: skip
        self.gateway = Gateway(settings)
        await self.gateway.start()
        self.client = httpx2.AsyncClient(
            base_url=self.gateway.url, timeout=PATIENCE_SECONDS, verify=False
        )
        ready = lambda: self.gateway.tokenizers.get(str(self.folder)) is not None  # noqa: E731
        await eventually(ready, "the view and its tokenizer")
        return self

    async def stop(self) -> None:
        await self.client.aclose()
        await self.gateway.stop(drain_seconds=1.0)
        await self.control_plane.stop()
        await self.fleet.stop()
        life = self.gateway.cluster
        life.slots.check_integrity()
        assert life.slots.num_waiting == 0
        assert self.gateway.stats.in_flight == 0
        assert all(not len(w.prefill_queue) for w in life.workers.values())
        assert not life.slots._holders
        life.dispatch.check_integrity()
        assert life.dispatch.num_held == 0
        life.expected.check_integrity()
        assert len(life.expected) == 0

    def make_view(self, **states: str) -> dict[str, Any]:
        """The view with all workers ready, but for `p1="draining"` and the like."""
        return {
            "boot_id": "test",
            "cluster": "test",
            "nodes": [],
            "workers": [self._worker(spec, states) for spec in self.workers],
            "models": [{"id": MODEL, "path": str(self.folder), "max_model_len": 8192}],
            "policies": self.policies,
            "client_keys": [],
        }

    def _worker(self, spec: str, states: dict[str, str]) -> dict[str, Any]:
        name, role = spec.split(":")
        return {
            "id": name,
            "node_id": "n1",
            "role": role,
            "model": MODEL,
            "url": self.fleet.urls[name],
            "state": states.get(name, "ready"),
            "engine": "emulated",
        }

    async def publish(self, **changes: Any) -> None:
        """Change the view, and wait until the gateway acts on it."""
        revision = self.control_plane.publish(**changes)
        await eventually(lambda: self.control_plane.acknowledged >= revision, "acknowledged")

    async def follow(self, agent: AgentProcess) -> None:
        """Have the view name the agent of the workers' node, which they do not report to."""
        now = datetime.now(UTC)
        node = Node(id="n1", state="ready", incarnation=1, joined_at=now, last_heartbeat_at=now,
                    heartbeat_age_seconds=0.0, events_endpoint=agent.address)  # fmt: skip
        await self.publish(nodes=[node.model_dump(mode="json")])
        await eventually(lambda: self.gateway._agents.num_subscribed == 1)

    def policy(self, kind: str, revision: int = 1, **spec: Any) -> dict[str, Any]:
        return {
            "kind": kind, "scope": "default", "revision": revision, "spec": spec, "author": "test",
            "created_at": datetime.now(UTC).isoformat(), "active": True,
        }  # fmt: skip

    def key(self, sha256: str, tenant: str) -> dict[str, Any]:
        return ClientKey(key_sha256=sha256, tenant=tenant).model_dump()

    def api(self, worker: str) -> Api:
        return self.fleet.apis[worker]

    def seen(self, *workers: str) -> list[dict[str, Any]]:
        """Bodies that these workers (or all) have received, as objects."""
        names = workers or tuple(self.fleet.apis)
        return [record["body"] for name in names for record in self.api(name).records]

    def prefill_bodies(self) -> list[dict[str, Any]]:
        return self.seen("p1", "p2")

    def decode_bodies(self) -> list[dict[str, Any]]:
        return self.seen("d1", "d2")

    async def complete(self, **body: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, **body})

    async def chat(self, text: str = "hello", **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": text}]
        full = {"model": MODEL, "messages": messages, **body}
        return await self.client.post("/v1/chat/completions", json=full)

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[str]:
        """`data:` of each event of a stream."""
        return [event async for event in self.events(path, **body)]

    async def events(self, path: str = "/v1/completions", **body: Any) -> AsyncIterator[str]:
        full = {"model": MODEL, "stream": True, **body}
        async with self.client.stream("POST", path, json=full) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield line[6:]


@pytest.fixture
async def rig(tokenizer_folder: Path) -> AsyncIterator[Rig]:
    """Not started: a test may change its settings, then `await rig.start()`."""
    made = Rig(tokenizer_folder)
    yield made
    if hasattr(made, "client"):
        await made.stop()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Running."""
    made = AgentProcess(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[OddRig]:
    """An engine that answers what it is told to, byte by byte, behind a gateway."""
    made = OddRig(tmp_path / "workers.toml")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[OddRig]:
    """And a second decode worker, which is sound."""
    made = OddRig(tmp_path / "workers.toml", second=True)
    await made.start()
    yield made
    await made.stop()
