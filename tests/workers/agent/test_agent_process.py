"""A real agent, real clients, real shared memory; and what happens when one of them dies."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from workers.client import AgentClient, AsyncAgentClient, make_hello
from workers.core.errors import AgentUnavailableError, RefusedError
from workers.core.hashing import block_hashes, namespace_digest, root_hash
from workers.core.ids import NodeId
from workers.core.messages import (
    Done,
    EventBatch,
    Hello,
    LegReport,
    LookupReply,
    Release,
    ReportCorrupt,
    Snapshot,
    StoredSlot,
)
from workers.core.prefix_index import Applied, PrefixIndex
from workers.core.stats_messages import NamespaceSpec
from workers.pool.arena import Slab

Eventually = Callable[[Callable[[], bool]], None]
PythonChild = Callable[..., "subprocess.Popen[bytes]"]


class Pool:
    """What the tests do with an agent, as a connector would."""

    def __init__(self, client: AgentClient, spec: NamespaceSpec) -> None:
        self.client = client
        self.spec = spec
        self.namespace = namespace_digest(spec)
        self.attach()

    def attach(self) -> None:
        welcome = self.client.connect()
        self.slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)

    def chain(self, name: str, num_blocks: int = 8) -> list[bytes]:
        root = root_hash(self.namespace, name, None)
        return [*block_hashes(root, range(64 * num_blocks), 64)]

    def store(self, keys: Sequence[bytes], owner: str = "transfer:1") -> int:
        reply = self.client.prepare_store(owner, self.namespace, b"", keys)
        stored = []
        for ref, key in zip(reply.slots, keys, strict=True):
            if ref is not None:
                checksum = self.slab.write_block(
                    ref.slot, ref.generation, key, payload(key, self.spec)
                )
                stored.append(StoredSlot(ref.slot, ref.generation, checksum))
        return self.client.complete_store(owner, stored)

    def load(self, keys: Sequence[bytes], owner: str = "load:d1:1") -> list[bytes | None]:
        refs = self.client.prepare_load(owner, self.namespace, keys)
        return [
            self.slab.read_block(ref.slot, ref.generation, key)
            for ref, key in zip(refs, keys, strict=False)
        ]

    def held(self, keys: Sequence[bytes]) -> int:
        return self.client.lookup(self.namespace, keys).num_held


def payload(key: bytes, spec: NamespaceSpec) -> bytes:
    return key * (spec.block_bytes // len(key))


def pool(agent: Any, client_id: str, spec: NamespaceSpec) -> Pool:
    return Pool(agent.worker(client_id), spec)


class TestStoreAndLoad:
    def test_bytes_stored_by_one_process_are_loaded_by_another(
        self, agent: Any, spec: NamespaceSpec, python_child: PythonChild
    ) -> None:
        writer = pool(agent, "p1", spec)
        keys = writer.chain("a")
        assert writer.store(keys[:5]) == 5
        script = (
            "import sys, msgspec\n"
            "from workers.client import AgentClient, make_hello\n"
            "from workers.core.messages import NamespaceSpec\n"
            "from workers.pool.arena import Slab\n"
            "spec = msgspec.json.decode(sys.argv[2], type=NamespaceSpec)\n"
            "namespace, *keys = map(bytes.fromhex, sys.argv[3:])\n"
            "client = AgentClient(sys.argv[1], make_hello('worker', 'd1', namespace=spec), 20.0)\n"
            "welcome = client.connect()\n"
            "slab = Slab.attach(welcome.slab_path, welcome.slot_bytes, welcome.header_bytes)\n"
            "refs = client.prepare_load('load:d1:1', namespace, keys)\n"
            "for ref, key in zip(refs, keys):\n"
            "    data = slab.read_block(ref.slot, ref.generation, key)\n"
            "    print(data == key * (spec.block_bytes // 16))\n"
            "client.release('load:d1:1')\n"
        )
        child = python_child(
            script,
            f"unix:{agent.socket}",
            msgspec.json.encode(spec).decode(),
            writer.namespace.hex(),
            *(key.hex() for key in keys),
        )
        out, _ = child.communicate(timeout=60)
        assert out.split() == [b"True"] * 5
        stats = writer.client.stats()
        assert stats.loaded_blocks_total == 5
        assert stats.shm_bytes_by_pair == {"p1>d1": 5 * spec.block_bytes}

    def test_two_writers_of_one_chain_do_the_work_once(
        self, agent: Any, spec: NamespaceSpec
    ) -> None:
        first, second = pool(agent, "p1", spec), pool(agent, "p2", spec)
        keys = first.chain("a")
        assert first.store(keys[:4]) == 4
        assert second.store(keys[:6], "transfer:2") == 2
        assert first.load(keys) == [payload(key, spec) for key in keys[:6]]

    def test_tcp_serves_the_same(self, make_agent: Any, spec: NamespaceSpec) -> None:
        agent = make_agent("--tcp", "127.0.0.1:0").start()
        port = agent.log.split("tcp:127.0.0.1:")[1].split()[0]
        pool(agent, "p1", spec).store(keys := pool(agent, "p1", spec).chain("a"))
        remote = AgentClient(f"tcp:127.0.0.1:{port}", make_hello("cli", "c"), 20.0)
        agent.clients.append(remote)
        assert remote.lookup(namespace_digest(spec), keys) == LookupReply(8)

    def test_corrupt_block_is_withdrawn_with_its_descendants(
        self, agent: Any, spec: NamespaceSpec
    ) -> None:
        writer, reader = pool(agent, "p1", spec), pool(agent, "d1", spec)
        keys = writer.chain("a")
        writer.store(keys)
        ref = reader.client.prepare_load("load:d1:1", reader.namespace, keys)[3]
        writer.slab.payload(ref.slot)[100] ^= 1
        got = reader.load(keys)
        assert [data is None for data in got] == [False] * 3 + [True] + [False] * 4
        report = ReportCorrupt(reader.namespace, keys[3], ref.slot, ref.generation, "checksum")
        assert reader.client.report_corrupt(report) == 5
        assert reader.held(keys) == 3
        stats = reader.client.stats()
        assert (stats.corrupt_total, stats.evicted_by_cause) == (1, {"corrupt": 5})

    def test_pins_hold_against_pressure_and_the_tail_goes_first(
        self, agent: Any, spec: NamespaceSpec
    ) -> None:
        writer = pool(agent, "p1", spec)
        pinned, idle = writer.chain("pinned", 20), writer.chain("idle", 20)
        writer.store(pinned, "transfer:1")
        writer.store(idle, "transfer:2")
        assert writer.client.release("transfer:2") == 20
        writer.store(writer.chain("new", 21), "transfer:3")
        assert writer.held(pinned) == 20
        assert writer.held(idle) == 10
        assert writer.load(pinned) == [payload(key, spec) for key in pinned]
        refused = writer.client.prepare_store(
            "transfer:4", writer.namespace, b"", writer.chain("more", 30)
        )
        assert refused.num_refused == 20
        assert writer.client.stats().starved_by_pins_total == 1

    def test_refusals_reach_the_caller(self, agent: Any, spec_with: Any) -> None:
        pool(agent, "p1", spec_with())
        client = agent.client("worker", "p2", spec_with(page_bytes=(4096, 8192)))
        with pytest.raises(RefusedError, match="24576"):
            client.connect()
        with pytest.raises(AgentUnavailableError, match="24576"):
            client.connect()
        stranger = AgentClient(f"unix:{agent.socket}", Hello("cli", "x", b"bad"), 20.0)
        with pytest.raises(RefusedError) as refused:
            stranger.connect()
        assert refused.value.code == "hash_vector"


class TestLifetimes:
    def test_lease_ends_what_nobody_releases(
        self, make_agent: Any, spec: NamespaceSpec, eventually: Eventually
    ) -> None:
        agent = make_agent("--lease-seconds", "0.5").start()
        writer = pool(agent, "p1", spec)
        keys = writer.chain("a")
        writer.store(keys[:3])
        writer.client.prepare_store("transfer:1", writer.namespace, keys[2], keys[3:5])
        assert writer.client.stats().pinned_blocks == 5
        eventually(lambda: writer.client.stats().pinned_blocks == 0)
        stats = writer.client.stats()
        assert (stats.pending_blocks, stats.num_owners, stats.used_blocks) == (0, 0, 3)
        assert stats.leases_expired_total == 1
        assert writer.client.release("transfer:1") == 0

    def test_double_release_is_harmless(self, agent: Any, spec: NamespaceSpec) -> None:
        writer = pool(agent, "p1", spec)
        keys = writer.chain("a")
        writer.store(keys)
        writer.load(keys)
        assert [writer.client.release("load:d1:1") for _ in range(2)] == [8, 0]
        assert writer.client.stats().pinned_blocks == 8

    def test_killed_client_leaves_no_slot_behind(
        self,
        agent: Any,
        spec: NamespaceSpec,
        python_child: PythonChild,
        eventually: Eventually,
    ) -> None:
        watcher = pool(agent, "d1", spec)
        keys = watcher.chain("a")
        script = (
            "import sys, time, msgspec\n"
            "from workers.client import AgentClient, make_hello\n"
            "from workers.core.messages import NamespaceSpec, StoredSlot\n"
            "spec = msgspec.json.decode(sys.argv[2], type=NamespaceSpec)\n"
            "namespace, *keys = map(bytes.fromhex, sys.argv[3:])\n"
            "client = AgentClient(sys.argv[1], make_hello('worker', 'p1', namespace=spec), 20.0)\n"
            "slots = client.prepare_store('transfer:1', namespace, b'', keys).slots\n"
            "done = [StoredSlot(s.slot, s.generation, 1) for s in slots[:2]]\n"
            "client.complete_store('transfer:1', done)\n"
            "client.prepare_load('load:p1:1', namespace, keys)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)\n"
        )
        child = python_child(
            script,
            f"unix:{agent.socket}",
            msgspec.json.encode(spec).decode(),
            watcher.namespace.hex(),
            *(key.hex() for key in keys),
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert watcher.client.stats().pending_blocks == 6
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: watcher.client.stats().pending_blocks == 0)
        stats = watcher.client.stats()
        assert (stats.used_blocks, stats.pinned_blocks, stats.num_owners) == (2, 2, 1)
        assert (stats.store_failed_total, stats.load_failed_total) == (6, 2)
        assert watcher.client.release("transfer:1") == 2

    def test_b12_killed_agent_comes_back_with_its_blocks_and_old_handles_end_cleanly(
        self, agent: Any, spec: NamespaceSpec, eventually: Eventually
    ) -> None:
        writer, reader = pool(agent, "p1", spec), pool(agent, "d1", spec)
        keys = writer.chain("a")
        writer.store(keys)
        old_refs = reader.client.prepare_load("load:d1:1", reader.namespace, keys)
        old = reader.client.incarnation
        agent.kill(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(AgentUnavailableError):
            reader.held(keys)
        for _ in range(5):  # while it is away, calls do not wait for it
            with pytest.raises(AgentUnavailableError):
                reader.held(keys)
        assert time.monotonic() - began < 5
        assert agent.slab_path.exists()

        agent.spawn()
        agent.connect(reader.client)
        agent.connect(writer.client)
        assert reader.client.incarnation > old
        assert reader.held(keys) == 8
        stored = [StoredSlot(ref.slot, ref.generation, 1) for ref in old_refs]
        assert writer.client.complete_store("transfer:1", stored) == 0
        assert reader.client.release("load:d1:1") == 0
        writer.attach()
        reader.attach()
        assert reader.load(keys) == [payload(key, spec) for key in keys]
        for number in range(8):  # then the slots go to others, under other generations
            assert writer.store(writer.chain(f"b{number}"), f"transfer:b{number}") == 8
            writer.client.release(f"transfer:b{number}")
        reader.client.release("load:d1:1")
        late = [
            reader.slab.read_block(ref.slot, ref.generation, key)
            for ref, key in zip(old_refs, keys, strict=True)
        ]
        assert set(late) <= {None, *(payload(key, spec) for key in keys)}

    def test_sigterm_ends_it_and_leaves_nothing(self, agent: Any, spec: NamespaceSpec) -> None:
        writer = pool(agent, "p1", spec)
        writer.store(writer.chain("a"))
        began = time.monotonic()
        assert agent.kill(signal.SIGTERM) == 0
        assert time.monotonic() - began < 10  # 0.1 s on an idle machine
        assert not agent.slab_path.exists()
        assert not agent.socket.exists()
        assert "agent_stopped" in agent.log

    def test_dies_with_its_parent(
        self, make_agent: Any, python_child: PythonChild, eventually: Eventually
    ) -> None:
        agent = make_agent()
        script = (
            "import subprocess, sys\n"
            "child = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)\n"
            "print(child.pid, flush=True)\n"
            "child.wait()\n"
        )
        parent = python_child(script, *agent.command())
        assert parent.stdout is not None
        agent_pid = int(parent.stdout.readline())
        agent.connect(agent.client("cli", "probe"))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        eventually(lambda: not is_running(agent_pid))
        eventually(lambda: not agent.slab_path.exists())

    def test_memory_at_rest(self, agent: Any, spec: NamespaceSpec) -> None:
        stats = pool(agent, "p1", spec).client.stats()
        assert 10 << 20 < stats.rss_bytes < 120 << 20


class TestThreads:
    def test_one_client_serves_many_threads(self, agent: Any, spec: NamespaceSpec) -> None:
        writer = pool(agent, "p1", spec)
        wrong: list[object] = []

        def work(name: str) -> None:
            keys = writer.chain(name, 3)
            for _ in range(50):
                done = writer.store(keys, f"transfer:{name}")
                if writer.held(keys) != 3 or done not in (0, 3):
                    wrong.append((name, done))

        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong

    def test_waiting_for_another_call_is_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "silent.sock"
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(path))
            silent.listen()
            client = AgentClient(str(path), make_hello("cli", "c"), 0.3)
            began = time.monotonic()
            with pytest.raises(AgentUnavailableError, match=r"in time|timed out"):
                client.stats()
            assert time.monotonic() - began < 10


class TestAsyncClient:
    async def follow(
        self, client: AsyncAgentClient, index: PrefixIndex, seen: list[object]
    ) -> None:
        stream: Any = client.subscribe(lambda: index.position(NodeId("n1")))
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                seen.append(message)
                if isinstance(message, LegReport):
                    continue
                if index.apply(message) is Applied.RESYNC:
                    client.resync()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.02)

    async def test_stream_follows_across_restarts(self, agent: Any, spec: NamespaceSpec) -> None:
        writer = pool(agent, "p1", spec)
        keys = writer.chain("a")
        writer.store(keys[:3])
        client = AsyncAgentClient(f"unix:{agent.socket}", make_hello("gateway", "g1"), 20.0)
        index, seen = PrefixIndex(), list[object]()

        def held() -> int:
            return index.held_lengths(writer.namespace, keys).get(NodeId("n1"), -1)  # type: ignore[arg-type]

        task = asyncio.create_task(self.follow(client, index, seen))
        try:
            await self.until(lambda: held() == 3)
            writer.store(keys[:6])
            await self.until(lambda: held() == 6)
            writer.client.report_leg(LegReport("t", "p1", "kv_producer"))
            await self.until(lambda: any(isinstance(m, LegReport) for m in seen))
            assert len([m for m in seen if isinstance(m, Snapshot)]) == 1
            client.resync()
            client.resync()
            await self.until(lambda: len([m for m in seen if isinstance(m, Snapshot)]) == 2)

            agent.kill(signal.SIGKILL)
            await self.until(lambda: not client.subscribed)
            agent.spawn()
            await self.until(lambda: len([m for m in seen if isinstance(m, Snapshot)]) == 3)
            await self.until(lambda: held() == 6)  # its blocks outlived it in the slab
            agent.connect(writer.client)
            writer.attach()
            writer.store(keys[:8])
            await self.until(lambda: held() == 8)
            assert isinstance(seen[-1], EventBatch)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not client.subscribed

    async def test_calls(self, agent: Any, spec: NamespaceSpec) -> None:
        writer = pool(agent, "p1", spec)
        keys = writer.chain("a")
        writer.store(keys)
        client = AsyncAgentClient(f"unix:{agent.socket}", make_hello("gateway", "g1"), 20.0)
        lookup, renewed, stats = await asyncio.gather(
            client.lookup(writer.namespace, keys), client.renew(["transfer:1"]), client.stats()
        )
        assert (lookup, renewed, stats.used_blocks) == (LookupReply(8), 1, 8)
        assert [await client.release("transfer:1") for _ in range(2)] == [8, 0]
        with pytest.raises(RefusedError, match="supervisor"):
            await client.report_workers([])

        for owner in ("transfer:2", "transfer:3"):
            writer.store(writer.chain(owner, 2), owner)
        assert (await client.stats()).num_owners == 2
        assert await client.release("transfer:2", "transfer:none", "operator:1", "transfer:3") == 4
        assert (await client.stats()).num_owners == 0

        agent.kill(signal.SIGKILL)
        with pytest.raises(AgentUnavailableError):
            await client.release("transfer:1")
        agent.spawn()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(AgentUnavailableError):
                    assert await client.call(Release("transfer:1"), Done) == Done(0)
                    break
                await asyncio.sleep(0.05)
        await client.close()


def is_running(pid: int) -> bool:
    """A zombie no longer runs; who reaps it is not our concern."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
