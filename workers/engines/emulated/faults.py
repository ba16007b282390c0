"""Switches that make an emulated worker fail, for tests and game days."""

import msgspec


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /debug/faults; `{}` clears. `times` counts down over requests, -1 = for good."""

    status: int = 0  # answer with this status
    hang: bool = False  # accept and never answer
    hang_health: bool = False  # nor the health route, like a stopped process
    empty: bool = False  # 200 with nothing
    error_body: bool = False  # 200 with an error object, as for a transfer that failed later on
    reset: bool = False  # cut the connection before any byte
    reset_after_chunks: int = -1  # cut a stream after this many chunks
    end_after_chunks: int = -1  # end a stream cleanly, without finish or [DONE]
    delay_seconds: float = 0.0  # before the answer
    drop_transfer_params: bool = False  # a prefill reply without kv_transfer_params
    retry_after: int = 0  # header of a `status` answer
    times: int = -1
    only_with: str = ""  # only requests whose body has this


class FaultSwitch:
    """Gives each request the faults that it shall meet."""

    def __init__(self) -> None:
        self._faults = Faults()

    def set(self, faults: Faults) -> None:
        self._faults = faults

    @property
    def hangs_health(self) -> bool:
        return self._faults.hang_health and self._faults.times != 0

    def take(self, body: bytes | bytearray = b"") -> Faults:
        """Faults of the next request, which has this body."""
        faults = self._faults
        if faults.only_with.encode() not in body:
            return _NONE
        if faults.times == 0:
            return _NONE
        if faults.times > 0:
            faults.times -= 1
        return faults


_NONE = Faults()
