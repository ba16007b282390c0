"""A real etcd of one or three members on loopback, for tests. Ends only what it started."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def etcd_binary() -> str | None:
    return shutil.which("etcd") or next(
        (path for path in ("/usr/sbin/etcd", "/usr/local/bin/etcd") if os.access(path, os.X_OK)),
        None,
    )


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class Member:
    def __init__(self, name: str, folder: Path, client_port: int, arguments: list[str]) -> None:
        self.name = name
        self.folder = folder
        self.endpoint = f"127.0.0.1:{client_port}"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def start(self) -> None:
        assert self._process is None
        log = (self.folder / f"{self.name}.log").open("ab")
        with log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
            self._process = None

    def forget(self) -> None:
        """A kill, and a start from nothing."""
        self.kill()
        shutil.rmtree(self.folder / self.name)
        self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        if self._stopped and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._stopped = False

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", int(self.endpoint.split(":")[1])), 0.2):
                return True
        except OSError:
            return False


class EtcdCluster:
    """`with EtcdCluster(3) as etcd: etcd.endpoints`."""

    def __init__(self, num_members: int, *extra: str, scheme: str = "http") -> None:
        binary = etcd_binary()
        assert binary is not None
        shared = Path("/dev/shm")
        self._folder = Path(
            tempfile.mkdtemp(prefix="perilune-etcd-", dir=shared if shared.is_dir() else None)
        )
        ports = free_ports(2 * num_members)
        names = [f"m{i}" for i in range(num_members)]
        peers = [f"http://127.0.0.1:{port}" for port in ports[:num_members]]
        initial = ",".join(f"{n}={p}" for n, p in zip(names, peers, strict=True))
        self.members = []
        for i, name in enumerate(names):
            client = f"{scheme}://127.0.0.1:{ports[num_members + i]}"
            arguments = [
                binary, "--name", name, "--data-dir", str(self._folder / name),
                "--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i],
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--initial-cluster", initial, "--initial-cluster-token", self._folder.name,
                "--initial-cluster-state", "new", "--heartbeat-interval", "100",
                "--election-timeout", "1000", "--logger", "zap", "--log-level", "warn", *extra,
            ]  # fmt: skip
            member = Member(name, self._folder, ports[num_members + i], arguments)
            self.members.append(member)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    @property
    def address(self) -> str:
        return "etcd://" + ",".join(self.endpoints)

    def __enter__(self) -> "EtcdCluster":
        for member in self.members:
            member.start()
        deadline = time.monotonic() + 30
        while not all(member.answers() for member in self.members):
            assert time.monotonic() < deadline, "etcd did not start"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.resume()
            member.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
