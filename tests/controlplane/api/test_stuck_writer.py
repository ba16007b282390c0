"""A writer that is stuck: whatever does not write goes on, who writes is told so in time."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager

import httpx2
import psycopg
import pytest
from sqlalchemy import make_url

from controlplane.db import session

READS = ("/nodes", "/workers", "/overview", "/audit?limit=5", "/decisions?limit=5", "/jobs")
PROMPT_SECONDS = 30.0
"""For all of them, on a busy machine: who had to wait for a writer would be refused within one."""
WRITERS = 30


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(session, "WRITE_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(session, "BUSY_TIMEOUT_MS", 500)


@asynccontextmanager
async def other_process(server, url):
    """Another session has locked what we write to."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(make_url(url).database, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
    else:
        connection = psycopg.connect(url.replace("+psycopg", ""))
        connection.execute("LOCK TABLE client_keys, models, nodes IN SHARE ROW EXCLUSIVE MODE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


@asynccontextmanager
async def own_writers(server, url):
    """As many of our own writers as can be do not end."""
    release, have = asyncio.Event(), []

    async def hold():
        async with server.plane.db.write():
            have.append(1)
            await release.wait()

    number = 1 if url.startswith("sqlite") else session.POOL_SIZE
    tasks = [asyncio.create_task(hold()) for _ in range(number)]
    async with asyncio.timeout(20):
        while len(have) < number:
            await asyncio.sleep(0.01)
    try:
        yield
    finally:
        release.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("stuck", [other_process, own_writers])
async def test_reads_and_signs_of_life_go_on(
    database_url, tmp_path, make_settings_for, serve, bodies, eventually, stuck
):
    settings = make_settings_for(database_url, tmp_path)
    headers = {"Authorization": f"Bearer {settings.token}"}
    async with (
        serve(settings) as server,
        httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http,
    ):

        async def write(name):
            return await http.post("/api/v1/keys", json={"tenant": name})

        async with stuck(server, database_url):
            writes = [asyncio.create_task(write(f"t{i}")) for i in range(WRITERS)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(PROMPT_SECONDS):
                for _ in range(3):
                    assert (await http.get("/health")).status_code == 200
                    assert (await http.get("/metrics")).status_code == 200
                    beat = {"incarnation": 1, "pool_stats": bodies["pool"]("n1", 1)}
                    answer = await http.post("/api/v1/nodes/n1/heartbeat", json=beat)
                    assert answer.status_code == 200, answer.text
                    for path in READS:
                        answer = await http.get(f"/api/v1{path}")
                        assert answer.status_code == 200, answer.text
            refused = await asyncio.gather(*writes)
        for answer in refused:
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1"
            assert "database" in answer.json()["detail"]
        assert (await write("after")).status_code == 201
        await eventually(lambda: not server.plane.nodes._nodes["n1"].dirty)


async def test_a_client_that_leaves_tears_no_write(
    database_url, tmp_path, make_settings_for, serve, eventually
):
    settings = make_settings_for(database_url, tmp_path)
    headers = {"Authorization": f"Bearer {settings.token}"}
    async with (
        serve(settings) as server,
        httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http,
    ):
        async with own_writers(server, database_url):
            with pytest.raises(httpx2.TimeoutException):
                await http.post("/api/v1/keys", json={"tenant": "left"}, timeout=0.3)
        await eventually(lambda: server.plane.keys.public())
        assert (await http.get("/api/v1/audit")).json()["items"][0]["verb"] == "key.create"
