"""Networks made of kernel namespaces: hosts joined by one bridge, with faults on their links.

Needs root, `ip`, `tc` and `nft`. Loss is an nftables rule and rate a token bucket, since not every
kernel has netem; delay is a relay of our own. All is removed at the end, whatever happened.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

_TABLE: Final = "perilune"
_CHUNK_BYTES: Final = 256 * 1024
_CLONE_NEWNET: Final = 0x4000_0000


def missing_for_networks() -> str:
    """What keeps such a network from being made here; "" when nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace with one address on the common network."""

    name: str
    address: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program inside. `ip netns exec` becomes it, so the pid is the program's."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)

    def run(self, *command: str) -> str:
        return _run("ip", "netns", "exec", self.name, *command)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What this thread opens and starts meanwhile (sockets, threads, processes) is the host's."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.name}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def wall(self, rule: str) -> None:
        """What arrives is filtered by this rule of nftables, until `heal`."""
        self.heal()
        self.run("nft", "add", "table", "inet", _TABLE)
        chain = "{ type filter hook input priority 0 ; }"
        self.run("nft", "add", "chain", "inet", _TABLE, "input", chain)
        self.run("nft", "add", "rule", "inet", _TABLE, "input", *rule.split())

    def lose(self, percent: float) -> None:
        """Drop that share of what arrives, the last of each 100 / `percent`; 0 ends it. What arrives
        are few and large pieces: by chance, none of some hundred would be dropped now and then."""
        self.heal()
        if percent:
            period = round(100 / percent)
            self.wall(f"numgen inc mod {period} {period - 1} drop")

    def drop_all(self) -> None:
        """Half-open: nothing arrives any more and nobody is told."""
        self.wall("iif eth0 drop")

    def drop_from(self, address: str, port: int) -> None:
        """Nothing of what is sent from there arrives any more, on open connections too."""
        self.wall(f"ip saddr {address} tcp sport {port} drop")

    def send_elsewhere(self, address: tuple[str, int], relay: tuple[str, int]) -> None:
        """New connections from here to `address` go to `relay`."""
        self.heal()
        self.run("nft", "add", "table", "inet", _TABLE)
        chain = "{ type nat hook output priority -100 ; }"
        self.run("nft", "add", "chain", "inet", _TABLE, "output", chain)
        rule = f"ip daddr {address[0]} tcp dport {address[1]} dnat ip to {relay[0]}:{relay[1]}"
        self.run("nft", "add", "rule", "inet", _TABLE, "output", *rule.split())

    def heal(self) -> None:
        """End loss, dropping and detours."""
        with suppress(subprocess.CalledProcessError):
            self.run("nft", "delete", "table", "inet", _TABLE)

    def cap(self, megabits: float | None) -> None:
        """Limit what leaves to that rate; None ends it."""
        with suppress(subprocess.CalledProcessError):
            self.run("tc", "qdisc", "del", "dev", "eth0", "root")
        if megabits is not None:
            rate = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
            self.run("tc", "qdisc", "add", "dev", "eth0", "root", *rate)

    def cut(self) -> None:
        """The cable is pulled."""
        self.run("ip", "link", "set", "eth0", "down")

    def join(self) -> None:
        self.run("ip", "link", "set", "eth0", "up")

    def counters(self) -> tuple[int, int]:
        """Bytes received and sent on the wire, retransmissions included."""
        folder = "/sys/class/net/eth0/statistics"
        text = self.run("cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes").split()
        return int(text[0]), int(text[1])

    def retransmitted_segments(self) -> int:
        """TCP segments that this host has sent again."""
        rows = [line.split() for line in self.run("cat", "/proc/net/snmp").splitlines()]
        names, values = [row for row in rows if row[0] == "Tcp:"]
        return int(values[names.index("RetransSegs")])


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts that reach each other, and nothing else."""
    tag = secrets.token_hex(3)
    bridge = f"pb{tag}"
    with ExitStack() as stack:
        # The bridge has a namespace of its own, so that this machine's networks stay untouched.
        _add_namespace(stack, bridge)
        _inside(bridge, "ip", "link", "add", "br0", "type", "bridge")
        _inside(bridge, "ip", "link", "set", "br0", "up")
        hosts = [_add_host(stack, bridge, tag, index) for index in range(1, num_hosts + 1)]
        yield hosts


def _add_host(stack: ExitStack, bridge: str, tag: str, index: int) -> Host:
    host = Host(f"ph{tag}{index}", f"10.77.0.{index}")
    _add_namespace(stack, host.name)
    port = f"port{index}"
    peer = ("peer", "name", port, "netns", bridge)
    host.run("ip", "link", "add", "eth0", "type", "veth", *peer)
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    _inside(bridge, "ip", "link", "set", port, "master", "br0")
    _inside(bridge, "ip", "link", "set", port, "up")
    return host


def _add_namespace(stack: ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "del", name)
    _inside(name, "ip", "link", "set", "lo", "up")


def _inside(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


class DelayRelay:
    """Forwards TCP to `target`, every byte `seconds` late in each direction.

    Each connection holds `window_bytes` at most in one direction, as a path with that window would:
    it carries no more than `window_bytes / seconds`.
    """

    def __init__(
        self,
        target: tuple[str, int],
        seconds: float,
        host: str = "127.0.0.1",
        window_bytes: int = 4 << 20,
    ) -> None:
        self.carried: list[int] = []  # bytes of each connection, both directions
        self._target = target
        self._seconds = seconds
        self._window_bytes = window_bytes
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for sock in (self._listener, *self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed.is_set():
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, 5)
                self._open += [client, server]
                number = len(self.carried)
                self.carried.append(0)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, number), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, number: int) -> None:
        """One direction: a reader stamps what came, a writer sends it when it is due."""
        waiting: deque[tuple[float, bytes]] = deque()
        news = threading.Condition()
        threading.Thread(target=self._write, args=(waiting, news, sink), daemon=True).start()
        data = b"."
        while data:
            try:
                data = source.recv(min(_CHUNK_BYTES, self._window_bytes))
            except OSError:
                data = b""
            self.carried[number] += len(data)
            with news:
                while sum(len(held) for _, held in waiting) >= self._window_bytes:
                    if self._closed.is_set():
                        return
                    news.wait(0.5)
                waiting.append((time.monotonic() + self._seconds, data))
                news.notify_all()

    def _write(
        self,
        waiting: deque[tuple[float, bytes]],
        news: threading.Condition,
        sink: socket.socket,
    ) -> None:
        with suppress(OSError):
            while not self._closed.is_set():
                with news:
                    if not waiting:
                        news.wait(0.5)
                        continue
                    due, data = waiting[0]
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
                with news:
                    waiting.popleft()
                    news.notify_all()
