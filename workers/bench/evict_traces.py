"""Request traces as chains of small integers. One JSON object a line, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from workers.core.errors import ConfigError

BLOCK_TOKENS: Final = 512
SHORT_ANSWER_TOKENS: Final = 64
_WAY_OUT: Final = "Each line needs timestamp (ms), input_length (tokens) and hash_ids."


class _Line(msgspec.Struct):
    timestamp: float  # ms
    input_length: int  # tokens
    hash_ids: list[int]  # prefix-chained ids of blocks of BLOCK_TOKENS, the last perhaps partial
    output_length: int = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` is the chain, head first; `num_full` of them are full. `label` is what a gateway
    could say of the request's kind: here whether its answer is short."""

    now: float  # seconds
    blocks: tuple[int, ...]
    num_full: int
    label: str


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests in order of time, blocks numbered from 0. ConfigError names what cannot be read."""
    decoder = msgspec.json.Decoder(_Line)
    numbers: dict[int, int] = {}
    requests: list[TraceRequest] = []
    for number, text in enumerate(_lines(path), 1):
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError("--trace", f"{path}:{number}", str(error), _WAY_OUT) from error
        blocks = tuple(numbers.setdefault(block, len(numbers)) for block in line.hash_ids)
        num_full = min(len(blocks), line.input_length // BLOCK_TOKENS)
        label = "short" if line.output_length < SHORT_ANSWER_TOKENS else "long"
        requests.append(TraceRequest(line.timestamp / 1000, blocks, num_full, label))
    if not requests:
        raise ConfigError("--trace", str(path), "holds no request", _WAY_OUT)
    return sorted(requests, key=lambda request: request.now)


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
        plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("--trace", str(path), str(error), "Name a readable file.") from error
    return [line for line in plain.splitlines() if line.strip()]
