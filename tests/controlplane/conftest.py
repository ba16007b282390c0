"""A control plane in the test's own loop, on SQLite and Postgres, with a clock that stands still."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
import uvicorn
from sqlalchemy import NullPool, create_engine, make_url, text

from controlplane.app import create_app
from controlplane.clock import Clock
from controlplane.db.migrate import migrate
from controlplane.db.tables import Base
from controlplane.gateways.schemas import HISTOGRAM_BOUNDS_SECONDS
from controlplane.loops.runner import Loops
from controlplane.metrics.exporter import Exporter
from controlplane.plane import Plane
from controlplane.settings import Settings

TOKEN = "test-token-0123456789"
START = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class StillClock:
    """Moves only when a test says so."""

    at: datetime = START
    mono: float = 1000.0

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.mono

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)
        self.mono += seconds


# --- databases ------------------------------------------------------------------------------


def _postgres_bin() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("no Postgres server in /usr/lib/postgresql (apt install postgresql)")
    return found[-1].parent


class PostgresServer:
    """A throwaway server on a Unix socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self._bin = _postgres_bin()
        self._user: dict[str, Any] = {}
        self.role = pwd.getpwuid(os.getuid()).pw_name
        if os.getuid() == 0:  # the server refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(folder, account.pw_uid, account.pw_gid)
            self._user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            self.role = "postgres"

    def start(self) -> None:
        data = self.folder / "data"
        self._run("initdb", "-D", str(data), "-A", "trust", "-U", self.role, "--no-sync")
        options = (
            f"-k {self.folder} -c listen_addresses='' -c fsync=off -c synchronous_commit=off"
            " -c full_page_writes=off -c max_connections=60 -c shared_buffers=32MB"
        )
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(data), "-w", "-t", "60", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / program), *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            timeout=90,
            **self._user,
        )

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://{self.role}@/{name}?host={self.folder}"

    def create(self) -> str:
        """A new database; its URL."""
        self.count += 1
        name = f"test_{self.count}"
        place = f"host={self.folder} user={self.role} dbname=postgres"
        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    folder = Path(tempfile.mkdtemp(prefix="perilune-pg-", dir="/tmp"))
    server = PostgresServer(folder)
    try:
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "perilune.db"
    migrate(make_url(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresServer) -> str:
    url = postgres.create()
    migrate(make_url(url))
    return url


DIALECTS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without any table."""
    if dialect == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create()


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    path = tmp_path / "perilune.db"
    shutil.copy(migrated_sqlite, path)
    return f"sqlite+aiosqlite:///{path}"


@pytest.fixture
def database_url(dialect: str, request: pytest.FixtureRequest) -> str:
    """A database at the head of the migrations."""
    if dialect == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    url = str(request.getfixturevalue("migrated_postgres"))
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        names = ", ".join(table.name for table in Base.metadata.sorted_tables)
        connection.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
    return url


# --- the control plane ----------------------------------------------------------------------


def settings_for(url: str, folder: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "database_url": make_url(url),
        "token": TOKEN,
        "token_file": folder / "token",
        "data": folder,
        "cluster": "test",
        "load_pages": False,
        **changes,
    }
    return Settings(**values)


def pool_stats(node_id: str, incarnation: int, **changes: Any) -> dict[str, Any]:
    """A `PoolStats` as an agent sends it."""
    return {
        "type": "PoolStats",
        "node_id": node_id,
        "incarnation": incarnation,
        "uptime_seconds": 1.0,
        "capacity_blocks": 100,
        "used_blocks": 10,
        "pinned_blocks": 1,
        "pending_blocks": 0,
        "block_bytes": 1024,
        "slab_bytes": 102_400,
        "rss_bytes": 50_000_000,
        "write_queue_blocks": 0,
        "write_queue_bound": 500,
        **changes,
    }


def tier_stats(tier: str) -> dict[str, Any]:
    """One tier of a `PoolStats`."""
    return {
        "tier": tier,
        "capacity_blocks": 100,
        "used_blocks": 10,
        "capacity_bytes": 102_400,
        "used_bytes": 10_240,
        "free_device_bytes": 4096,
    }


def worker_status(worker_id: str, role: str = "prefill", **changes: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "role": role,
        "model": "m",
        "url": f"http://127.0.0.1/{worker_id}",
        "state": "ready",
        **changes,
    }


def gateway_stats(started_at: datetime = START, **changes: Any) -> dict[str, Any]:
    empty = {"counts": [0] * (len(HISTOGRAM_BOUNDS_SECONDS) + 1), "sum_seconds": 0.0}
    return {
        "started_at": started_at.isoformat(),
        "ttft": empty,
        "tbt": empty,
        "queue": empty,
        **changes,
    }


def decision(request_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "at": START.isoformat(),
        "gateway_id": "gw-1",
        "model": "m",
        "status": "finished_stop",
        "transfer_id": f"t-{request_id}",
        "prefill_worker": "p1",
        "decode_worker": "d1",
        **changes,
    }


@dataclass
class Api:
    """A control plane and two ways to speak to it: with the token, and without."""

    plane: Plane
    clock: StillClock
    http: httpx2.AsyncClient
    anonymous: httpx2.AsyncClient
    app: Any
    made: dict[str, Any] = field(default_factory=dict)

    async def heartbeat(
        self, node_id: str, incarnation: int = 1, *, stats: bool = True, **changes: Any
    ) -> httpx2.Response:
        legs = changes.pop("leg_reports", [])
        acknowledged = changes.pop("acknowledged_commands", [])
        body = {
            "incarnation": incarnation,
            "events_endpoint": f"unix:/run/{node_id}.sock",
            "pool_stats": pool_stats(node_id, incarnation, **changes) if stats else None,
            "leg_reports": legs,
            "acknowledged_commands": acknowledged,
        }
        return await self.http.post(f"/api/v1/nodes/{node_id}/heartbeat", json=body)

    async def report(
        self,
        gateway_id: str = "gw-1",
        *,
        decisions: list[dict[str, Any]] | None = None,
        **stats: Any,
    ) -> httpx2.Response:
        body = {
            "url": "http://127.0.0.1:8000",
            "pid": 1,
            "view_revision": stats.pop("view_revision", 0),
            "stats": gateway_stats(**stats),
            "decisions": decisions or [],
        }
        return await self.http.post(f"/api/v1/gateways/{gateway_id}/report", json=body)

    async def get(self, path: str, **params: Any) -> Any:
        response = await self.http.get(f"/api/v1{path}", params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def second(self) -> None:
        """One second passes; its statistics are closed."""
        at = int(self.clock.now().timestamp())
        self.clock.advance(1)
        self.plane.sweep()
        self.plane.stats.second(at)


@asynccontextmanager
async def running_api(settings: Settings) -> AsyncIterator[Api]:
    """Without its loops: tests move the clock and call what the loops would."""
    clock = StillClock()
    app = create_app(settings, clock)
    plane: Plane = app.state.plane
    app.state.exporter = Exporter(plane, Loops(plane))
    transport = httpx2.ASGITransport(app=app)
    base = "http://127.0.0.1"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    try:
        await plane.load()
        async with (
            httpx2.AsyncClient(transport=transport, base_url=base, headers=headers) as http,
            httpx2.AsyncClient(transport=transport, base_url=base) as anonymous,
        ):
            yield Api(plane, clock, http, anonymous, app)
    finally:
        await plane.close()


ApiFactory = Callable[..., Any]


@pytest.fixture
async def api(sqlite_url: str, tmp_path: Path) -> AsyncIterator[Api]:
    """On SQLite only: for what does not depend on the database."""
    async with running_api(settings_for(sqlite_url, tmp_path)) as running:
        yield running


@pytest.fixture
async def both(database_url: str, tmp_path: Path) -> AsyncIterator[Api]:
    """On SQLite and on Postgres."""
    async with running_api(settings_for(database_url, tmp_path)) as running:
        yield running


@pytest.fixture
def run_api() -> Callable[[Settings], Any]:
    return running_api


@pytest.fixture
def make_settings_for() -> Callable[..., Settings]:
    return settings_for


@pytest.fixture
def bodies() -> dict[str, Callable[..., dict[str, Any]]]:
    """Builders of what agents and gateways send."""
    return {
        "decision": decision,
        "worker": worker_status,
        "pool": pool_stats,
        "tier": tier_stats,
        "gateway": gateway_stats,
    }


@dataclass
class Served:
    """A control plane behind a real socket, with its loops."""

    url: str
    plane: Plane
    token: str = TOKEN


@asynccontextmanager
async def served(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Served]:
    app = create_app(settings, clock)
    plane: Plane = app.state.plane
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(30):
            while not server.started:
                assert not task.done(), "the server did not start"
                await asyncio.sleep(0.02)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", plane)
    finally:
        plane.close_streams()
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
def serve() -> Callable[..., Any]:
    return served


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Poll until a condition holds; generous, for a busy machine."""

    async def wait(condition: Callable[[], Any], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while True:
                result = condition()
                if asyncio.iscoroutine(result):
                    result = await result
                if result:
                    return
                await asyncio.sleep(0.05)

    return wait
