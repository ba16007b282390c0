"""A write that is cancelled, anywhere: no lock stays, and memory believes what the database holds."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import time
from contextlib import closing

import pytest
from cutting import cut
from sqlalchemy import make_url, text

from controlplane.db.session import Database

INSERT = text("INSERT INTO models (id, path) VALUES (:id, 'x')")
COUNT = text("SELECT count(*) FROM models")
PROMPT_SECONDS = 4.0
"""Less than SQLite's busy timeout, after which a writer gives up."""


@pytest.fixture
async def db(database_url):
    database = Database(make_url(database_url))
    yield database
    await database.close()


@pytest.fixture
def no_collector():
    """What only the garbage collector would end does not end."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def insert(db, name, told=None):
    async with db.write() as tx:
        if told is not None:
            tx.after_commit(lambda: told.append(True))
            tx.after_failure(lambda: told.append(False))
        await tx.session.execute(COUNT)  # a cancelled SELECT is not read to its end
        await tx.session.execute(INSERT, {"id": name})
        await tx.session.execute(COUNT)


async def has(db, name):
    async with db.read() as session:
        query = text("SELECT count(*) FROM models WHERE id = :id")
        return bool(await session.scalar(query, {"id": name}))


@pytest.mark.parametrize("fresh", [False, True], ids=["pooled", "fresh"])
@pytest.mark.parametrize("more", [0, 2], ids=["once", "three-times"])
async def test_cancelled_at_any_wait_it_holds_no_lock(db, eventually, no_collector, more, fresh):
    for at in range(1, 200):
        if fresh:
            await db.engine.dispose()
        name, told = f"m{at}", []
        went_on = await cut(insert(db, name, told), at, more)
        start = time.monotonic()
        await insert(db, f"{name}-next")
        assert time.monotonic() - start < PROMPT_SECONDS, f"cancelled at wait {at}"
        if told:
            await eventually(lambda: not db._ending)
            assert told == [await has(db, name)], f"cancelled at wait {at}"
        if not went_on:
            break
    assert at > 5, "it was cut at hardly any place"
    await eventually(lambda: db.engine.pool.checkedout() == 0)


async def test_cancelled_reads_keep_neither_connections_nor_snapshots(db, eventually, no_collector):
    async def read():
        async with db.read() as session:
            await session.execute(COUNT)
            await session.execute(COUNT)

    for at in range(1, 200):
        if not await cut(read(), at):
            break
    await eventually(lambda: db.engine.pool.checkedout() == 0)
    await insert(db, "m")
    if db.dialect == "sqlite":
        with closing(sqlite3.connect(db.engine.url.database)) as connection:
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        assert not busy, "a reader that has left is in the way"


async def test_a_commit_that_has_begun_is_told_though_its_caller_has_left(db, eventually):
    told, begun, go_on = [], asyncio.Event(), asyncio.Event()

    async def write():
        async with db.write() as tx:
            tx.after_commit(lambda: told.append(True))
            tx.after_failure(lambda: told.append(False))
            await tx.session.execute(INSERT, {"id": "m"})
            commit = tx.session.commit

            async def slow_commit():
                begun.set()
                await go_on.wait()
                await commit()

            tx.session.commit = slow_commit

    task = asyncio.create_task(write())
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
    assert task.cancelled(), "it waits for the database"
    assert told == []
    go_on.set()
    await eventually(lambda: told)
    assert told == [True]
    assert await has(db, "m")


async def test_the_end_waits_for_a_commit_that_has_begun(database_url):
    db, told = Database(make_url(database_url)), []
    begun = asyncio.Event()

    async def write():
        async with db.write() as tx:
            tx.after_commit(lambda: told.append(True))
            await tx.session.execute(INSERT, {"id": "m"})
            commit = tx.session.commit

            async def slow_commit():
                begun.set()
                await asyncio.sleep(0.2)
                await commit()

            tx.session.commit = slow_commit

    task = asyncio.create_task(write())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    await db.close()
    assert told == [True]


async def test_a_loop_that_stood_still_over_a_timeout(db, eventually, no_collector):
    """Answers and the timeout come at the same moment then."""
    for number, stall in enumerate((0.0, 0.002, 0.005, 0.01, 0.02) * 4):
        name, told = f"m{number}", []
        try:
            async with asyncio.timeout(0.01):
                asyncio.get_running_loop().call_later(stall, time.sleep, 0.03)
                await insert(db, name, told)
        except TimeoutError:
            pass
        start = time.monotonic()
        await insert(db, f"{name}-next")
        assert time.monotonic() - start < PROMPT_SECONDS
        await eventually(lambda: not db._ending)
        if told:
            assert told == [await has(db, name)]
