"""Request targets in every form that RFC 9112 (3.2) allows to a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

BODY = json.dumps({"model": "tiny", "prompt": "hello", "input": "hello", "max_tokens": 2}).encode()


async def ask(rig: Any, method: str, target: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.gateway.server.port)
    body = BODY if method == "POST" else b""
    head = f"{method} {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(("method", "target", "status"), [
    ("POST", "http://x/v1/completions", 200),
    ("POST", "HTTPS://user@gw.example:8000/v1/completions?a=http://y/z", 200),
    ("POST", "http://[::1]:8000/debug/place/v1/completions", 200),
    ("GET", "http://x/livez?now", 200),
    ("GET", "http://x/v1/models/tiny", 200),
    ("GET", "http://x/debug/requests", 200),
    ("GET", "http://x", 404),
    ("GET", "http://x?/livez", 404),
    ("POST", "http://x/v1/models", 405),
    ("GET", "ftp://x/livez", 404),
    ("OPTIONS", "*", 404),
])  # fmt: skip
async def test_a_target_with_scheme_and_authority_means_its_path(
    rig: Any, method: str, target: str, status: int
) -> None:
    await rig.start()
    got, body = await ask(rig, method, target)
    assert got == status, body


async def test_a_request_to_an_absolute_target_runs_and_is_recorded_like_others(rig: Any) -> None:
    await rig.start()
    status, body = await ask(rig, "POST", "http://gw.example/v1/completions?x=1")
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
    assert len(rig.prefill_bodies()) == len(rig.decode_bodies()) == 1
    record = await rig.control_plane.ended()
    assert record.route in ("", "/v1/completions")
