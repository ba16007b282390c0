"""Many different clients of one gateway: what each asks, and whether what it got was as it must be."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway_load import request_bytes

TENANTS = 200
READ_SECONDS = 60.0
LEAVES_SHARE = 0.3
FAILS_SHARE = 0.06
IDS_SHARE = 0.15
PROMPT_IDS = 8000
WORDS = [
    "river",
    "stone",
    "cloud",
    "music",
    "paper",
    "window",
    "garden",
    "signal",
    "winter",
    "bridge",
    "copper",
    "silver",
    "market",
    "letter",
    "engine",
    "forest",
    "harbour",
    "island",
    "lantern",
    "meadow",
    "night",
    "ocean",
    "pocket",
    "quiet",
    "rocket",
    "summer",
    "tunnel",
]
FAULTS = ("prefill", "decode", "reset", "cut", "client")
_TAIL = ",".join(str(number % 40_000 + 100) for number in range(PROMPT_IDS - 2))
Expected = Literal["answered", "refused", "failed", "left"]


def api_key(tenant: int) -> str:
    return f"key-of-tenant-{tenant}"


def client_keys() -> list[dict[str, str]]:
    return [
        {"key_sha256": hashlib.sha256(api_key(n).encode()).hexdigest(), "tenant": f"tenant-{n}"}
        for n in range(TENANTS)
    ]


@dataclass
class Crowd:
    """What was met. `wrong` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    done: int = 0

    def note(self, outcome: str, fault: str, detail: str = "") -> None:
        self.done += 1
        self.outcomes[outcome] += 1
        if not _is_right(outcome, fault) and len(self.wrong) < 20:
            self.wrong.append(f"{outcome} of one to meet {fault or 'nothing'}: {detail[:300]}")


def _is_right(outcome: str, fault: str) -> bool:
    """A fault ends in its own way. What fails nearby may pause all workers for a moment (503)."""
    if outcome in ("left", "503"):
        return True
    match fault:
        case "client":
            return outcome == "400"
        case "decode" | "reset":
            return outcome == "502"
        case "cut":
            return outcome in ("error event", "200")
        case _:
            return outcome == "200"


@dataclass(frozen=True)
class Question:
    """One request and what its client does."""

    data: bytes
    stream: bool
    fault: str
    leaves_after: float | None


def ask(number: int, rng: random.Random) -> Question:
    """The `number`-th: no two have a prompt in common."""
    fault = rng.choice(FAULTS) if rng.random() < FAILS_SHARE else ""
    stream = rng.random() < 0.6 or fault == "cut"
    chat = rng.random() < 0.5
    fields: dict[str, Any] = {
        "model": "m", "max_tokens": 8, "stream": stream,
        "user": f"user-{number}" + (f" fail:{fault}" if fault else ""),
    }  # fmt: skip
    if rng.random() < 0.1:
        fields["cache_salt"] = f"salt-{number}"
    body = json.dumps(fields, separators=(",", ":"))[:-1]
    if rng.random() < IDS_SHARE:
        chat = False
        body += f',"prompt":[{number // 30_000 + 100},{number % 30_000 + 100},{_TAIL}]}}'
    else:
        text = f"Story {number}. " + " ".join(rng.choices(WORDS, k=320))
        messages = [{"role": "user", "content": text}]
        body += (
            f',"messages":{json.dumps(messages)}}}' if chat else f',"prompt":{json.dumps(text)}}}'
        )
    headers = (
        f"authorization: Bearer {api_key(number % TENANTS)}\r\nx-request-id: client-{number}\r\n"
    )
    if number % 7 == 0:
        headers += f"x-perilune-priority: {rng.choice(['batch', 'normal', 'high'])}\r\n"
    if number % 11 == 0:
        headers += f"x-perilune-session: continue\r\nx-perilune-class: class-{number}\r\n"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    leaves = rng.random() * 0.05 if rng.random() < LEAVES_SHARE else None
    return Question(request_bytes(path, body.encode(), headers), stream, fault, leaves)


async def client(
    port: int, crowd: Crowd, numbers: Callable[[], int | None], rng: random.Random
) -> None:
    """One client after the other on a connection that is kept, until `numbers` gives None."""
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while (number := numbers()) is not None:
        question = ask(number, rng)
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        reader, writer = connection
        writer.write(question.data)
        try:
            seconds = READ_SECONDS if question.leaves_after is None else question.leaves_after
            async with asyncio.timeout(seconds):
                outcome, detail = await _read(reader)
        except TimeoutError:
            outcome, detail = "left" if question.leaves_after is not None else "silence", ""
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome, detail = f"broke off without a word ({type(error).__name__})", str(error)
        crowd.note(outcome, question.fault, detail)
        if outcome in ("left", "error event") or not outcome.isdigit():
            writer.transport.abort()
            connection = None
    if connection is not None:
        connection[1].close()


async def _read(reader: asyncio.StreamReader) -> tuple[str, str]:
    """How the answer ended, and its last words."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head[9:12].decode()
    place = head.find(b"content-length:")
    if place >= 0:
        length = int(head[place + 15 :].split(b"\r\n", 1)[0])
        body = await reader.readexactly(length)
        right = status != "200" or b'"choices"' in body
        honest = status == "200" or b'"error"' in body
        return (status if right and honest else f"{status} without content"), body.decode()
    last, chunk = b"", b""
    while (line := await reader.readuntil(b"\r\n")) != b"0\r\n":
        chunk = await reader.readexactly(int(line, 16) + 2)
        last = (last + chunk)[-2000:]
    await reader.readuntil(b"\r\n")
    if last.endswith(b"data: [DONE]\n\n\r\n"):
        return status, ""
    said = b'data: {"error"' in last
    return ("error event" if said else "ended without a word"), last.decode()
