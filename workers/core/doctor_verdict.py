"""The doctor's verdict on one thing."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "warn", "fail", "unknown"]


class Check(msgspec.Struct, frozen=True):
    """One verdict. `what_to_do` is empty where nothing is to be done."""

    name: str
    state: State
    value: str
    wanted: str = ""
    what_to_do: str = ""
