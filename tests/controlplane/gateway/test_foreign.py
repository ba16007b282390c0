"""Workers that Perilune did not start: the handshakes of their connectors, checked field by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from foreign_engines import Fabric, ForeignEngine

from controlplane.gateway.app import Gateway
from controlplane.gateway.decode import decode
from controlplane.gateway.legs import PrefillReply
from controlplane.gateway.running import Running
from controlplane.gateway.settings import Settings, Timeouts

MODEL = "foreign"


class Rig:
    """Engines of one handshake and a gateway over a static file that lists them."""

    def __init__(self, gateway: Gateway, client: httpx2.AsyncClient, fabric: Fabric,
                 engines: dict[str, ForeignEngine]) -> None:  # fmt: skip
        self.gateway, self.client, self.fabric, self.engines = gateway, client, fabric, engines

    async def complete(self, **more: Any) -> httpx2.Response:
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 8, **more}
        return await self.client.post("/v1/completions", json=body)


def table(name: str, engine: ForeignEngine) -> str:
    lines = [f'id = "{name}"', f'url = "{engine.url}"', f'role = "{engine.role}"',
             f'model = "{MODEL}"', f'handshake = "{engine.handshake}"']  # fmt: skip
    if engine.handshake == "mooncake" and engine.role == "prefill":
        lines.append(f'bootstrap = "{engine.bootstrap}"')
    return "[[worker]]\n" + "\n".join(lines) + "\n"


@asynccontextmanager
async def running(folder: Path, handshake: str, *roles: str) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        fabric = Fabric()
        engines: dict[str, ForeignEngine] = {}
        for number, role in enumerate(roles, 1):
            engine = await ForeignEngine(fabric, role, handshake).start()  # type: ignore[arg-type]
            stack.push_async_callback(engine.stop)
            engines[f"{role[0]}{number}"] = engine
        file = folder / "workers.toml"
        file.write_text("".join(table(name, engine) for name, engine in engines.items()))
        timeouts = Timeouts(prefill=15, first_byte=15, idle=15, drain=1)
        gateway = Gateway(Settings(port=0, static_view=str(file), timeouts=timeouts))
        await gateway.start()
        stack.push_async_callback(gateway.stop, 1.0)
        client = httpx2.AsyncClient(base_url=gateway.url, timeout=20, verify=False)
        stack.push_async_callback(client.aclose)
        yield Rig(gateway, client, fabric, engines)
        assert fabric.wrong == []
        assert gateway.stats.in_flight == 0


@pytest.mark.parametrize("odd", ["7", -7, 1.5, 10**30, [1], {"a": 1}, True, None])
async def test_a39_an_engines_odd_usage_reaches_the_client_and_no_counter(
    tmp_path: Path, odd: Any
) -> None:
    """A sum with a text ended the task, one with a negative number counted backwards."""
    async with running(tmp_path, "none", "prefill", "decode") as rig:
        usage = {"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": odd}
        for engine in rig.engines.values():
            engine.usage = usage
        assert (await rig.complete()).json()["usage"] == usage
        stream = await rig.complete(stream=True, stream_options={"include_usage": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        assert stream.status_code == 200
        stats = rig.gateway.stats
        assert (stats.failed, stats.output_tokens, stats.prompt_tokens) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_nixl_hands_leg_2_what_leg_1_said(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode") as rig:
        for _ in range(3):
            reply = await rig.complete(stream=stream)
            assert reply.status_code == 200, reply.text
        assert rig.fabric.taken == 3
        assert rig.fabric.staged == {}
        assert reply.text.endswith("data: [DONE]\n\n") if stream else reply.json()["choices"]


@pytest.mark.parametrize("said", [None, {}])
async def test_a11_a_reply_without_params_falls_to_decode(tmp_path: Path, said: Any) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode") as rig:
        rig.engines["p1"].reply_params = said
        reply = await rig.complete()
        assert reply.status_code == 200, reply.text
        assert "kv_transfer_params" not in rig.engines["d2"].bodies[0]
        assert rig.gateway.stats.handoff_missing == 1


async def test_a_clients_own_transfer_params_reach_no_foreign_engine(tmp_path: Path) -> None:
    async with running(tmp_path, "none", "prefill", "decode") as rig:
        reply = await rig.complete(kv_transfer_params={"remote_host": "10.0.0.9"})
        assert reply.status_code == 200, reply.text
        assert all("kv_transfer_params" not in e.bodies[0] for e in rig.engines.values())


async def test_none_is_two_plain_legs(tmp_path: Path) -> None:
    async with running(tmp_path, "none", "prefill", "decode") as rig:
        assert (await rig.complete()).status_code == 200
        assert [len(engine.bodies) for engine in rig.engines.values()] == [1, 1]
        assert rig.engines["d2"].bodies[0] == {"model": MODEL, "prompt": "a b c", "max_tokens": 8}


async def test_an_engine_of_both_roles_serves_in_one_leg(tmp_path: Path) -> None:
    async with running(tmp_path, "none", "both") as rig:
        assert (await rig.complete()).status_code == 200
        assert len(rig.engines["b1"].bodies) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_mooncake_legs_go_out_at_once_and_meet(
    tmp_path: Path, stream: bool, eventually: Callable[..., Awaitable[Any]]
) -> None:
    async with running(tmp_path, "mooncake", "prefill", "decode") as rig:
        known = lambda: rig.gateway._bootstraps.get("p1")  # noqa: E731
        await eventually(known, "the producer's engine id")
        reply = await rig.complete(stream=stream)
        assert reply.status_code == 200, reply.text
        params = rig.engines["d2"].bodies[0]["kv_transfer_params"]
        assert params["remote_bootstrap_addr"] == rig.engines["p1"].bootstrap
        assert params["remote_engine_id"] == "engine-1"
        assert rig.fabric.taken == 1


async def test_mooncake_without_a_bootstrap_answer_computes_on_decode(tmp_path: Path) -> None:
    async with running(tmp_path, "mooncake", "prefill", "decode") as rig:
        rig.gateway._bootstraps._known.clear()
        rig.gateway._bootstraps.get = lambda worker_id: None  # type: ignore[method-assign]
        assert (await rig.complete()).status_code == 200
        assert "kv_transfer_params" not in rig.engines["d2"].bodies[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a02_a03_a_client_that_leaves_between_the_legs_strands_nothing(
    tmp_path: Path, stream: bool, eventually: Callable[..., Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async with running(tmp_path, "nixl", "prefill", "decode") as rig:
        between = asyncio.Event()

        async def late(run: Running, prefilled: PrefillReply) -> None:
            between.set()
            await asyncio.sleep(20)
            await decode(run, prefilled)

        monkeypatch.setattr("controlplane.gateway.walk.decode", late)
        asked = asyncio.create_task(rig.complete(stream=stream))
        await asyncio.wait_for(between.wait(), 10)
        assert len(rig.fabric.staged) == 1
        asked.cancel()
        await eventually(lambda: not rig.fabric.staged, "the staged KV is taken")
        assert rig.fabric.taken == 1
        assert rig.engines["d2"].bodies[0]["max_tokens"] == 1
        assert rig.engines["d2"].bodies[0]["prompt"] == [1]
        await eventually(lambda: rig.gateway.stats.staged_released == 1)


async def test_a_decode_worker_that_refuses_leaves_the_staged_kv_to_the_next(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode", "decode") as rig:
        first = rig.gateway.cluster.workers["d2"].row
        await rig.engines["d2"].stop()
        for _ in range(2):
            assert (await rig.complete()).status_code == 200
        assert first.id in rig.gateway.cluster.workers
        assert rig.fabric.taken == 2
        assert rig.fabric.staged == {}


async def test_a07_a_failed_leg_1_is_retried_and_then_computed_on_decode(tmp_path: Path) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode") as rig:
        rig.engines["p1"].fail_with = 500
        reply = await rig.complete()
        assert reply.status_code == 200, reply.text
        assert "kv_transfer_params" not in rig.engines["d2"].bodies[0]
        assert rig.gateway.stats.decode_side_prefills == 1


@pytest.mark.parametrize("death", ["fails", "gone"])
async def test_what_a_dying_decode_worker_may_have_taken_is_read_by_no_other(
    tmp_path: Path, death: Literal["fails", "gone"]
) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode", "decode") as rig:
        assert (await rig.complete()).status_code == 200
        workers = [rig.engines["d2"], rig.engines["d3"]]
        first = next(worker for worker in workers if worker.bodies)  # and its connection is kept
        first.dies_of_taking = death
        for _ in range(8):
            assert (await rig.complete()).status_code == 200
            if rig.gateway.stats.retries_decode:
                break
        assert rig.gateway.stats.retries_decode == 1
        other = next(worker for worker in workers if worker is not first)
        legs = [body for body in other.bodies if body["prompt"] != [1]]
        assert "kv_transfer_params" not in legs[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_decode_worker_refuses_is_freed(
    tmp_path: Path, stream: bool, eventually: Callable[..., Awaitable[Any]]
) -> None:
    async with running(tmp_path, "nixl", "prefill", "decode") as rig:
        rig.engines["d2"].refuses = 1
        assert (await rig.complete(stream=stream)).status_code == 400
        await eventually(lambda: rig.gateway.stats.staged_released == 1)
        assert rig.fabric.staged == {}


@pytest.mark.parametrize("handshake", ["nixl", "mooncake"])
@pytest.mark.parametrize("more", [{"prompt": ["a b", "c d"]}, {"prompt": [[5], [6, 7]]}, {"n": 2}])
async def test_several_sequences_take_no_staged_kv(
    tmp_path: Path, handshake: str, more: dict[str, Any]
) -> None:
    async with running(tmp_path, handshake, "prefill", "decode") as rig:
        assert (await rig.complete(**more)).status_code == 200
        assert rig.engines["p1"].bodies == []
        assert "kv_transfer_params" not in rig.engines["d2"].bodies[0]


async def test_a_slow_bootstrap_server_is_no_reason_to_compute_on_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Awaitable[Any]]
) -> None:
    monkeypatch.setattr("controlplane.gateway.bootstraps.QUERY_SECONDS", 0.2)
    async with running(tmp_path, "mooncake", "prefill", "decode") as rig:
        bootstraps = rig.gateway._bootstraps
        await eventually(lambda: bootstraps.get("p1"), "the producer's engine id")
        rig.engines["p1"].bootstrap_gate.clear()
        bootstraps.ask_again()
        await eventually(lambda: bootstraps._slow.get("p1"), "a reading without an answer")
        assert (await rig.complete()).status_code == 200
        assert rig.fabric.taken == 1
        again = lambda: bootstraps.ask_again() or not bootstraps.get("p1")  # type: ignore[func-returns-value] # noqa: E731
        await eventually(again, "too many of them")
        rig.engines["p1"].bootstrap_gate.set()
