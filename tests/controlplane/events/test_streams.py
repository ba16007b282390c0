"""The event stream over a real socket: resume, restart, D14; and both clients."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import httpx2
import pytest
from serving import Serving

from controlplane.client import AsyncClient, Client, ClientError, UnreachableError
from controlplane.fleet.schemas import WorkerRegistration
from controlplane.policies.schemas import PolicyPut, PolicyRevert
from controlplane.tokens.schemas import KeyCreate


async def wait_for(client, event_type, **more):
    async with asyncio.timeout(20), aclosing(client.events(**more)) as events:
        async for event in events:
            if event.type == event_type:
                return event
    raise AssertionError("unreachable")


async def test_resumes_where_it_was(sqlite_url, tmp_path, make_settings_for, serve):
    async with (
        serve(make_settings_for(sqlite_url, tmp_path)) as server,
        AsyncClient(server.url, server.token, actor="ana") as client,
    ):
        position = server.plane.bus.last_id
        await client.create_key(KeyCreate(tenant="acme"))
        await client.create_key(KeyCreate(tenant="beta"))
        first = await wait_for(client, "audit", last_event_id=position)
        second = await wait_for(client, "audit", last_event_id=first.id)
        assert first.data["target"] == "key/1"
        assert second.data["target"] == "key/2"
        assert second.data["actor"] == "ana"
        reset = await wait_for(client, "reset", last_event_id="elsewhere-1")
        assert reset.data == {}


async def test_ticks_carry_the_overview(sqlite_url, tmp_path, make_settings_for, serve):
    async with (
        serve(make_settings_for(sqlite_url, tmp_path)) as server,
        AsyncClient(server.url, server.token) as client,
    ):
        tick = await wait_for(client, "tick")
        assert tick.data["overview"]["cluster"] == "test"
        assert tick.data["overview"]["window_seconds"] == 900
        assert isinstance(tick.data["points"], dict)


async def test_a_client_survives_a_restart_and_is_told_to_read_again(
    sqlite_url, tmp_path, make_settings_for, serve, free_port, eventually
):
    settings = make_settings_for(sqlite_url, tmp_path)
    seen, states = [], []
    stopped = asyncio.Event()
    proxy = _Proxy(free_port())

    async def listen():
        async with (
            AsyncClient(proxy.url, settings.token) as client,
            aclosing(client.events(on_state=states.append)) as events,
        ):
            async for event in events:
                seen.append(event.type)
                if stopped.is_set():
                    return

    async with proxy:
        async with serve(settings) as server:
            proxy.target = server.url
            task = asyncio.create_task(listen())
            await eventually(lambda: "tick" in seen)
        await eventually(lambda: any(not state.connected for state in states))
        async with serve(settings) as server:
            proxy.target = server.url
            await eventually(lambda: "reset" in seen)
            stopped.set()
            await asyncio.wait_for(task, 20)
    assert states[-1].connected or any(state.connected for state in states[1:])


class _Proxy:
    """One address for a control plane that comes back on another port."""

    def __init__(self, port):
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.target = ""
        self._tasks = set()

    async def __aenter__(self):
        self._serving = Serving.streams(self._serve)
        await self._serving.start(self.port)
        return self

    async def __aexit__(self, *_error):
        await self._serving.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        try:
            host, _, port = self.target.removeprefix("http://").partition(":")
            upstream, back = await asyncio.open_connection(host, int(port))
            copies = [_copy(reader, back), _copy(upstream, writer)]
            await asyncio.gather(*copies)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _copy(reader, writer):
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    finally:
        writer.close()


async def test_d14_thirty_streams_and_the_api_still_answers(
    database_url, tmp_path, make_settings_for, serve, eventually
):
    async with serve(make_settings_for(database_url, tmp_path)) as server:
        ready, tasks = [], []

        async def listen():
            async with (
                httpx2.AsyncClient(timeout=30) as http,
                http.stream("GET", f"{server.url}/api/v1/events") as response,
            ):
                async for chunk in response.aiter_bytes():
                    ready.append(chunk)

        async with AsyncClient(server.url, server.token, timeout_seconds=30) as client:
            tasks = [asyncio.create_task(listen()) for _ in range(30)]
            await eventually(lambda: server.plane.bus.num_subscribers == 30)
            await eventually(lambda: len(ready) >= 30)
            for index in range(10):
                await client.create_key(KeyCreate(tenant=f"t{index}"))
                assert len((await client.decisions()).items) == 0
            assert len((await client.audit()).items) == 10
            pool = server.plane.db.engine.pool
            await eventually(lambda: pool.checkedout() == 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: server.plane.bus.num_subscribers == 0)


async def test_clients_speak_every_call(sqlite_url, tmp_path, make_settings_for, serve):
    """Reads and writes of both clients against the real thing; both have the same methods."""
    async with serve(make_settings_for(sqlite_url, tmp_path)) as server:

        def blocking():
            with Client(server.url, server.token, actor="ben") as client:
                return _use(client)

        await asyncio.to_thread(blocking)
        async with AsyncClient(server.url, server.token) as client:
            assert len(await client.workers()) == 0
            assert (await client.overview(60)).window_seconds == 60
            view = await client.view()
            assert await client.view(after=view.revision, wait=0.01) is None
            with pytest.raises(ClientError, match="No node 'x'"):
                await client.node("x")
    public = {name for name in dir(Client) if not name.startswith("_")} - {"close"}
    assert public <= set(dir(AsyncClient))
    async with AsyncClient("http://127.0.0.1:1", "t") as nowhere:
        with pytest.raises(UnreachableError, match="no answer from the control plane"):
            await nowhere.nodes()


def _use(client):
    assert client.health()["status"] == "ok"
    worker = WorkerRegistration(id="e1", role="both", model="m", url="http://h:1")
    assert client.register_worker(worker).state == "ready"
    client.remove_worker("e1", "done")
    policy = client.policy("slo", "default")
    body = PolicyPut(spec={**policy.spec, "mode": "off"}, reason="test")
    reply = client.put_policy("slo", "default", body, policy.revision)
    assert reply.active.revision == 2
    with pytest.raises(ClientError) as stale:
        client.put_policy("slo", "default", body, policy.revision)
    assert (stale.value.status, stale.value.field) == (412, "If-Match")
    assert stale.value.way_out
    client.revert_policy("slo", "default", PolicyRevert(revision=1))
    assert len(client.policy_revisions("slo", "default").items) == 3
    assert client.policy_revision("slo", "default", 1).spec["mode"] == "observe"
    key = client.create_key(KeyCreate(tenant="a"))
    listed = client.keys()
    assert [k.id for k in listed] == [key.id]
    client.delete_key(key.id)
    for read in (
        client.nodes, client.workers, client.models, client.policies, client.gateways,
        client.decisions, client.rejections, client.audit, client.matrix, client.cache_stats,
    ):  # fmt: skip
        read()
    assert client.series("requests").step_seconds == 10
    assert {row.actor for row in client.audit().items} == {"ben"}
