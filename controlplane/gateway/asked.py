"""What a client asks, as understood so far."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from controlplane.core.admission import Standing
from controlplane.core.normalisation import Rule
from controlplane.core.text_keys import TextPrompt
from controlplane.gateway.bodies import (
    DEFAULT_TENANT,
    ClientBody,
    Holder,
    LegParams,
    label_of,
    session_of,
)
from controlplane.gateway.client_connection import Request
from controlplane.gateway.tracing import Trace

MAX_ECHOED_ID = 200
"""Bytes of a client's own request id; a longer one comes back as ours."""


DEFAULT_COMPLETION_TOKENS = 16
"""What engines generate for /v1/completions where the body gives no cap."""


class Asked(msgspec.Struct):
    """A request of /v1 with its ids, tenant and prompts (None: tokens unknown)."""

    request: Request
    request_id: str
    body: ClientBody
    model: str
    tenant: str
    salt: str | None
    prompts: Sequence[Sequence[int]] | None
    standing: Standing = Standing()
    trace: Trace | None = None
    normalised: list[Rule] = []  # that changed the body
    text: TextPrompt | None = None  # where token ids are unknown, or of no use

    @property
    def num_tokens(self) -> int | None:
        return None if self.prompts is None else sum(map(len, self.prompts))

    @property
    def max_output_tokens(self) -> int | None:
        """The client's own cap; None: the engine's limit holds."""
        fields = self.body.fields
        cap = fields.get("max_completion_tokens") if self.body.chat else None
        cap = fields.get("max_tokens") if cap is None else cap
        if type(cap) is int and cap > 0:
            return cap
        return None if cap is not None or self.body.chat else DEFAULT_COMPLETION_TOKENS

    @property
    def pool_tenant(self) -> str:
        """As the pool books it: by name, whatever salts the tenant uses; "" for the default one,
        whose salts are booked each for itself."""
        return "" if self.tenant == DEFAULT_TENANT else self.tenant

    def params(
        self,
        leg: Literal["prefill", "decode"],
        num_blocks: int | None,
        holder: Holder | None,
        target: Holder | None = None,
    ) -> LegParams:
        """What the leg's worker is told beside the client's own body."""
        headers, tenant = self.request.headers, self.tenant
        return LegParams(
            self.request_id, leg, num_blocks, session_of(headers), holder, label_of(headers),
            target, "" if tenant == DEFAULT_TENANT else tenant,
        )  # fmt: skip

    def client_headers(self, passed: bytes) -> bytes:
        """Ids for the client: its own echoed where it sent one, and ours."""
        ours = self.request_id.encode()
        own = self.request.headers.get(b"x-request-id")
        if own is None or not 0 < len(own) <= MAX_ECHOED_ID:
            own = ours
        return b"x-request-id: %b\r\nx-perilune-request-id: %b\r\n%b" % (own, ours, passed)
