"""The unit of work: commits, rollbacks, effects, one writer at a time, URLs that cannot work."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import make_url, text

from controlplane.db.session import Database, parse_url
from workers.core.errors import ConfigError


@pytest.fixture
async def db(database_url):
    database = Database(make_url(database_url))
    yield database
    await database.close()


async def models(db):
    async with db.read() as session:
        return (await session.scalars(text("SELECT id FROM models ORDER BY id"))).all()


INSERT = "INSERT INTO models (id, path) VALUES (:id, 'x')"


async def test_commits_at_the_end_and_then_tells(db):
    told = []
    async with db.write() as tx:
        await tx.session.execute(text(INSERT), {"id": "m"})
        tx.after_commit(lambda: told.append("done"))
        tx.after_failure(lambda: told.append("failed"))
        assert told == []
    assert told == ["done"]
    assert await models(db) == ["m"]


async def test_an_error_undoes_all_and_tells_only_that(db):
    told = []

    async def fail():
        async with db.write() as tx:
            await tx.session.execute(text(INSERT), {"id": "m"})
            tx.after_commit(lambda: told.append("done"))
            tx.after_failure(lambda: told.append("failed"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert told == ["failed"]
    assert await models(db) == []


async def test_many_writers_lose_nothing(db):
    async def write(index):
        async with db.write() as tx:
            await tx.session.execute(text(INSERT), {"id": f"m{index:03}"})

    await asyncio.gather(*(write(index) for index in range(60)))
    assert len(await models(db)) == 60


async def test_a_writer_from_another_process_is_waited_for(sqlite_url):
    first, second = Database(make_url(sqlite_url)), Database(make_url(sqlite_url))
    try:

        async def write(db, prefix):
            for index in range(25):
                async with db.write() as tx:
                    await tx.session.execute(text("SELECT count(*) FROM models"))
                    await tx.session.execute(text(INSERT), {"id": f"{prefix}{index}"})

        await asyncio.gather(write(first, "a"), write(second, "b"))
        assert len(await models(first)) == 50
    finally:
        await first.close()
        await second.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "not a database URL"),
        ("mysql://root@h/db", "no driver"),
        ("sqlite:////tmp/x.db", "no driver"),
        ("postgresql://u@h/db", "no driver"),
        ("sqlite+aiosqlite://", "needs a file"),
        ("sqlite+aiosqlite:////no/such/folder/x.db", "does not exist"),
    ],
)
def test_a_url_that_cannot_work_is_named(url, words):
    with pytest.raises(ConfigError, match=words) as error:
        parse_url(url)
    assert error.value.field == "--database-url"
    assert error.value.way_out


def test_a_password_is_not_shown():
    with pytest.raises(ConfigError) as error:
        parse_url("mysql://root:hunter2@h/db")
    assert "hunter2" not in str(error.value)


async def test_a_cancellation_that_comes_with_the_lock_is_not_lost(sqlite_url):
    db = Database(make_url(sqlite_url))
    try:

        async def write_for_ever():
            while True:
                async with db.write():
                    await asyncio.sleep(0)

        async with db.write():
            task = asyncio.create_task(write_for_ever())
            for _ in range(5):
                await asyncio.sleep(0)
            db._turns.release()  # the waiter has it from now on, and has not run yet
            task.cancel()
            await db._turns.acquire()
        done, _ = await asyncio.wait([task], timeout=20)
        assert done, "it runs on"
        assert task.cancelled()
    finally:
        await db.close()
