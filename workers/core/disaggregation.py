"""When does it pay to compute a prompt on one node and decode on another? Pure arithmetic.

The KV of a prompt of p tokens has to arrive no later than it could have been computed:

    p * kv_bytes_per_token / B  <=  T(p)      so      B >= p * kv_bytes_per_token / T(p)

B in bytes a second, T(p) the prefill's seconds. With T(p) = flops(p) / G, G the FLOPS that a prefill
instance really reaches, it is a bound on B / G that follows from the model's geometry alone:

    flops(p) = layers * (a * d * p^2 + b * d^2 * p)      B / G >= p * kv_bytes_per_token / flops(p)

d is the hidden size, a = 4 (scores and weighted values: two products of p x p x d, two operations
each), b * d^2 twice the layer's weights. This is the condition under which Mooncake (Qin et al.,
USENIX FAST '25) finds that a remote prefix is worth its transfer, B/G > 2ds / (gqa (apd + bd^2));
for Llama 3 70B and 8192 tokens they give 6 GB/s beside eight A800 and 19 GB/s (152 Gbps) beside
eight H800. Where the prefill rate was measured it stands for G and flops(p): rate = p / T(p).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

ATTENTION: Final = 4
LONG_PROMPT_TOKENS: Final = 256
"""Shorter prefills are mostly overhead: they say little about the rate."""
MIN_SAMPLES: Final = 3


class Geometry(msgspec.Struct, frozen=True):
    """A decoder-only transformer with grouped queries and gated or plain feed-forward layers.

    `weights`: of one layer. `kv_bytes_per_token`: over all layers.
    """

    layers: int
    hidden: int
    weights: int
    kv_bytes_per_token: int

    def flops(self, prompt_tokens: int) -> float:
        """Operations of a whole prefill."""
        attention = ATTENTION * self.hidden * prompt_tokens**2
        return float(self.layers * (attention + 2 * self.weights * prompt_tokens))

    def bytes_per_flop(self, prompt_tokens: int) -> float:
        """The least B / G with which the transfer of such a prompt pays."""
        return prompt_tokens * self.kv_bytes_per_token / self.flops(prompt_tokens)


def geometry_of(config: Mapping[str, object], element_bytes: int = 2) -> Geometry | None:
    """From a model's config.json, as Hugging Face writes it; None where it says too little."""

    def number(name: str, default: int = 0) -> int:
        value = config.get(name, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    heads, inner = number("num_attention_heads"), number("intermediate_size")
    if min(layers, hidden, heads, inner) < 1:
        return None
    kv_heads = number("num_key_value_heads", heads) or heads
    head = number("head_dim", hidden // heads) or hidden // heads
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    weights = attention + 3 * hidden * inner
    return Geometry(layers, hidden, weights, 2 * layers * kv_heads * head * element_bytes)


class Bound(msgspec.Struct, frozen=True):
    """Bytes a second that a pair must move for disaggregation to pay, and where that comes from."""

    bytes_per_second: float
    kv_bytes_per_token: int
    tokens_per_second: float  # of one prefill instance
    source: str  # "measured", "given" or "geometry"
    prompt_tokens: int | None = None  # that the rate is for, with "geometry"


def bound_by_rate(kv_bytes_per_token: int, tokens_per_second: float, source: str) -> Bound:
    """From a prefill rate that was measured or is given."""
    rate = kv_bytes_per_token * tokens_per_second
    return Bound(rate, kv_bytes_per_token, tokens_per_second, source)


def bound_by_geometry(geometry: Geometry, flops: float, prompt_tokens: int) -> Bound:
    """From the FLOPS that a prefill instance really reaches."""
    rate = flops * geometry.bytes_per_flop(prompt_tokens)
    kv_bytes = geometry.kv_bytes_per_token
    return Bound(rate, kv_bytes, rate / kv_bytes, "geometry", prompt_tokens)


def prefill_rate(samples: Iterable[tuple[int, float]]) -> float | None:
    """Tokens a second out of (tokens computed, seconds) of prefills; None: too few long ones."""
    rates = [
        tokens / seconds
        for tokens, seconds in samples
        if tokens >= LONG_PROMPT_TOKENS and seconds > 0
    ]
    return statistics.median(rates) if len(rates) >= MIN_SAMPLES else None


def gbps(bytes_per_second: float) -> str:
    """`38 Gbps`, `0.4 Gbps`."""
    bits = bytes_per_second * 8 / 1e9
    return f"{bits:.0f} Gbps" if bits >= 9.95 else f"{bits:.2g} Gbps"
