"""D10 in short: heartbeats, writers and readers at once; no 5xx, no write lost."""

from __future__ import annotations

import asyncio

import httpx2

SECONDS_BOUND = 60
HEARTBEATS, WRITES, READS = 300, 60, 50


async def test_d10_no_locked_database(database_url, tmp_path, make_settings_for, serve, bodies):
    settings = make_settings_for(database_url, tmp_path)
    headers = {"Authorization": f"Bearer {settings.token}"}
    statuses: list[int] = []

    async with (
        serve(settings) as server,
        httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http,
    ):

        async def send(method, path, **request):
            response = await http.request(method, f"/api/v1{path}", **request)
            statuses.append(response.status_code)

        async def agent(name):
            for index in range(HEARTBEATS // 10):
                leg = {
                    "transfer_id": f"{name}-{index}",
                    "worker_id": "d1",
                    "kv_role": "kv_consumer",
                }
                body = {
                    "incarnation": 1,
                    "pool_stats": bodies["pool"](name, 1),
                    "leg_reports": [leg],
                }
                await send("POST", f"/nodes/{name}/heartbeat", json=body)

        async def gateway(name):
            for index in range(WRITES // 4):
                body = {
                    "url": "u",
                    "pid": 1,
                    "view_revision": 0,
                    "stats": bodies["gateway"](requests_total=index),
                    "decisions": [bodies["decision"](f"{name}-{index}", at="2026-07-01T12:00:00Z")],
                }
                await send("POST", f"/gateways/{name}/report", json=body)
                await send("POST", "/keys", json={"tenant": f"{name}{index}"})

        async def reader():
            for _ in range(READS // 5):
                for path in ("/nodes", "/decisions?limit=20", "/overview", "/audit?limit=20"):
                    await send("GET", path)

        async with asyncio.timeout(SECONDS_BOUND):
            await asyncio.gather(
                *(agent(f"n{i}") for i in range(10)),
                *(gateway(f"g{i}") for i in range(4)),
                *(reader() for _ in range(5)),
            )
        assert {status for status in statuses if status >= 400} == set()
        decisions = (await http.get("/api/v1/decisions", params={"limit": 1})).json()
        assert decisions["total"] == WRITES
        assert len((await http.get("/api/v1/keys")).json()["items"]) == WRITES
