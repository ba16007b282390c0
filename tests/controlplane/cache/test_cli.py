"""`perilune cache ...` and `perilune jobs ...` against a served control plane and a real agent."""

from __future__ import annotations

import asyncio
import json

import pytest

from console import cli
from controlplane.loops import jobs as loop


class Terminal:
    """Runs one command line beside the loop that serves it."""

    def __init__(self, url, capsys, worker):
        self.url = url
        self.worker = worker
        self._capsys = capsys

    async def __call__(self, *argv, code=0):
        self._capsys.readouterr()
        found = await asyncio.to_thread(cli.run, [*argv, "--url", self.url])
        printed = self._capsys.readouterr()
        assert found == code, printed.err
        # the served control plane logs to the same place
        lines = [line for line in printed.out.splitlines() if "job ended" not in line]
        if "--json" in argv and lines:
            return json.loads("".join(lines))
        return printed.err if code else "\n".join(lines)


@pytest.fixture
async def terminal(
    serve, make_settings_for, sqlite_url, tmp_path, cluster, capsys, monkeypatch, eventually
):
    async with serve(make_settings_for(sqlite_url, tmp_path)) as server:
        monkeypatch.setenv("PERILUNE_TOKEN", server.token)
        (tmp_path / "token").write_text(server.token)
        agent = await cluster.agent(
            control_plane=server.url, token_file=tmp_path / "token", heartbeat_seconds=0.1
        )
        worker = await agent.worker()
        namespace = worker.namespace.hex()

        def is_known():
            return any(namespace in node.namespaces for node in server.plane.nodes.list())

        await eventually(is_known)
        yield Terminal(server.url, capsys, worker)


async def test_look_act_and_take_back(terminal):
    worker = terminal.worker
    keys = worker.chain("a", 4)
    await worker.store(keys)
    key = keys[-1].hex()

    stat = await terminal("cache", "stat")
    assert "tiny" in stat
    assert worker.namespace.hex()[:12] in stat
    listed = await terminal("cache", "list")
    assert listed.splitlines()[0].split()[:4] == ["NODE", "NAMESPACE", "TENANT", "KEY"]
    assert key in listed
    assert (await terminal("cache", "list", key, "--json"))["items"][0]["blocks"] == 4

    pinned = await terminal("cache", "pin", key, "--name", "sys", "--for", "2h", "--reason", "hot")
    assert "pin  " + key + "  done" in pinned
    assert "undo: perilune jobs undo 1 (unpin sys)" in pinned
    assert "sys" in await terminal("cache", "pins")
    assert "job 2" in await terminal("jobs", "undo", "1")
    assert "Nothing is pinned" in await terminal("cache", "pins")
    job = await terminal("cache", "purge", key, "--json")
    assert (job["state"], job["result"]["blocks"]) == ("done", 1)  # the last one of the chain
    rows = (await terminal("jobs", "list")).splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["3", "purge"], ["2", "unpin"], ["1", "pin"]]
    assert "undo: no. A purge cannot be undone" in await terminal("jobs", "show", "3")


async def test_purge_of_much_wants_the_name(terminal):
    worker = terminal.worker
    await worker.store(worker.chain("a", 2))
    await worker.store(worker.chain("b", 2))
    refused = await terminal("cache", "purge", "--node", "n1", code=2)
    assert "cannot be undone" in refused
    assert "Repeat the target's name to agree: n1" in refused
    wrong = await terminal("cache", "purge", "--node", "n1", "--confirm", "n2", code=2)
    assert "confirm = 'n2'" in wrong
    assert await worker.held(worker.chain("a", 2)) == 2
    short = worker.namespace.hex()[:8]
    done = await terminal("cache", "purge", "--namespace", short, "--yes", "--json")
    assert (done["state"], done["result"]["blocks"]) == ("done", 4)
    await worker.store(worker.chain("a", 2))
    assert "job 2 purge" in await terminal("cache", "purge", "--node", "n1", "--yes", "--no-wait")


async def test_jobs_that_do_not_end_well(terminal, monkeypatch):
    failed = await terminal("cache", "unpin", "--name", "nobody", code=1)
    assert "job 1 failed: There is no such pin" in failed
    assert "perilune jobs list shows them" in await terminal("jobs", "show", "99", code=1)
    assert "is failed already" in await terminal("jobs", "cancel", "1", code=1)
    assert "cannot be taken back" in await terminal("jobs", "undo", "1", code=1)

    monkeypatch.setattr(loop, "MAX_RUNNING", 0)  # what is asked for waits
    queued = await terminal("cache", "pin", "--tenant", "t", "--no-wait")
    assert queued.strip() == "job 2 pin queued: 0 blocks"
    assert "job 2 pin cancelled" in await terminal("jobs", "cancel", "2", "--reason", "no")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["cache", "pin"], "Give at least one of namespace, tenant, key"),
        (["cache", "pin", "zz"], "key = 'zz'"),
        (["cache", "pin", "--tenant", "t", "--for", "soon"], "--for = 'soon': is no time"),
        (["cache", "pin", "--tenant", "t", "--max-share", "0.9"], "max_share = 0.9"),
        (["cache", "unpin"], "at least one of name"),
        (["cache", "replicate", "--tenant", "t", "--to", "n2"], "--from = '': is missing"),
        (["cache", "replicate", "--from", "a", "--to", "a", "--tenant", "t"], "one node"),
        (["cache", "prefetch", "--tenant", "t", "--hottest", "0"], "--hottest"),
        (["jobs", "show", "0"], "JOB"),
        (["jobs", "show", "x"], "JOB"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, argv, words):
    assert cli.run(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


async def test_what_is_not_there_exits_1_and_wrong_filters_2(terminal):
    for argv in (
        ("cache", "list", "--node", "nobody"),
        ("cache", "list", "--namespace", "01234567"),
        ("cache", "purge", "--node", "nobody", "--yes"),
    ):
        assert "perilune: No n" in await terminal(*argv, code=1)
    assert "state" in await terminal("jobs", "list", "--state", "odd", code=2)
