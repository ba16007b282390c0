"""Workers are removed, renamed, moved and changed while requests run: by SIGHUP, or by views."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import httpx2
import pytest
import structlog
from msgspec import structs

from controlplane.gateway.app import Gateway
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.settings import Settings, Timeouts
from controlplane.gateway.stats import Stats
from controlplane.gateway.wire import View
from workers.engines.emulated.faults import Faults
from workers.engines.emulated.fleet import Fleet
from workers.engines.emulated.worker import EngineConfig, WorkerSpec

ENGINES = ("e1", "e2", "e3", "e4", "e5", "e6")
BROKEN = (
    '[[worker]]\nurl = "http://127.0.0.1:1"\nrole = "pre',
    '[[worker]]\nurl = "http://127.0.0.1:1"\nrole = "router"\nmodel = "tiny"\n',
    '[[worker]]\nurl = "127.0.0.1:1"\nrole = "both"\nmodel = "tiny"\n',
    "",
)


def table(row: dict[str, Any]) -> str:
    return "[[worker]]\n" + "".join(f"{name} = {json.dumps(row[name])}\n" for name in row)


class Served:
    """A gateway with a static file, in front of six engines of one model."""

    def __init__(self, folder: Any, file: Any) -> None:
        self.file = file
        config = EngineConfig(
            model="tiny", model_path=str(folder), prefill_ms_per_token=0.02, decode_ms=2.0
        )
        self.fleet = Fleet([WorkerSpec(name, "prefill", port=0) for name in ENGINES], config)
        self.timeouts = Timeouts(prefill=20, first_byte=20, idle=20, slot=5, drain=1)

    async def start(self) -> None:
        """With e1 for prefill, e2 for decode."""
        await self.fleet.start()
        self.write(*self.usual)
        settings = Settings(port=0, static_view=str(self.file), timeouts=self.timeouts)
        self.gateway = Gateway(settings)
        await self.gateway.start()
        self.client = httpx2.AsyncClient(base_url=self.gateway.url, timeout=30)

    @property
    def usual(self) -> list[dict[str, Any]]:
        return [self.row("e1", "prefill"), self.row("e2", "decode")]

    def row(self, name: str, role: str, engine: str = "", **more: Any) -> dict[str, Any]:
        url = self.fleet.urls[engine or name]
        return {"id": name, "role": role, "url": url, "model": "tiny"} | more

    def write(self, *rows: dict[str, Any], text: str = "") -> None:
        self.file.write_text(text or "\n".join(map(table, rows)))

    async def reread(self, *rows: dict[str, Any], text: str = "") -> None:
        """As it is done on SIGHUP; returns when the file has been read."""
        self.write(*rows, text=text)
        self.gateway.reload_static()
        while self.gateway._rereading._task is not None:
            await asyncio.sleep(0.005)

    async def ask(self, prompt: str, tokens: int, *, stream: bool = True) -> tuple[int, str]:
        """Status, and how the answer ended: whole, or an error's message."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        response = await self.client.post("/v1/completions", json=body | {"stream": stream})
        text = response.text
        if response.status_code != 200:
            return response.status_code, response.json()["error"]["message"]
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == tokens
            return 200, "whole"
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if lines[-1] == "[DONE]":
            assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
            return 200, "whole"
        return 200, str(json.loads(lines[-1])["error"]["message"])

    async def check_nothing_is_left(self, eventually: Any) -> None:
        cluster, stats = self.gateway.cluster, self.gateway.stats
        await eventually(lambda: stats.in_flight == 0, "all have ended")
        await eventually(
            lambda: not any(state.upstream.num_connections for state in cluster.retired),
            "no connection to who is listed no more",
        )
        cluster.slots.check_integrity()
        cluster.dispatch.check_integrity()
        assert not cluster.slots._holders
        assert cluster.dispatch.num_held == 0
        assert len(cluster.expected) == 0
        assert not self.gateway._context.running
        assert all(not len(state.prefill_queue) for state in cluster.workers.values())
        ends = [server.num_connections for server in self.fleet._servers.values()]
        kept = sum(state.upstream.num_connections for state in cluster.workers.values())
        assert sum(ends) == kept
        for api in self.fleet.apis.values():
            assert api.worker.counters.running == 0

    async def stop(self) -> None:
        await self.client.aclose()
        await self.gateway.stop(drain_seconds=1.0)
        await self.fleet.stop()


