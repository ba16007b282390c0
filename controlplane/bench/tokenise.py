"""What tokenising a chat costs the gateway: a text never seen, and a known one with a new end."""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.prompts import PromptTokenizer

SIZES: Final = (2_000, 20_000)
TEXT: Final = (
    "the harbour master wrote down every ship that came in, its cargo, and the captain's name"
    " when fog lay over the bay\nbell rung twice 1847 boats waited outside until light could be"
    " seen; winter brought timber from north oranges wine south"
)


def tokenise_figures(model_path: str, repeats: int = 30) -> dict[str, dict[str, float]]:
    """By characters: `fresh_ms`, and `known_ms` where all but the last 200 characters came before.

    Medians; rendering of the template and looking up included.
    """
    tokenizer = PromptTokenizer(Path(model_path))
    chance = random.Random(7)
    figures = {}
    for size in SIZES:
        fresh, known = [], []
        for _ in range(repeats):
            text = random_text(chance, size)
            fresh.append(_seconds(tokenizer, text + random_text(chance, 200)))
            known.append(_seconds(tokenizer, text + random_text(chance, 200)))
        figures[str(size)] = {
            "fresh_ms": statistics.median(fresh) * 1000,
            "known_ms": statistics.median(known) * 1000,
        }
    return figures


def random_text(chance: random.Random, size: int) -> str:
    """Words in no order, of `size` characters or a few more."""
    vocabulary = TEXT.split(" ")
    words = []
    while size > 0:
        word = chance.choice(vocabulary)
        words.append(word)
        size -= len(word) + 1
    return " ".join(words)


def spent_seconds(tokenizer: PromptTokenizer, prompts: Sequence[str]) -> float:
    """CPU seconds for the ids of these /v1/completions prompts, one after the other."""
    bodies = [ClientBody(b"", {"prompt": prompt}, chat=False) for prompt in prompts]
    start = time.process_time()
    for body in bodies:
        _tokens(tokenizer, body)
    return time.process_time() - start


def _seconds(tokenizer: PromptTokenizer, text: str) -> float:
    body = ClientBody(b"", {"messages": [{"role": "user", "content": text}]}, chat=True)
    start = time.perf_counter()
    _tokens(tokenizer, body)
    return time.perf_counter() - start


def _tokens(tokenizer: PromptTokenizer, body: ClientBody) -> None:
    prepared = tokenizer.prepare(body)
    assert prepared is not None
    missing = tokenizer.missing(prepared)
    tokenizer.learn(missing, tokenizer.encode_pieces(missing))
    tokenizer.finish(prepared)
