"""Engine, pragmas and the unit of work. Nobody but `Database.write` commits.

Reads take `async with db.read() as session`; writes `async with db.write() as tx`. Neither may
be held open across a network call or a stream: a viewer costs no connection.
"""

from __future__ import annotations

import asyncio
import sqlite3
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from workers.core.errors import ConfigError

WRITE_WAIT_SECONDS = 10.0
COMMIT_SECONDS = 20.0
"""For a server that is gone; SQLite's thread cannot be stopped, its callers have bounds of their own."""
POOL_SIZE = 5
BUSY_TIMEOUT_MS = 5000
CONNECT_TIMEOUT_SECONDS = 5
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}
WRITE_OPTION = "perilune_write"


def parse_url(text: str) -> URL:
    """The database URL, or `ConfigError` naming field, value and what would work."""
    way_out = (
        "Use sqlite+aiosqlite:////path/perilune.db or postgresql+psycopg://user@host/database."
    )
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise ConfigError("--database-url", text, "not a database URL", way_out) from error
    shown = url.render_as_string(hide_password=True)
    if url.drivername not in DRIVERS.values():
        problem = f"no driver {url.drivername!r} here"
        raise ConfigError("--database-url", shown, problem, way_out)
    if url.drivername == DRIVERS["sqlite"]:
        _check_sqlite_path(url, shown, way_out)
    return url


def _check_sqlite_path(url: URL, shown: str, way_out: str) -> None:
    if not url.database or url.database == ":memory:":
        raise ConfigError("--database-url", shown, "needs a file", way_out)
    folder = Path(url.database).resolve().parent
    if not folder.is_dir():
        problem = f"folder {folder} does not exist"
        raise ConfigError("--database-url", shown, problem, f"mkdir -p {folder}")


def sync_url(url: URL) -> URL:
    """The same database for Alembic, which is synchronous."""
    return url.set(drivername="sqlite") if url.drivername == DRIVERS["sqlite"] else url


def prepare_sqlite(engine: Engine, *, foreign_keys: bool = True) -> None:
    """WAL, foreign keys, a busy timeout, and transactions that begin when we say so.

    `BEGIN IMMEDIATE` for writers: a deferred transaction that turns into a write fails at once
    when another writer is there, whatever the busy timeout.
    """

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",  # first: the next one may meet another starter
            "journal_mode=WAL",
            "synchronous=NORMAL",
            f"foreign_keys={'ON' if foreign_keys else 'OFF'}",
            "journal_size_limit=16777216",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITE_OPTION, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def prepare_postgres(engine: Engine) -> None:
    """A lock that another session holds is waited for as long as SQLite's."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET lock_timeout = {BUSY_TIMEOUT_MS}")
        cursor.close()
        connection.commit()


class SqliteConnection(sqlite3.Connection):
    """Closed means closed.

    SQLite keeps a closed connection alive while one of its statements has rows left to read. A
    cancelled SELECT leaves such a one: its transaction, and the write lock with it, would stay open
    until Python's garbage collector found the cursor ("zombie" in https://sqlite.org/c3ref/close.html).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        cursor = super().cursor(factory)
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        super().close()


@dataclass(slots=True)
class Transaction:
    """One write: its session, and what to tell the world once it is committed."""

    session: AsyncSession
    _on_commit: list[Callable[[], None]] = field(default_factory=list)
    _on_failure: list[Callable[[], None]] = field(default_factory=list)

    def after_commit(self, effect: Callable[[], None]) -> None:
        self._on_commit.append(effect)

    def after_failure(self, effect: Callable[[], None]) -> None:
        self._on_failure.append(effect)

    def end(self, *, committed: bool) -> None:
        for effect in self._on_commit if committed else self._on_failure:
            effect()


class Database:
    """The pool of one process. `close` ends it."""

    def __init__(self, url: URL) -> None:
        self.dialect = url.get_backend_name()
        arguments: dict[str, Any] = (
            {"factory": SqliteConnection}
            if self.dialect == "sqlite"
            else {"connect_timeout": CONNECT_TIMEOUT_SECONDS}
        )
        self.engine: AsyncEngine = create_async_engine(
            url,
            pool_size=POOL_SIZE,
            max_overflow=0 if self.dialect == "sqlite" else POOL_SIZE,
            pool_timeout=WRITE_WAIT_SECONDS,
            pool_pre_ping=self.dialect != "sqlite",
            connect_args=arguments,
        )
        self._writer = self.engine.execution_options(**{WRITE_OPTION: True})
        # SQLite has one writer: waiting here is fair, waiting in its busy handler is not.
        # Elsewhere writers that wait for locks of others leave connections to the readers.
        self._turns = asyncio.Semaphore(1 if self.dialect == "sqlite" else POOL_SIZE)
        self._ending: set[asyncio.Task[None]] = set()
        prepare = prepare_sqlite if self.dialect == "sqlite" else prepare_postgres
        prepare(self.engine.sync_engine)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self.engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Transaction]:
        """Commit when the block ends well, roll back when it does not. Waits at most 10 s.

        A commit that has begun is not cut short: whoever is cancelled meanwhile leaves, and what
        was to be told is told once it is known how it ended.
        """
        # not wait_for: it loses a cancellation that comes as the turn is had
        async with asyncio.timeout(WRITE_WAIT_SECONDS):
            await self._turns.acquire()
        session = AsyncSession(self._writer, expire_on_commit=False, autoflush=False)
        transaction = Transaction(session)
        try:
            yield transaction
        except BaseException:
            transaction.end(committed=False)
            await self._to_its_end(self._leave(session))
            raise
        await self._to_its_end(self._commit(transaction))

    async def _commit(self, transaction: Transaction) -> None:
        try:
            async with asyncio.timeout(None if self.dialect == "sqlite" else COMMIT_SECONDS):
                await transaction.session.commit()
        except BaseException:
            transaction.end(committed=False)
            raise
        else:
            transaction.end(committed=True)
        finally:
            await self._leave(transaction.session)

    async def _leave(self, session: AsyncSession) -> None:
        """Roll back what is open; the next writer comes when that is done."""
        try:
            await session.close()
        finally:
            self._turns.release()

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await a task of our own: a cancellation of the caller does not reach it."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: the caller may have left

    async def close(self) -> None:
        """Wait, bounded, for writes that are being ended; then end the pool."""
        if self._ending:
            _, late = await asyncio.wait(set(self._ending), timeout=WRITE_WAIT_SECONDS)
            for task in late:
                task.cancel()
        await self.engine.dispose()