@pytest.fixture
async def served(tokenizer_folder: Any, tmp_path: Any) -> AsyncIterator[Served]:
    made = Served(tokenizer_folder, tmp_path / "workers.toml")
    yield made
    if hasattr(made, "client"):
        await made.stop()


async def begun(served: Served, name: str, eventually: Any, **asked: Any) -> asyncio.Task[Any]:
    """A request that runs at this engine."""
    task = asyncio.create_task(served.ask("hello there", **asked))
    await eventually(lambda: served.fleet.apis[name].worker.counters.running, f"runs at {name}")
    return task


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("change", ["removed", "renamed", "moved", "role", "model"])
async def test_a_request_that_runs_on_a_worker_ends_there_whatever_the_table_says(
    served: Served, eventually: Any, change: str, stream: bool
) -> None:
    served_row = served.row
    await served.start()
    task = await begun(served, "e2", eventually, tokens=150, stream=stream)
    changed = {
        "removed": served_row("e3", "decode"),
        "renamed": served_row("other", "decode", "e2"),
        "moved": served_row("e2", "decode", "e3"),
        "role": served_row("e2", "prefill"),
        "model": served_row("e2", "decode", model="large"),
    }[change]
    await served.reread(served_row("e1", "prefill"), changed, served_row("e4", "decode"))
    assert not task.done()
    assert await task == (200, "whole")
    assert await served.ask("next", 2) == (200, "whole")
    assert served.gateway.cluster.health.ejected() == []
    await served.check_nothing_is_left(eventually)


async def test_what_an_engine_did_is_not_held_against_the_one_that_has_its_name_now(
    served: Served, eventually: Any
) -> None:
    await served.start()
    served.fleet.apis["e2"].faults.set(Faults(hang=True))
    task = await begun(served, "e2", eventually, tokens=5)
    moved = served.row("e2", "decode", "e3")
    await served.reread(served.row("e1", "prefill"), moved, served.row("e5", "decode"))
    await served.fleet.stop_worker("e2")
    assert await task == (200, "whole")  # by e5
    assert served.gateway.cluster.health.ejected() == []
    health = served.gateway.cluster.health
    health.failed("e2", 0.0, unreachable=True)
    await served.reread(served.row("e1", "prefill"), served.row("e2", "decode", "e4"))
    assert health.ejected() == []


@pytest.mark.parametrize("text", BROKEN)
async def test_a_wrong_file_leaves_the_table_and_says_why(served: Served, text: str) -> None:
    await served.start()
    before = served.gateway.cluster.view
    with structlog.testing.capture_logs() as logs:
        await served.reread(text=text or "\n")
    assert served.gateway.cluster.view is before
    (said,) = [entry for entry in logs if entry["event"] == "static_not_reread"]
    assert "--static" in said["error"]
    assert await served.ask("hello", 2) == (200, "whole")


async def test_a_view_that_cannot_be_taken_in_changes_nothing(served: Served) -> None:
    await served.start()
    cluster = served.gateway.cluster
    before = cluster.view
    row = replace_row(before, "e1", namespace="zz")
    with pytest.raises(ValueError, match="hex"):
        cluster.apply(row)
    assert cluster.view is before
    assert await served.ask("hello", 2) == (200, "whole")
    new = Cluster(Settings(), Stats())
    with pytest.raises(ValueError, match="hex"):
        new.apply(row)
    assert (new.has_view, new.workers) == (False, {})


def replace_row(view: View, name: str, **changes: Any) -> View:
    rows = [structs.replace(row, **changes) if row.id == name else row for row in view.workers]
    return structs.replace(view, workers=rows)


async def test_many_signals_make_few_readings_and_the_last_one_is_heard(served: Served) -> None:
    await served.start()
    first = served.gateway.cluster.view.revision
    for number in range(50):
        served.write(*served.usual, served.row(f"extra-{number}", "decode", "e3"))
        served.gateway.reload_static()
        await asyncio.sleep(0.01)
    while served.gateway._rereading._task is not None:
        await asyncio.sleep(0.01)
    assert "extra-49" in served.gateway.cluster.workers
    assert served.gateway.cluster.view.revision - first <= 25


def drawn(served: Served, rng: Random) -> list[dict[str, Any]]:
    """A table in which both roles are served, whoever has which name, engine and model."""
    engines = rng.sample(ENGINES, 6)
    names = rng.sample([f"w{number}" for number in range(8)], 6)
    roles = ["prefill", "decode", "decode", *rng.choices(["prefill", "decode", "both"], k=3)]
    models = ["tiny"] * 3 + rng.choices(["tiny", "large"], weights=[3, 1], k=3)
    rows = [
        served.row(name, role, engine, model=model, max_concurrent_requests=rng.randint(1, 8))
        for name, role, engine, model in zip(names, roles, engines, models, strict=True)
    ]
    return rows[: rng.randint(3, 6)]


