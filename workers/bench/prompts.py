"""Prompts of the acceptance run: made, not fetched, the same for one seed on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_SUBJECTS: Final = (
    "the harbour office", "a night nurse", "the signal box", "our librarian", "the old ferry",
    "a careful auditor", "the bakery", "the survey team", "a retired pilot", "the water board",
    "the museum guide", "a young farmer", "the weather station", "the choir", "a glass maker",
)  # fmt: skip
_VERBS: Final = (
    "records", "repairs", "measures", "sorts", "delivers", "compares", "checks", "describes",
    "counts", "collects", "explains", "publishes", "plans", "inspects", "counts again",
)  # fmt: skip
_OBJECTS: Final = (
    "the tide tables", "every lamp on the pier", "three crates of apples", "the spring timetable",
    "a list of broken tools", "the letters from abroad", "the height of the river",
    "the price of copper", "two hundred paper maps", "the names of all visitors",
    "an engine that will not start", "the rules of the house", "a box of small keys",
)  # fmt: skip
_TIMES: Final = (
    "before sunrise", "on the second Monday", "while the rain lasts", "once a month",
    "after the last train", "between two and four", "as soon as the fog lifts", "in late October",
)  # fmt: skip

WORDS_PER_TOKEN: Final = 0.80
"""Measured on this vocabulary with SmolLM2's tokenizer; lengths are checked, not assumed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`family` shares its first `shared_words` words with the family's other prompts."""

    family: int
    text: str


def _sentences(rng: random.Random, num_words: int) -> str:
    words = 0
    out: list[str] = []
    while words < num_words:
        sentence = (
            f"In entry {rng.randrange(1000)} {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} "
            f"{rng.choice(_OBJECTS)} {rng.choice(_TIMES)}."
        )
        words += sentence.count(" ") + 1
        out.append(sentence)
    return " ".join(out)


def make_prompts(
    num_prompts: int, *, seed: int = 7, num_families: int = 4, shared_tokens: int = 800,
    min_tokens: int = 1050, max_tokens: int = 1900,
) -> list[Prompt]:  # fmt: skip
    """`num_prompts` texts of about `min_tokens` to `max_tokens`, round robin over families.

    Prompts of one family begin with the same `shared_tokens` tokens or so; the rest is theirs.
    """
    rng = random.Random(seed)
    heads = [
        f"Register {family + 1} of the town.\n"
        + _sentences(rng, int(shared_tokens * WORDS_PER_TOKEN))
        for family in range(num_families)
    ]
    prompts = []
    for number in range(num_prompts):
        family = number % num_families
        own = rng.randint(min_tokens, max_tokens) - shared_tokens
        body = _sentences(rng, int(own * WORDS_PER_TOKEN))
        question = f"\nQuestion {number + 1}: write the next entry of this register.\nEntry:"
        prompts.append(Prompt(family, f"{heads[family]}\n{body}{question}"))
    return prompts
