"""A model whose workers run several connectors: only legs that fit make a pair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from foreign_engines import Fabric, ForeignEngine

from controlplane.gateway.app import Gateway
from controlplane.gateway.settings import Settings, Timeouts

MODEL = "foreign"
Eventually = Callable[..., Awaitable[Any]]


class Rig:
    """Engines by name, like `p-nixl`, and a gateway over a static file that lists them."""

    def __init__(
        self, gateway: Gateway, client: httpx2.AsyncClient, engines: dict[str, ForeignEngine]
    ) -> None:
        self.gateway, self.client, self.engines = gateway, client, engines

    async def complete(self, **more: Any) -> httpx2.Response:
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 8, **more}
        return await self.client.post("/v1/completions", json=body)

    def served(self) -> dict[str, int]:
        return {name: len(engine.bodies) for name, engine in self.engines.items()}


@asynccontextmanager
async def running(folder: Path, *names: str, slots: int = 16) -> AsyncIterator[Rig]:
    """`names`: role and handshake, and a number where there are several. At the end no engine has
    been told what its connector would not understand."""
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        engines: dict[str, ForeignEngine] = {}
        text = ""
        for name in names:
            role, handshake = name.split("-")[:2]
            whole: Any = {"p": "prefill", "d": "decode", "b": "both"}[role]
            engine = await ForeignEngine(fabric, whole, handshake).start()
            stack.push_async_callback(engine.stop)
            engines[name] = engine
            text += (
                f'[[worker]]\nid = "{name}"\nurl = "{engine.url}"\nrole = "{whole}"\n'
                f'model = "{MODEL}"\nhandshake = "{handshake}"\nmax_concurrent_requests = {slots}\n'
            )
        file = folder / "workers.toml"
        file.write_text(text)
        timeouts = Timeouts(prefill=15, first_byte=15, idle=15, drain=1)
        gateway = Gateway(Settings(port=0, static_view=str(file), timeouts=timeouts))
        await gateway.start()
        stack.push_async_callback(gateway.stop, 1.0)
        client = httpx2.AsyncClient(base_url=gateway.url, timeout=20, verify=False)
        stack.push_async_callback(client.aclose)
        yield Rig(gateway, client, engines)
        assert fabric.wrong == []
        assert fabric.staged == {}
        assert gateway.stats.in_flight == 0
        gateway.cluster.slots.check_integrity()
        assert gateway.cluster.dispatch.num_held == 0


async def test_legs_go_to_workers_of_one_handshake(tmp_path: Path) -> None:
    async with running(tmp_path, "p-nixl", "p-none", "d-none", "d-nixl") as rig:
        replies = await asyncio.gather(*(rig.complete() for _ in range(24)))
        assert {reply.status_code for reply in replies} == {200}
        served = rig.served()
        assert served["p-nixl"] == served["d-nixl"] > 0
        assert served["p-none"] == served["d-none"] > 0


async def test_the_pair_with_a_free_slot_is_taken(tmp_path: Path, eventually: Eventually) -> None:
    names = ("p-nixl", "d-nixl", "p-none", "d-none")
    async with running(tmp_path, *names, slots=1) as rig:
        for engine in rig.engines.values():
            engine.gate.clear()
        first = asyncio.create_task(rig.complete())
        await eventually(lambda: sum(rig.served().values()) == 1, "the first leg 1 is out")
        second = asyncio.create_task(rig.complete())
        prefills = lambda: (rig.served()["p-nixl"], rig.served()["p-none"])  # noqa: E731
        await eventually(lambda: prefills() == (1, 1), "the other pair serves the second")
        for engine in rig.engines.values():
            engine.gate.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]


async def test_a_request_behind_full_slots_waits_for_any_pair(
    tmp_path: Path, eventually: Eventually
) -> None:
    names = ("p-nixl", "d-nixl", "p-none", "d-none")
    async with running(tmp_path, *names, slots=1) as rig:
        for name in ("d-nixl", "d-none"):
            rig.engines[name].gate.clear()
        asked = [asyncio.create_task(rig.complete()) for _ in range(4)]
        waiting = lambda: rig.gateway.cluster.slots.num_waiting == 2  # noqa: E731
        await eventually(waiting, "two wait")
        for engine in rig.engines.values():
            engine.gate.set()
        assert [(await one).status_code for one in asked] == [200] * 4


async def test_leg_1_is_tried_again_only_where_the_held_slot_fits(tmp_path: Path) -> None:
    async with running(tmp_path, "p-nixl", "d-nixl", "p-none", "d-none") as rig:
        rig.engines["p-nixl"].fail_with = rig.engines["p-none"].fail_with = 500
        for _ in range(3):
            assert (await rig.complete()).status_code == 200
        assert rig.gateway.stats.decode_side_prefills == 3
        told = [e for name in ("d-nixl", "d-none") for e in rig.engines[name].bodies]
        assert len(told) == 3
        assert not any("kv_transfer_params" in body for body in told)


async def test_decode_moves_to_a_worker_that_fits(tmp_path: Path) -> None:
    async with running(tmp_path, "p-nixl", "d-nixl-1", "d-none", "d-nixl-2") as rig:
        await rig.engines["d-nixl-1"].stop()
        assert (await rig.complete()).status_code == 200
        assert rig.served()["d-nixl-2"] == 1
        assert rig.served()["d-none"] == 0
        assert rig.engines["d-nixl-2"].fabric.taken == 1


async def test_decode_that_moves_to_another_handshake_computes_the_prompt(
    tmp_path: Path, eventually: Eventually
) -> None:
    async with running(tmp_path, "p-nixl", "d-nixl", "d-none") as rig:
        rig.engines["d-nixl"].fail_with = 500
        assert (await rig.complete()).status_code == 200
        assert "kv_transfer_params" not in rig.engines["d-none"].bodies[0]
        rig.engines["d-nixl"].fabric.staged.clear()  # the engine that had the leg frees it


async def test_where_no_two_workers_fit_the_answer_says_which_and_what_to_do(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "p-nixl", "d-none") as rig:
        reply = await rig.complete()
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "30")
        error = reply.json()["error"]
        assert error["code"] == "handshakes_do_not_pair"
        assert "prefill workers have handshake nixl" in error["message"]
        assert "decode workers none" in error["message"]
        assert "register a worker of role both" in error["message"]
        assert sum(rig.served().values()) == 0
        whole = await rig.complete(echo=True)  # decode alone serves it
        assert whole.status_code == 200


@pytest.mark.parametrize("handshake", ["nixl", "none"])
async def test_a_worker_of_both_roles_serves_where_others_do_not_fit(
    tmp_path: Path, handshake: str
) -> None:
    async with running(tmp_path, "p-nixl", "d-none", f"b-{handshake}") as rig:
        for _ in range(4):
            assert (await rig.complete()).status_code == 200
