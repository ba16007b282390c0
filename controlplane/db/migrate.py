"""Bring the schema to this version's head: once, whoever starts first.

Other starters wait for the lock (a file beside a SQLite database, an advisory lock on Postgres).
A migration runs in one transaction on both databases: a failed step leaves the old schema.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import URL, Connection, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

import migrations
from controlplane.db.session import (
    CONNECT_TIMEOUT_SECONDS,
    WRITE_OPTION,
    prepare_sqlite,
    sync_url,
)
from workers.core.errors import ConfigError

LOCK_WAIT_SECONDS = 60.0
ADVISORY_LOCK = 7_700_163_027
"""Any number that no other program uses for its lock in the same database."""


def alembic_config(connection: Connection | None = None, scripts: Path | None = None) -> Config:
    """Alembic's settings without an ini file."""
    config = Config()
    folder = scripts or Path(migrations.__file__).parent
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def migrate(url: URL, scripts: Path | None = None) -> str:
    """Upgrade to the single head and return its id. Blocks; raises `ConfigError`."""
    shown = url.render_as_string(hide_password=True)
    head = _single_head(scripts, shown)
    try:
        with _file_lock(url), _connect(url) as connection, _lock(connection), connection.begin():
            _check_known(connection, scripts, shown)
            command.upgrade(alembic_config(connection, scripts), "head")
            _check_foreign_keys(connection, shown)
    except OSError as error:
        problem = f"its lock file cannot be written ({error.strerror})"
        way_out = "Give this user the right to write in the database's folder."
        raise ConfigError("--database-url", shown, problem, way_out) from error
    except DBAPIError as error:
        problem = f"the database refused: {str(error.orig).strip().splitlines()[0]}"
        way_out = "Check that it runs, that it can be reached and that its disk has room."
        if _is_broken_file(problem):
            way_out = "Move the file away or put a backup in its place: a new one is made empty."
        raise ConfigError("--database-url", shown, problem, way_out) from error
    return head


def _is_broken_file(problem: str) -> bool:
    """SQLite's words for a file that is none of its own, or damaged."""
    return "is not a database" in problem or "is malformed" in problem


def _single_head(scripts: Path | None, shown: str) -> str:
    way_out = "Merge the heads (alembic merge) or install a release as it was published."
    try:
        heads = ScriptDirectory.from_config(alembic_config(None, scripts)).get_heads()
    except (CommandError, RevisionError) as error:
        problem = f"the migrations cannot be read: {error}"
        raise ConfigError("--database-url", shown, problem, way_out) from error
    if len(heads) != 1:
        problem = f"the migrations have {len(heads)} heads ({', '.join(sorted(heads))}), not one"
        raise ConfigError("--database-url", shown, problem, way_out)
    return heads[0]


def _check_known(connection: Connection, scripts: Path | None, shown: str) -> None:
    found = MigrationContext.configure(connection).get_current_heads()
    directory = ScriptDirectory.from_config(alembic_config(connection, scripts))
    known = {script.revision for script in directory.walk_revisions()}
    unknown = [revision for revision in found if revision not in known]
    if unknown:
        problem = (
            f"its schema is at revision {unknown[0]!r}, which this version does not know "
            f"(it knows up to {directory.get_current_head()!r})"
        )
        way_out = "Start the newer version that wrote it, or name another database."
        raise ConfigError("--database-url", shown, problem, way_out)


def _check_foreign_keys(connection: Connection, shown: str) -> None:
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        problem = f"the migration would leave {len(broken)} rows without what they refer to"
        raise ConfigError("--database-url", shown, problem, "It was rolled back; report it.")


@contextmanager
def _connect(url: URL) -> Iterator[Connection]:
    sqlite = url.get_backend_name() == "sqlite"
    arguments = {} if sqlite else {"connect_timeout": CONNECT_TIMEOUT_SECONDS}
    engine = create_engine(sync_url(url), poolclass=NullPool, connect_args=arguments)
    if sqlite:
        # batch mode rebuilds tables: with foreign keys on, that empties the tables that refer to them
        prepare_sqlite(engine, foreign_keys=False)
    try:
        with engine.connect().execution_options(**{WRITE_OPTION: True}) as connection:
            yield connection
    finally:
        engine.dispose()


@contextmanager
def _lock(connection: Connection) -> Iterator[None]:
    """Postgres' lock; SQLite has a file's, taken before the first connection."""
    if connection.dialect.name == "sqlite":
        yield
        return
    with connection.begin():
        connection.execute(text(f"SET lock_timeout = {int(LOCK_WAIT_SECONDS * 1000)}"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
    try:
        yield
    finally:
        with connection.begin():
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})


@contextmanager
def _file_lock(url: URL) -> Iterator[None]:
    """Held from before the first connection: making a new file a WAL one waits for nobody."""
    if url.get_backend_name() != "sqlite":
        yield
        return
    assert url.database is not None
    path = Path(url.database + ".migrate.lock")
    with path.open("a") as file:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    problem = f"another process has held it for {LOCK_WAIT_SECONDS:.0f} s"
                    way_out = f"See who holds it: fuser {path}"
                    raise ConfigError("migration lock", str(path), problem, way_out) from None
                time.sleep(0.05)
        yield  # closing the file releases the lock
