"""What the supervisor tells the control plane: the model, and the policies of a declared file."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from workers.supervisor.plan import ClusterPlan

CALL_TIMEOUT_SECONDS = 5.0
ROUTABLE_SECONDS = 30.0
POLL_SECONDS = 0.2
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
log = logging.getLogger(__name__)


async def register_cluster(plan: ClusterPlan, token: str, http: httpx2.AsyncClient) -> bool:
    """Register the model and the declared policies; False: try again."""
    body = {
        "path": plan.model_path,
        "max_model_len": plan.settings.max_model_len,
        "kv_bytes_per_token": kv_bytes_per_token(plan.model_path, plan.settings.dtype),
    }
    url = f"{plan.control_plane_url}/api/v1/models/{plan.model.served_name}"
    if await _call(http, "PUT", url, token, body) is None:
        return False
    return await _apply_policies(plan, token, http)


async def wait_until_routable(plan: ClusterPlan, token: str, http: httpx2.AsyncClient) -> bool:
    """Wait, bounded, until every gateway acts on a view that holds all workers as ready."""
    base = f"{plan.control_plane_url}/api/v1"
    wanted = {each.worker.worker_id for each in plan.workers if each.worker}
    try:
        async with asyncio.timeout(ROUTABLE_SECONDS):
            while True:
                view = await _call(http, "GET", f"{base}/view?after=-1&wait=0", token)
                gateways = await _call(http, "GET", f"{base}/gateways", token)
                if view and gateways and _is_routable(view, gateways, wanted, plan):
                    return True
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return False


def kv_bytes_per_token(model_path: str, dtype: str) -> int | None:
    """K and V of all layers for one token, from the model's config; None where it does not say."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        own_dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        width = DTYPE_BYTES[own_dtype if dtype == "auto" else dtype]
        return int(2 * config["num_hidden_layers"] * heads * head_dim * width)
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _apply_policies(plan: ClusterPlan, token: str, http: httpx2.AsyncClient) -> bool:
    """A field that the file changed since it was applied last is put; others stay as they live."""
    memory = plan.settings.home.run / "applied-policies.json"
    applied = _read_json(memory)
    for kind, wanted in plan.settings.policies.items():
        fresh = {
            name: value
            for name, value in wanted.items()
            if name not in applied.get(kind, {}) or applied[kind][name] != value
        }
        if not fresh:
            continue
        url = f"{plan.control_plane_url}/api/v1/policies/{kind}/default"
        live = await _call(http, "GET", url, token)
        if live is None:
            return False
        body = {"spec": {**live["spec"], **fresh}, "reason": "declared file"}
        headers = {"If-Match": f'"{live["revision"]}"'}
        if await _call(http, "PUT", url, token, body, headers) is None:
            return False
        applied[kind] = wanted
        memory.write_text(json.dumps(applied, indent=1))
    return True


def _is_routable(view: dict[str, Any], gateways: Any, wanted: set[str], plan: ClusterPlan) -> bool:
    ready = {worker["id"] for worker in view["workers"] if worker["state"] == "ready"}
    models = {model["id"] for model in view["models"]}
    listed = gateways["items"] if isinstance(gateways, dict) else gateways
    live = [gateway for gateway in listed if gateway["state"] == "ready"]
    return (
        wanted <= ready
        and plan.model.served_name in models
        and bool(live)
        and all(gateway["view_revision"] >= view["revision"] for gateway in live)
    )


async def _call(
    http: httpx2.AsyncClient,
    method: str,
    url: str,
    token: str,
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Any:
    """The reply's JSON; None where there was none, or an error."""
    try:
        reply = await http.request(
            method,
            url,
            json=body,
            headers={"Authorization": f"Bearer {token}", **(headers or {})},
            timeout=CALL_TIMEOUT_SECONDS,
        )
    except (httpx2.HTTPError, OSError) as error:
        log.debug("%s %s: %s", method, url, error)
        return None
    if reply.status_code >= httpx2.codes.BAD_REQUEST:
        log.warning("%s %s: %s %s", method, url, reply.status_code, reply.text[:300])
        return None
    return reply.json() if reply.content else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
