"""What work completions and failed calls mean, in the engine's causes and in words."""

from __future__ import annotations

from typing import Final, NamedTuple

from workers.core.transfer_types import Cause

SUCCESS: Final = 0
FLUSHED: Final = 5


class Meaning(NamedTuple):
    """`of_path`: the way between the two ports does not work, whatever else may."""

    name: str
    cause: Cause
    text: str
    of_path: bool = False


_GONE: Final = "the peer's queue pair does not answer: its process ended, or no path leads there"
_MEANINGS: Final = {
    1: Meaning("LOC_LEN_ERR", Cause.CONNECTION, "a message is longer than its buffer here"),
    2: Meaning("LOC_QP_OP_ERR", Cause.CONNECTION, "the device refused a request of ours: port down?", True),
    4: Meaning("LOC_PROT_ERR", Cause.CONNECTION, "our memory is not registered any more"),
    5: Meaning("WR_FLUSH_ERR", Cause.CONNECTION, "given up after an earlier error"),
    8: Meaning("LOC_ACCESS_ERR", Cause.CONNECTION, "our memory may not be used so"),
    9: Meaning(
        "REM_INV_REQ_ERR", Cause.CONNECTION,
        "the peer's device refused the request: another MTU at its end, or no such access granted",
        True,
    ),
    10: Meaning(
        "REM_ACCESS_ERR", Cause.CONNECTION, "the peer's memory is not registered by that key any more"
    ),
    11: Meaning("REM_OP_ERR", Cause.CONNECTION, "the peer's device could not do it"),
    12: Meaning("RETRY_EXC_ERR", Cause.TIMEOUT, _GONE, True),
    13: Meaning(
        "RNR_RETRY_EXC_ERR", Cause.TIMEOUT, "the peer posts no receive buffers: it is stuck or stopped"
    ),
}  # fmt: skip


def meaning_of(status: int) -> Meaning:
    """Of a completion's status that is not success."""
    unknown = Meaning(f"status {status}", Cause.CONNECTION, "an error that has no name here")
    return _MEANINGS.get(status, unknown)
