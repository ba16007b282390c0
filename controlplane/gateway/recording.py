"""What the records policy keeps of a request: whether, and what of its prompt."""

import base64
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from controlplane.gateway.wire import Decision, PromptRecord
from workers.core.ids import BlockHash

MAX_KEYS: Final = 65_536
MAX_TOKENS: Final = 4_000_000
MAX_BUFFERED_BYTES: Final = 16 * 1024 * 1024
"""Of prompts that wait for the control plane; beyond it records go without theirs, counted."""
COMPLETE: Final = frozenset({"finished_stop", "finished_length"})


@dataclass(frozen=True, slots=True)
class Recording:
    """The active records policy's spec, as far as gateways act on it."""

    one_in: int = 1
    prompts: Literal["none", "keys", "tokens"] = "keys"


def recording_of(spec: Mapping[str, Any]) -> Recording:
    return Recording(int(spec.get("sample_one_in", 1)), spec.get("prompts", "keys"))


class Sampler:
    """Which requests are recorded if they end well, and the bytes of prompts under way."""

    def __init__(self) -> None:
        self._numbers = count()
        self.sampled_out = 0
        self.prompts_left_out = 0
        self._buffered = 0

    def keeps(self, recording: Recording) -> bool:
        """One in so many, evenly."""
        return recording.one_in <= 1 or next(self._numbers) % recording.one_in == 0

    def add_prompt(
        self, decision: Decision, recording: Recording, namespace: bytes, block_tokens: int,
        keys: Sequence[BlockHash], tokens: Sequence[int],
    ) -> None:  # fmt: skip
        """Fill in the record's prompt, as the policy says and room allows."""
        if recording.prompts == "none" or len(keys) > MAX_KEYS or len(tokens) > MAX_TOKENS:
            return
        packed = _packed(tokens) if recording.prompts == "tokens" else None
        joined = base64.b64encode(b"".join(keys)).decode()
        size = len(joined) + len(packed or "")
        if self._buffered + size > MAX_BUFFERED_BYTES:
            self.prompts_left_out += 1
            return
        self._buffered += size
        decision.prompt = PromptRecord(namespace.hex(), block_tokens, len(tokens), joined, packed)

    def forget_prompt(self, decision: Decision) -> None:
        """It has arrived, or its record was dropped."""
        prompt, decision.prompt = decision.prompt, None
        if prompt is not None:
            self._buffered -= len(prompt.keys) + len(prompt.tokens or "")


def _packed(tokens: Sequence[int]) -> str:
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return base64.b64encode(zlib.compress(ids.tobytes(), 1)).decode()
