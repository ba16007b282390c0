"""Errors of the data plane.

PeriluneError
├── ConfigError        what the operator wrote; names field, value and way out
├── RefusedError       a peer said no at the handshake; carries both values
├── ProtocolError      a peer broke the wire format
└── AgentUnavailableError  no answer from the node agent within the bound
"""


class PeriluneError(Exception):
    """Root of every error that this project raises on purpose."""


class ConfigError(PeriluneError):
    """A setting that cannot work.

    The text always reads: what is wrong with which field and value, then the way out.
    """

    def __init__(self, field: str, value: object, problem: str, way_out: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}. {way_out}")
        self.field = field
        self.value = value
        self.problem = problem
        self.way_out = way_out


class RefusedError(PeriluneError):
    """The other side refused to work with us; `code` is stable, the text names both values."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProtocolError(PeriluneError):
    """Bytes that are no message of ours."""


class AgentUnavailableError(PeriluneError):
    """The node agent cannot be reached or did not answer in time."""
