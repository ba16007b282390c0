"""Affinity for prompts whose token ids are not known: chained keys over pieces of their text, and
who was sent which of late. An estimate: what an engine has evicted since is not seen.

Used where a prompt is too long to be tokenised here, has images or no known template, or goes to
engines that publish no block events.
"""

from typing import Final, NamedTuple

from controlplane.core.recency import RecencyMap

PIECE_BYTES: Final = 2048
MAX_PIECES: Final = 512
"""Of one prompt; what comes after them counts as not shared."""
BYTES_PER_TOKEN: Final = 4
"""Of usual English text; it only has to be alike for all candidates."""
MAX_KEYS: Final = 65_536
MAX_OWNERS: Final = 8
"""Of one key; the ones that were sent it last."""


class TextPrompt(NamedTuple):
    """A prompt by its text."""

    keys: tuple[int, ...]
    num_tokens: int


def text_prompt(text: bytes, salt: bytes) -> TextPrompt:
    """`salt`: model and tenant, which share nothing with others.

    Keys are of this process only, so its own hash will do: it is twenty times as quick as a
    digest, and two that are equal by chance cost a cache hit at most.
    """
    keys: list[int] = []
    key = hash(salt)
    last = min(len(text) // PIECE_BYTES, MAX_PIECES)
    for i in range(last):
        piece = text[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]
        key = hash((key, piece))
        keys.append(key)
    return TextPrompt(tuple(keys), len(text) // BYTES_PER_TOKEN)


class TextIndex:
    """Which owners (nodes or workers) were sent which keys; the last used ones are kept."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._owners = RecencyMap[int, tuple[str, ...]](max_keys)

    def __len__(self) -> int:
        return len(self._owners)

    def learn(self, prompt: TextPrompt, owner: str) -> None:
        """`owner` has computed the prompt. Heads stay longer than tails."""
        for key in reversed(prompt.keys):
            others = [name for name in self._owners.peek(key) or () if name != owner]
            self._owners.put(key, (*others, owner)[-MAX_OWNERS:])
        while len(self._owners) > self._max_keys:
            self._owners.pop_oldest()

    def held_tokens(self, prompt: TextPrompt) -> dict[str, int]:
        """For each owner: about how many tokens it has from the prompt's head on."""
        held: dict[str, int] = {}
        present: set[str] | None = None
        for i, key in enumerate(prompt.keys, 1):
            owners = set(self._owners.peek(key) or ())
            present = owners if present is None else present & owners
            if not present:
                break
            held.update(dict.fromkeys(present, i * PIECE_BYTES // BYTES_PER_TOKEN))
        return held
