"""Spans of requests by OpenTelemetry (`--otlp-endpoint`), made from the decision record at its end.

One span a request, with one child for each phase that was measured. The legs carry a `traceparent`
whose parent is the request's span, so that an engine's own spans hang below it.
"""

import re
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.gateway.wire import Decision, Phase
from workers.core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_QUEUED: Final = 2048
"""Spans that wait for the collector; beyond it new ones are dropped by the library."""
TIMEOUT_SECONDS: Final = 5
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Trace(msgspec.Struct, frozen=True, gc=False):
    """The request's span: 128 and 64 bits; `parent_id` 0: it begins the trace."""

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool

    @property
    def traceparent(self) -> bytes:
        flags = 1 if self.sampled else 0
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, flags)


def trace_of(traceparent: bytes) -> Trace:
    """Goes on with the client's trace, or begins one where the header is none."""
    span_id = secrets.randbits(64) or 1
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is not None:
        trace_id, parent_id = int(found[1], 16), int(found[2], 16)
        if trace_id and parent_id:
            return Trace(trace_id, span_id, parent_id, bool(int(found[3], 16) & 1))
    return Trace(secrets.randbits(128) or 1, span_id, 0, sampled=True)


class Tracing:
    """`ended` never blocks: a thread of the library sends, in batches."""

    def __init__(
        self, endpoint: str, gateway_id: str, exporter: "SpanExporter | None" = None
    ) -> None:
        """Raises `ConfigError` where the libraries are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            way_out = "Install it: pip install 'perilune[otel]'."
            raise ConfigError("--otlp-endpoint", endpoint, f"needs {error.name}", way_out) from None
        target = exporter or OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_SECONDS
        )
        self._processor = BatchSpanProcessor(
            target, max_queue_size=MAX_QUEUED, schedule_delay_millis=1000
        )
        self._resource = Resource.create(
            {"service.name": "perilune-gateway", "service.instance.id": gateway_id}
        )

    def ended(self, trace: Trace, decision: Decision) -> None:
        """Hand over the request's spans."""
        if not trace.sampled or decision.e2e_seconds is None:
            return
        for span in self._spans(trace, decision):
            self._processor.on_end(span)

    def close(self) -> None:
        """Send what waits (bounded), and end the thread. Blocks for a moment."""
        self._processor.force_flush(TIMEOUT_SECONDS * 1000)
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the library has no types here

    def _spans(self, trace: Trace, decision: Decision) -> "list[ReadableSpan]":
        start = int(decision.at.timestamp() * 1e9)
        assert decision.e2e_seconds is not None
        operation = "chat" if decision.api == "chat" else "text_completion"
        root = self._span(
            trace, trace.span_id, trace.parent_id, f"{operation} {decision.model}", start,
            decision.e2e_seconds, _attributes(decision, operation), decision.error,
        )  # fmt: skip
        children = [
            self._phase(trace, phase, start) for phase in decision.phases if _is_measured(phase)
        ]
        return [*children, root]

    def _phase(self, trace: Trace, phase: Phase, start: int) -> "ReadableSpan":
        at = start + int((phase.start_seconds or 0.0) * 1e9)
        attributes: dict[str, str | int | float | bool] = {}
        if phase.predicted_seconds is not None:
            attributes["perilune.predicted_seconds"] = phase.predicted_seconds
        if phase.note:
            attributes["perilune.note"] = phase.note
        span_id = secrets.randbits(64) or 1
        seconds = phase.measured_seconds or 0.0
        return self._span(trace, span_id, trace.span_id, phase.name, at, seconds, attributes, "")

    def _span(
        self, trace: Trace, span_id: int, parent_id: int, name: str, start: int, seconds: float,
        attributes: dict[str, str | int | float | bool], error: str,
    ) -> "ReadableSpan":  # fmt: skip
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
        from opentelemetry.trace import (  # noqa: PLC0415
            SpanContext,
            SpanKind,
            Status,
            StatusCode,
            TraceFlags,
        )  # fmt: skip

        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(trace.trace_id, parent_id, is_remote=False, trace_flags=flags)
        is_root = span_id == trace.span_id
        return ReadableSpan(
            name=name,
            context=SpanContext(trace.trace_id, span_id, is_remote=False, trace_flags=flags),
            parent=parent if parent_id else None,
            resource=self._resource,
            attributes=attributes,
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            start_time=start,
            end_time=start + int(seconds * 1e9),
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
        )


def _is_measured(phase: Phase) -> bool:
    return phase.measured_seconds is not None and phase.start_seconds is not None


def _attributes(decision: Decision, operation: str) -> dict[str, str | int | float | bool]:
    """Names of the semantic conventions where there is one, ours elsewhere; None is left out."""
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": decision.model,
        "gen_ai.usage.input_tokens": decision.engine_prompt_tokens or decision.prompt_tokens,
        "gen_ai.usage.output_tokens": decision.output_tokens,
        "http.response.status_code": decision.http_status,
        "perilune.request_id": decision.request_id,
        "perilune.status": decision.status,
        "perilune.tenant": decision.tenant,
        "perilune.hit_tokens": decision.hit_tokens,
        "perilune.prefill_worker": decision.prefill_worker,
        "perilune.decode_worker": decision.decode_worker,
        "perilune.retries": decision.retries,
        "perilune.ttft_seconds": decision.ttft_seconds,
        "perilune.predicted_ttft_seconds": decision.predicted_ttft_seconds,
        "perilune.emulated": decision.emulated,
    }
    return {name: value for name, value in found.items() if value is not None}
