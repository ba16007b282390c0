"""An agent that cannot start, and peers that do not play by the rules."""

import contextlib
import socket
import subprocess
import sys
from typing import Any

from workers.client import make_hello
from workers.core.framing import LENGTH, encode_request
from workers.core.messages import GetStats, Release


class TestStart:
    def run(self, agent: Any, **changes: str) -> tuple[int, str]:
        command = agent.command()
        for name, value in changes.items():
            command[command.index(f"--{name.replace('_', '-')}") + 1] = value
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stderr

    def test_what_cannot_work_is_one_line_and_exit_2(self, make_agent: Any) -> None:
        agent = make_agent()
        for changes, says in [
            ({"slab_bytes": str(2**60)}, "slab_bytes = "),
            ({"block_tokens": "0"}, "block_tokens = 0"),
            ({"slab_name": "a/b"}, "slab_name = 'a/b'"),
        ]:
            code, stderr = self.run(agent, **changes)
            assert code == 2
            assert says in stderr.splitlines()[-1]
        assert not agent.slab_path.exists()

    def test_second_agent_does_not_hurt_the_first(self, agent: Any) -> None:
        code, stderr = self.run(agent)
        assert (code, "in use by another agent" in stderr) == (2, True)
        code, stderr = self.run(agent, slab_name=agent.slab_name + "2")
        assert (code, "another process listens on it" in stderr) == (2, True)
        assert agent.worker("p1").stats().used_blocks == 0

    def test_port_in_use_is_named(self, make_agent: Any) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            agent = make_agent("--tcp", address)
            code, stderr = self.run(agent)
        assert code == 2
        assert f"tcp = '{address}'" in stderr
        assert not agent.slab_path.exists()

    def test_verbs_are_named(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "workers", "juggle"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "agent" in done.stderr


class TestBadPeers:
    def talk(self, agent: Any, data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(str(agent.socket))
            sock.sendall(data)
            got = b""
            while chunk := sock.recv(65536):
                got += chunk
            return got

    def test_are_told_and_hung_up_on(self, agent: Any) -> None:
        assert b"hello_first" in self.talk(agent, encode_request(1, Release("x")))
        assert b"protocol" in self.talk(agent, LENGTH.pack(2**31) + b"x")
        assert b"protocol" in self.talk(agent, LENGTH.pack(3) + b"xyz")
        assert agent.worker("p1").stats().num_owners == 0

    def test_one_that_never_reads_is_held_back(self, agent: Any) -> None:
        other = agent.worker("p1")
        hello = encode_request(1, make_hello("cli", "greedy"))
        flood = encode_request(2, GetStats()) * 1000
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(agent.socket))
            sock.sendall(hello)
            sock.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                for _ in range(500):
                    sock.sendall(flood)
            assert other.stats().rss_bytes < 120 << 20
