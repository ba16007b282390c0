"""How the two legs of one request hand over KV, by the connector that the engines run.

| handshake | leg 1 is told | leg 2 is told |
|---|---|---|
| perilune | our transfer id | our transfer id, the number of blocks, their holder |
| nixl | `do_remote_decode` | what leg 1's reply said in `kv_transfer_params`, as it came |
| mooncake | `do_remote_decode`, transfer id | `do_remote_prefill`, transfer id, bootstrap address, engine id |
| none | nothing | nothing |

nixl and mooncake are what upstream's connectors of these names read (vLLM 0.25 to 0.32).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

import msgspec

HandshakeName = Literal["perilune", "nixl", "mooncake", "none"]
HANDSHAKES: Final[tuple[HandshakeName, ...]] = get_args(HandshakeName)

_NIXL_PREFILL: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NO_END: Final[Mapping[str, Any]] = {"min_tokens": 1}
_NOTHING: Final[Mapping[str, Any]] = {}


class Bootstrap(msgspec.Struct, frozen=True):
    """Where a mooncake producer tells consumers how to reach it: `http://host:port`, and the
    engine id that it says there."""

    address: str
    engine_id: str


def at_once(name: HandshakeName) -> bool:
    """Whether leg 2 goes out with leg 1: the connectors meet by the transfer id."""
    return name == "mooncake"


def owes_release(name: HandshakeName) -> bool:
    """Whether a finished leg 1 holds KV that only a decode leg can free."""
    return name == "nixl"


def is_taken_once(name: HandshakeName) -> bool:
    """Whether one read frees what leg 1 has staged: a second reader would get whatever the blocks
    hold by then, and take it for its prompt's KV. So it is for one prompt, one choice and one
    decode engine."""
    return name in ("nixl", "mooncake")


def prefill_fields(name: HandshakeName) -> Mapping[str, Any]:
    """Further fields of leg 1's body. A mooncake producer hands over nothing when its token ends
    the answer, and leg 2 would wait in vain: such a token must not come first."""
    return _NO_END if name == "mooncake" else _NOTHING


def pairs(prefill: HandshakeName, decode: HandshakeName) -> bool:
    """Whether two workers can be the legs of one request."""
    return prefill == decode


def nothing_pairs(prefill: Iterable[HandshakeName], decode: Iterable[HandshakeName]) -> str:
    """What to say of a model of whose prefill workers none fits any of its decode workers; "" if one
    does, or one role is missing."""
    first, second = sorted(set(prefill)), sorted(set(decode))
    if not first or not second or any(pairs(a, b) for a in first for b in second):
        return ""
    return (
        f"its prefill workers have handshake {', '.join(first)}, its decode workers"
        f" {', '.join(second)}: no two can be the legs of one request; run one connector for both"
        " roles, or register a worker of role both"
    )


def is_handoff_missing(name: HandshakeName, reply: dict[str, Any] | None) -> bool:
    """Whether leg 1's answer lacks what leg 2 needs (`perilune`: no number of blocks)."""
    return name == "perilune" or (name == "nixl" and not reply)


def prefill_params(name: HandshakeName, transfer_id: str) -> dict[str, Any] | None:
    """`kv_transfer_params` of leg 1; None: the field is left out. Not for `perilune`."""
    if name == "nixl":
        return dict(_NIXL_PREFILL)
    if name == "mooncake":
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
    return None


def decode_params(
    name: HandshakeName,
    transfer_id: str,
    reply: dict[str, Any] | None,
    bootstrap: Bootstrap | None,
) -> dict[str, Any] | None:
    """`kv_transfer_params` of leg 2; None: the field is left out, and decode computes the prompt.

    `reply`: what leg 1's answer had in that field. `bootstrap`: of the prefill worker.
    """
    if name == "nixl":
        return reply or None  # null must not reach a decode worker
    if name == "mooncake" and bootstrap is not None:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": bootstrap.address,
            "remote_engine_id": bootstrap.engine_id,
        }
    return None
