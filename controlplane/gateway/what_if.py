"""Where a request would go now: asked by operators and benches, answered without counting it.

POST /debug/place/v1/completions     POST /debug/place/v1/chat/completions     body: the request's
"""

import msgspec

from controlplane.core.routing import decode_candidates, prefill_candidates
from controlplane.gateway.asked import Asked
from controlplane.gateway.scheduling import Plan

PATH = b"/debug/place"


def placed_body(asked: Asked, plan: Plan, gateway_id: str) -> bytes:
    """JSON: what a decision record would say of placement, the chosen workers first. For the
    default tenant and class; nobody tries out another worker, admission is not asked."""
    prefill, decode = plan.prefill, plan.free_decode
    chosen = decode[0].worker_id if decode else ""
    return msgspec.json.encode({
        "gateway": gateway_id,
        "model": asked.model,
        "prompt_tokens": asked.num_tokens,
        "prefill_worker": prefill[0].option.worker_id if prefill else "",
        "decode_worker": chosen,
        "predicted_ttft_seconds": plan.predicted_ttft_seconds,
        "prefill_candidates": prefill_candidates(prefill, by_turn=plan.by_turn),
        "decode_candidates": decode_candidates(plan.decode, chosen),
    })  # fmt: skip
