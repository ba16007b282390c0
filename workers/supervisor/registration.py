"""What the supervisor tells the control plane: the model, and the policies of a declared file."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

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
    api = ControlPlaneApi(plan.control_plane_url, token, http)
    if await api.call("PUT", f"models/{quote(plan.model.served_name, safe='')}", body) is None:
        return False
    return await _apply_policies(plan, api)


async def wait_until_routable(plan: ClusterPlan, token: str, http: httpx2.AsyncClient) -> str:
    """Wait, bounded, until every gateway acts on a view that holds all workers as ready.

    Returns what is missing at the end of the wait, or "".
    """
    api = ControlPlaneApi(plan.control_plane_url, token, http)
    missing = "the control plane did not answer"
    try:
        async with asyncio.timeout(ROUTABLE_SECONDS):
            while True:
                view = await api.call("GET", "view?after=0&wait=0")
                gateways = await api.call("GET", "gateways")
                if view is None or gateways is None:
                    missing = api.last_problem
                else:
                    missing = _missing(view, gateways, plan)
                if not missing:
                    return ""
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return missing


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


async def _apply_policies(plan: ClusterPlan, api: ControlPlaneApi) -> bool:
    """A field that the file changed since it was applied last is put; others stay as they live."""
    memory = plan.settings.home.run / "applied-policies.json"
    applied = _read_json(memory)
    for kind, wanted in plan.settings.policies.items():
        path = f"policies/{kind}/default"
        live = await api.call("GET", path)
        if live is None:
            return False
        # The first revision is nobody's: a new database remembers no application of the file.
        last = applied.get(kind, {}) if live["revision"] > 1 else {}
        fresh = {name: value for name, value in wanted.items() if last.get(name) != value}
        if not fresh:
            continue
        body = {"spec": {**live["spec"], **fresh}, "reason": "declared file"}
        headers = {"If-Match": f'"{live["revision"]}"'}
        if await api.call("PUT", path, body, headers) is None:
            return False
        applied[kind] = wanted
        _write_json(memory, applied)
    return True


def _missing(view: dict[str, Any], gateways: Any, plan: ClusterPlan) -> str:
    ready = {worker["id"] for worker in view["workers"] if worker["state"] == "ready"}
    wanted = {each.worker.worker_id for each in plan.workers if each.worker}
    if not wanted <= ready:
        return f"the control plane does not list {', '.join(sorted(wanted - ready))} as ready"
    if plan.model.served_name not in {model["id"] for model in view["models"]}:
        return f"the control plane does not list the model {plan.model.served_name}"
    listed = gateways["items"] if isinstance(gateways, dict) else gateways
    live = [gateway for gateway in listed if gateway["state"] == "ready"]
    if not live:
        return "no gateway reports to the control plane"
    late = [each["id"] for each in live if each["view_revision"] < view["revision"]]
    return f"gateway {late[0]} does not act on the newest view" if late else ""


class ControlPlaneApi:
    """Bounded calls; None stands for no answer or an error, and `last_problem` says which."""

    def __init__(self, url: str, token: str, http: httpx2.AsyncClient) -> None:
        self._base = f"{url}/api/v1/"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http = http
        self.last_problem = ""

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The reply's JSON."""
        try:
            reply = await self._http.request(
                method,
                self._base + path,
                json=body,
                headers={**self._headers, **(headers or {})},
                timeout=CALL_TIMEOUT_SECONDS,
            )
        except (httpx2.HTTPError, OSError) as error:
            return self._fail(f"{method} {path}: {error}")
        if reply.status_code >= httpx2.codes.BAD_REQUEST:
            return self._fail(f"{method} {path}: {reply.status_code} {reply.text[:300]}")
        try:
            return reply.json() if reply.content else {}
        except ValueError as error:
            return self._fail(f"{method} {path}: answered no JSON ({error})")

    def _fail(self, problem: str) -> None:
        if problem != self.last_problem:  # calls are repeated: once is enough
            log.warning("control plane: %s", problem)
        self.last_problem = problem


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        return {}
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; a full disk must not end what runs."""
    fresh = path.with_suffix(".tmp")
    try:
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(path)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error)
