"""The networks that transfer tests run on do what they say."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
from network import DelayRelay, network

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]

SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 9000))
print("listening", flush=True)
while True:
    client, _ = server.accept()
    total = 0
    while data := client.recv(1 << 20):
        total += len(data)
    client.close()
    print(total, flush=True)
"""
SOURCE = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 9000), 5)
sock.settimeout(10)
start = time.monotonic()
sock.sendall(bytes(int(sys.argv[2])))
sock.shutdown(socket.SHUT_WR)
sock.recv(1)
print(time.monotonic() - start)
"""


def test_loss_rate_and_cut() -> None:
    with network(2) as (one, two):
        sink = two.popen(
            [sys.executable, "-c", SINK, two.address], stdout=subprocess.PIPE, text=True
        )
        try:
            assert sink.stdout is not None
            assert sink.stdout.readline() == "listening\n"

            def send(num_bytes: int) -> float:
                took = float(one.run(sys.executable, "-c", SOURCE, two.address, str(num_bytes)))
                assert sink.stdout is not None
                assert int(sink.stdout.readline()) == num_bytes
                return took

            quick = send(4 << 20)
            one.cap(80)
            assert send(4 << 20) > max(0.3, quick)  # 10 MB/s
            one.cap(None)
            two.lose(5)
            before = one.retransmitted_segments()
            send(8 << 20)
            assert one.retransmitted_segments() > before
            two.heal()
            two.cut()
            with pytest.raises(subprocess.CalledProcessError):
                one.run(sys.executable, "-c", SOURCE, two.address, "10")
            two.join()
            send(1 << 20)
        finally:
            sink.kill()
            sink.communicate()


def test_relay_delays_both_ways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            client, _ = server.accept()
            with client:
                while data := client.recv(100):
                    client.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        relay = DelayRelay(server.getsockname(), 0.05)
        try:
            with socket.create_connection(("127.0.0.1", relay.port), 5) as sock:
                start = time.monotonic()
                sock.sendall(b"there and back")
                assert sock.recv(100) == b"there and back"
                assert time.monotonic() - start >= 0.1
        finally:
            relay.close()
