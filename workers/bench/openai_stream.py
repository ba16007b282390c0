"""One streamed completion, timed as a client feels it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx2
import msgspec


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Seconds are from sending the request; `ttft_seconds` is to the first byte of text."""

    request_id: str
    text: str
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float
    e2e_seconds: float


class EngineAnswerError(Exception):
    """The server answered with an error, or broke off; the text says what it said."""


def complete(
    client: httpx2.Client, url: str, model: str, prompt: str | list[int], max_tokens: int
) -> TimedAnswer:
    """Greedy completion by POST {url}/v1/completions, streamed.

    Raises EngineAnswerError on an HTTP error, an error event, or a stream without text.
    """
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started = time.perf_counter()
    first: float | None = None
    text: list[str] = []
    usage: dict[str, int] = {}
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            said = response.read().decode(errors="replace")[:500]
            raise EngineAnswerError(f"{url} answered {response.status_code}: {said}")
        request_id = response.headers.get("x-request-id", "")
        for line in response.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = msgspec.json.decode(line[5:])
            if "error" in event:
                raise EngineAnswerError(f"{url} broke off: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if choice.get("text"):
                    first = first or time.perf_counter()
                    text.append(choice["text"])
    if first is None:
        raise EngineAnswerError(f"{url} streamed no text for request {request_id}")
    return TimedAnswer(
        request_id, "".join(text), usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0), first - started, time.perf_counter() - started,
    )  # fmt: skip


def tokenize(client: httpx2.Client, url: str, model: str, prompt: str) -> list[int]:
    """Token ids as the engine at `url` counts them."""
    response = client.post(f"{url}/tokenize", json={"model": model, "prompt": prompt})
    response.raise_for_status()
    tokens: list[int] = response.json()["tokens"]
    return tokens


def reset_device_cache(client: httpx2.Client, url: str) -> None:
    """Empty the engine's own prefix cache; needs the engine's development endpoints."""
    response = client.post(f"{url}/reset_prefix_cache")
    if response.status_code == 404:
        raise EngineAnswerError(
            f"{url} has no /reset_prefix_cache: start the cluster with --dev-endpoints"
        )
    response.raise_for_status()


def read_counter(client: httpx2.Client, url: str, name: str) -> float:
    """Sum over the labels of one counter in {url}/metrics; 0 when the series does not exist yet."""
    response = client.get(f"{url}/metrics")
    response.raise_for_status()
    total = 0.0
    for line in response.text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            total += float(line.rsplit(" ", 1)[1])
    return total