@pytest.mark.parametrize("seed", range(3))
async def test_tables_change_under_load_and_nothing_is_lost(
    served: Served, eventually: Any, seed: int
) -> None:
    """Every engine lives, and some are listed all the time: each request has its whole answer."""
    rng = Random(seed)
    await served.start()
    answers: list[tuple[int, str]] = []
    over = asyncio.Event()

    async def client(number: int) -> None:
        chances = Random(f"{seed}/{number}")
        while not over.is_set():
            tokens, stream = chances.randint(1, 40), chances.random() < 0.5
            prompt = f"{number} {chances.random()}"
            if chances.random() < 0.2:
                asked = asyncio.create_task(served.ask(prompt, tokens, stream=stream))
                await asyncio.sleep(chances.random() * 0.05)
                asked.cancel()  # its client leaves
                await asyncio.gather(asked, return_exceptions=True)
            else:
                answers.append(await served.ask(prompt, tokens, stream=stream))

    clients = [asyncio.create_task(client(number)) for number in range(12)]
    for _ in range(60):
        text = rng.choice(BROKEN) if rng.random() < 0.2 else ""
        served.write(*drawn(served, rng), text=text)
        for _ in range(rng.choice((1, 1, 20))):
            served.gateway.reload_static()
        await asyncio.sleep(rng.random() * 0.05)
    await served.reread(*served.usual)
    over.set()
    await asyncio.gather(*clients)
    lost = [answer for answer in answers if answer != (200, "whole")]
    assert not lost, lost[:5]
    assert len(answers) > 50
    assert served.gateway.cluster.health.ejected() == []
    assert [state.row.id for state in served.gateway.cluster.workers.values()] == ["e1", "e2"]
    await served.check_nothing_is_left(eventually)


async def test_views_of_the_control_plane_rename_and_replace_workers_under_load(rig: Any) -> None:
    rng = Random(7)
    rig.engine = replace(rig.engine, decode_ms=4.0)
    rig.workers = ("p1:prefill", "p2:prefill", "d1:decode", "d2:decode", "d3:decode")
    await rig.start()

    async def client(number: int) -> None:
        for turn in range(4):
            prompt, tokens = f"{number}, {turn}", rng.randint(5, 40)
            events = await rig.stream(prompt=prompt, max_tokens=tokens, ignore_eos=True)
            assert events[-1] == "[DONE]", events[-1]

    clients = asyncio.gather(*(client(number) for number in range(12)))
    for number in range(30):
        view = rig.make_view()
        for row in view["workers"]:
            if rng.random() < 0.3:  # another name, or what is at one's address at another's
                row["id"] += f"-{number}"
            row["state"] = "draining" if row["id"] == f"d{rng.randint(1, 9)}" else "ready"
        moved = [row for row in view["workers"] if row["role"] == "decode"]
        urls = rng.sample([row["url"] for row in moved], len(moved))
        for row, url in zip(moved, urls, strict=True):
            row["url"] = url
        await rig.publish(**view)
        await asyncio.sleep(rng.random() * 0.03)
    await clients
    await rig.publish(**rig.make_view())
    assert rig.gateway.cluster.health.ejected() == []


async def test_a_prefill_worker_may_leave_in_the_moment_of_its_turn(served: Served) -> None:
    """Where handshakes are mixed, decode is chosen by it, anew after the wait."""
    await served.start()
    rows = [served.row("e1", "prefill"), served.row("e2", "decode")]
    ours = {"handshake": "perilune"}
    both = [*rows, served.row("e3", "prefill", **ours), served.row("e4", "decode", **ours)]
    await served.reread(*both)
    cluster, scheduler = served.gateway.cluster, served.gateway._context.scheduler
    plans = [scheduler.plan("tiny", [[1] * 40], None, 0.0) for _ in range(4)]
    assert cluster.mixed == {"tiny"}
    rows[0] = served.row("e5", "prefill")
    await served.reread(*rows, served.row("e6", "prefill", **ours), *both[3:])
    for plan in plans:
        assert plan.prefill[0].option.worker_id not in cluster.workers
        scheduler.choose_decode(plan, "tiny", 40)
        assert {option.worker_id for option in plan.free_decode} == {"e2", "e4"}
