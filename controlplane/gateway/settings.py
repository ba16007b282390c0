"""Settings of one gateway process, passed down; nothing reads them from a global."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what clients may send and hold. Bytes, counts."""

    max_header_bytes: int = 64 * 1024
    max_body_bytes: int = 32 * 1024 * 1024
    max_connections: int = 4096
    max_pipelined: int = 8
    max_waiting: int = 1024  # requests that wait for a decode slot
    max_reply_bytes: int = 64 * 1024 * 1024  # of an engine's whole (not streamed) reply
    max_retries: int = 2  # a leg, on other workers


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for each phase; there is no total, so long generations are not cut."""

    connect: float = 2.0
    prefill: float = 300.0  # leg 1, from its last byte out to its head back
    first_byte: float = 120.0  # leg 2, to its first body byte
    whole_reply: float = 3600.0  # leg 2 of a plain request: the engine answers only at its end
    idle: float = 120.0  # between two pieces of a reply
    slot: float = 60.0  # waiting for a decode slot
    client_read: float = 60.0  # a request's head and body must arrive within
    client_idle: float = 75.0  # keep-alive
    client_stall: float = 300.0  # a client that does not read
    drain: float = 30.0  # after SIGTERM
    worker_keep_alive: float = 4.0  # below the engine's own 5 s


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the command line says."""

    gateway_id: str = "gw-1"
    host: str = "127.0.0.1"
    port: int = 8000
    advertise: str = ""  # URL by which others reach it; empty: by host and port
    control_plane: str = ""  # URL; empty: none
    token: str = ""
    agents: tuple[str, ...] = ()  # followed besides those of the view
    models: dict[str, str] = field(default_factory=dict)  # name -> path, without a control plane
    static_view: str = ""  # file with a ClusterView
    otlp_endpoint: str = ""  # URL of an OpenTelemetry collector (HTTP); empty: no spans
    inline_tokenise_chars: int = 8_192  # not cached ones; more are tokenised in a thread
    max_tokenise_chars: int = 1_000_000  # that wait for it; more: placed by text
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
