"""Migrations on both databases: up, check, down, together, from an unknown revision; D11 to D13."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, make_url, text

import migrations
from controlplane.db.migrate import _connect, alembic_config, migrate
from controlplane.db.session import sync_url
from controlplane.db.tables import Base
from workers.core.errors import ConfigError

SCRIPTS = Path(migrations.__file__).parent
HEAD = ScriptDirectory.from_config(alembic_config()).get_current_head()


def tables(url):
    engine = create_engine(sync_url(url))
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def execute(url, statement):
    engine = create_engine(sync_url(url))
    try:
        with engine.begin() as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


def test_up_check_down_and_up_again(empty_url):
    url = make_url(empty_url)
    migrate(url)
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}
    with _connect(url) as connection, connection.begin():
        command.check(alembic_config(connection))
        command.downgrade(alembic_config(connection), "base")
    assert tables(url) == {"alembic_version"}
    assert migrate(url) == migrate(url)


def test_there_is_one_head():
    assert len(ScriptDirectory.from_config(alembic_config()).get_heads()) == 1


async def test_d11_three_starters_one_migrates(empty_url):
    url = make_url(empty_url)
    heads = await asyncio.gather(*(asyncio.to_thread(migrate, url) for _ in range(3)))
    assert len(set(heads)) == 1
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}


def test_a_lock_file_that_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / "p.db.migrate.lock").mkdir()
    with pytest.raises(ConfigError, match="lock file cannot be written"):
        migrate(make_url(f"sqlite+aiosqlite:///{tmp_path}/p.db"))


def _with_extra(folder, name, body):
    """A copy of the scripts and one more."""
    for part in ("env.py", "script.py.mako"):
        (folder / part).write_text((SCRIPTS / part).read_text())
    versions = folder / "versions"
    versions.mkdir()
    for script in (SCRIPTS / "versions").glob("*.py"):
        (versions / script.name).write_text(script.read_text())
    (versions / f"{name}.py").write_text(body)
    return folder


def test_d12_two_heads_are_refused(empty_url, tmp_path):
    scripts = _with_extra(tmp_path, "0001_other", "revision = '0001_other'\ndown_revision = None\n")
    with pytest.raises(ConfigError, match="2 heads"):
        migrate(make_url(empty_url), scripts)


FAILING = f"""
import sqlalchemy as sa
from alembic import op
revision = "9999_bad"
down_revision = "{HEAD}"
def upgrade():
    with op.batch_alter_table("policy_revisions") as batch:
        batch.add_column(sa.Column("colour", sa.Text()))
    op.execute("INSERT INTO no_such_table VALUES (1)")
def downgrade():
    pass
"""


def test_d13_a_failed_step_leaves_the_old_schema_and_rows(empty_url, tmp_path):
    url = make_url(empty_url)
    migrate(url)
    _fill(url)
    with pytest.raises(ConfigError, match="refused"):
        migrate(url, _with_extra(tmp_path, "9999_bad", FAILING))
    assert migrate(url) == HEAD
    engine = create_engine(sync_url(url))
    try:
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM policies")) == 1
            columns = {c["name"] for c in inspect(connection).get_columns("policy_revisions")}
        assert "colour" not in columns
    finally:
        engine.dispose()


REBUILDING = FAILING.replace("9999_bad", "9999_good").replace(
    '    op.execute("INSERT INTO no_such_table VALUES (1)")\n', ""
)


def test_d13_rebuilding_a_table_keeps_rows_that_refer_to_it(empty_url, tmp_path):
    url = make_url(empty_url)
    migrate(url)
    _fill(url)
    assert migrate(url, _with_extra(tmp_path, "9999_good", REBUILDING)) == "9999_good"
    engine = create_engine(sync_url(url))
    try:
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM policies")) == 1
            assert inspect(connection).get_foreign_keys("policies")
    finally:
        engine.dispose()


def _fill(url):
    execute(
        url,
        "INSERT INTO policy_revisions VALUES"
        " ('slo', 'default', 1, '{}', 'a', '', '2026-01-01 00:00:00')",
    )
    execute(url, "INSERT INTO policies VALUES ('slo', 'default', 1)")


def test_an_unknown_revision_is_refused_in_clear_words(empty_url):
    url = make_url(empty_url)
    migrate(url)
    execute(url, "UPDATE alembic_version SET version_num = '0099_future'")
    with pytest.raises(ConfigError, match=rf"0099_future.*{HEAD}.*newer version"):
        migrate(url)


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "perilune.db"
    path.write_text("hello, this is no database at all" * 100)
    with pytest.raises(ConfigError, match=r"not a database.*Move the file away"):
        migrate(make_url(f"sqlite+aiosqlite:///{path}"))


def test_sqlite_runs_with_the_pragmas_that_we_want(sqlite_url):
    url = make_url(sqlite_url)
    with _connect(url) as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
    assert url.database is not None
    with sqlite3.connect(url.database) as plain:
        assert plain.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
    plain.close()
