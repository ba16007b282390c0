"""A request trace as prompts for the placement bench: text for the wire, block numbers for the
simulator.

The prompt of a block is 32 words of its own, drawn by its number, and a word is one token. Of the
trace's blocks of 512 tokens each word stands for 16, as for the workers' cost model: prompts of
tens of thousands of tokens cost the bench's two cores what short ones do.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers

from controlplane.sim.placement import SimRequest
from workers.core.cost_model import CostModel
from workers.core.errors import ConfigError

BLOCK_TOKENS: Final = 512
TOKEN_SCALE: Final = 16
WORDS_A_BLOCK: Final = BLOCK_TOKENS // TOKEN_SCALE
NUM_WORDS: Final = 4096
TICK_SECONDS: Final = 3.0
"""The trace's clock: what arrived within one tick has the same time there."""
MAX_TOKENS: Final = 131_072
_WAY_OUT: Final = "Each line needs timestamp (ms), input_length (tokens) and hash_ids."


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0


@dataclass(frozen=True, slots=True)
class Traced:
    """One request of the trace: seconds from its start, tokens of the model, chained block ids."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """A word for each 16 tokens; the last block may be cut short."""
        words = max(1, self.prompt_tokens // TOKEN_SCALE)
        text: list[str] = []
        for block in self.blocks:
            draw = Random(block)
            text += [f"w{draw.randrange(NUM_WORDS):03x}" for _ in range(WORDS_A_BLOCK)]
            if len(text) >= words:
                break
        return " ".join(text[:words])

    @property
    def wire_output(self) -> int:
        return max(1, self.output_tokens // TOKEN_SCALE)


def read_slice(path: Path, start: int, count: int) -> list[Traced]:
    """`count` requests from number `start`, their times from 0. ConfigError: what is wrong."""
    decoder = msgspec.json.Decoder(_Line)
    try:
        data = path.read_bytes()
        plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("--trace", str(path), str(error), "Name a readable file.") from error
    lines = [line for line in plain.splitlines() if line.strip()][start : start + count]
    if len(lines) < count:
        problem = f"holds fewer than {start + count} requests"
        raise ConfigError("--requests", count, problem, "Take fewer, or another --start.")
    try:
        rows = [decoder.decode(line) for line in lines]
    except msgspec.MsgspecError as error:
        raise ConfigError("--trace", str(path), str(error), _WAY_OUT) from error
    first = rows[0].timestamp
    return [
        Traced(
            (row.timestamp - first) / 1000, max(TOKEN_SCALE, min(row.input_length, MAX_TOKENS)),
            row.output_length, tuple(row.hash_ids),
        )
        for row in rows
    ]  # fmt: skip


def spread(requests: list[Traced], speed: float, seed: int) -> list[Traced]:
    """At `speed` times the trace's pace; requests of one tick are strewn over it by `seed`."""
    rng = Random(seed)
    strewn = [(request.at + rng.random() * TICK_SECONDS, request) for request in requests]
    strewn.sort(key=lambda pair: pair[0])
    first = strewn[0][0]
    return [replace(request, at=(at - first) / speed) for at, request in strewn]


def simulated(requests: list[Traced]) -> list[SimRequest]:
    return [SimRequest(one.at, one.prompt_tokens, one.blocks) for one in requests]


def ideal_seconds(requests: list[Traced], costs: CostModel) -> float:
    """Mean prefill of these, if all found on the spot what any had computed before."""
    seen: set[int] = set()
    total = 0.0
    for request in requests:
        known = 0
        for block in request.blocks:
            if block not in seen:
                break
            known += 1
        cached = max(0, min(known * BLOCK_TOKENS, request.prompt_tokens - 1))
        total += costs.prefill(request.prompt_tokens, cached)
        seen.update(request.blocks[: request.prompt_tokens // BLOCK_TOKENS])
    return total / len(requests)


def write_tokenizer(folder: Path) -> Path:
    """A model folder whose tokenizer knows the bench's words."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"w{number:03x}": number for number in range(NUM_WORDS)} | {"?": NUM_WORDS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
