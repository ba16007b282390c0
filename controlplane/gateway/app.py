"""Routes of the gateway and the assembly of its parts."""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from urllib.parse import unquote

import msgspec
import structlog

from controlplane.core.text_keys import text_prompt
from controlplane.gateway.address import announced_url, bound_url
from controlplane.gateway.admission import read_priority
from controlplane.gateway.agents import Agents
from controlplane.gateway.answers import AnswerError, StoppingError
from controlplane.gateway.api_client import ApiClient
from controlplane.gateway.asked import Asked
from controlplane.gateway.bodies import (
    DEFAULT_TENANT,
    ClientBody,
    decode_leg,
    has_illegal_salt,
    legs_salt,
    parse,
    prompt_text,
    with_rules,
)
from controlplane.gateway.bootstraps import Bootstraps
from controlplane.gateway.client_connection import JSON_TYPE, Request
from controlplane.gateway.cluster import Cluster
from controlplane.gateway.encodings import unpack
from controlplane.gateway.lasting import lasting, regularly
from controlplane.gateway.legs import LegSender
from controlplane.gateway.memory import Collector
from controlplane.gateway.metrics import CONTENT_TYPE, Extra, render
from controlplane.gateway.operators import PATH as OPERATORS_PATH
from controlplane.gateway.operators import Operators, check_operator
from controlplane.gateway.passing import Passed, Passing
from controlplane.gateway.priors import read_geometry
from controlplane.gateway.prober import Prober
from controlplane.gateway.prompts import Tokenizers, num_ids, prompt_chars
from controlplane.gateway.records import Records
from controlplane.gateway.reports import Reporter
from controlplane.gateway.rereading import Rereading
from controlplane.gateway.routes import (
    ANYWHERE,
    POSTED,
    SALTED,
    SPLIT,
    WHOLE,
    check_not_stored,
    model_of_form,
    path_of,
)
from controlplane.gateway.running import Context
from controlplane.gateway.scheduling import Scheduler
from controlplane.gateway.server import Server
from controlplane.gateway.settings import Settings
from controlplane.gateway.spreading import Spreader
from controlplane.gateway.staged import StagedReleases
from controlplane.gateway.static import load_static
from controlplane.gateway.stats import Stats
from controlplane.gateway.tracing import Tracing, trace_of
from controlplane.gateway.view import ViewFollower
from controlplane.gateway.walk import walk
from controlplane.gateway.watch import Watch
from controlplane.gateway.what_if import PATH as PLACE_PATH
from controlplane.gateway.what_if import placed_body
from controlplane.gateway.wire import GatewayStats, View, ViewKey
from workers.process import rss_bytes

log = structlog.get_logger(__name__)

HOUSEKEEPING_SECONDS = 0.25
RECORDS_SECONDS = 0.02
"""Often, for what has come due in a quarter of a second takes longer than a first token may wait."""
MAX_NAMED, MAX_SHOWN = 20, 256
"""Models that an error names, and characters of what a client gave for one."""
_ANYBODY = ViewKey("", DEFAULT_TENANT, "*")


class Gateway:
    """`start`, then serve until `stop`. One event loop, one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.cluster = Cluster(settings, self.stats)
        self.records = Records(self.stats)
        self._tracing: Tracing | None = None
        if settings.otlp_endpoint:
            self._tracing = Tracing(settings.otlp_endpoint, settings.gateway_id)
            self.records.on_traced = self._tracing.ended
        self.tokenizers = Tokenizers()
        self._loop = asyncio.get_running_loop()
        self.server = Server(self.handle, settings.limits, settings.timeouts)
        self.server.on_overdue = self._end_running
        self._agents = Agents(settings.gateway_id, settings.agents, self.cluster, self.records.leg)
        self._bootstraps = Bootstraps()
        self.cluster.on_view.append(self._bootstraps.follow_view)
        sender = LegSender(settings)
        self._staged = StagedReleases(sender, self.stats)
        self._context = Context(
            settings, self.cluster, Scheduler(self.cluster), self.stats, self.records,
            sender, self._agents, self._bootstraps, self._staged,
            Spreader(settings.gateway_id, self.cluster, self._agents, self.stats),
        )  # fmt: skip
        self._passing = Passing(
            self.cluster, sender, self.records, settings.gateway_id, settings.limits.max_retries
        )
        self._collector = Collector()
        self._watch = Watch(self._context)
        self._operators = Operators(self._context, self._watch)
        self._prober = Prober(self.cluster)
        self._ids = count(1)
        self._id_suffix = secrets.token_hex(6)
        self._id_seed = secrets.randbits(32)
        self._tasks: list[asyncio.Task[None]] = []
        self.announced = ""  # to the control plane, once it has started
        self._client: ApiClient | None = None
        self._follower: ViewFollower | None = None
        self._reporter: Reporter | None = None
        self._rereading = Rereading(
            settings.static_view, lambda: self.cluster.view, self.cluster.apply
        )
        self.cluster.on_view.append(self._load_tokenizers)

    # --- life ---

    async def start(self) -> None:
        """Listen, then follow. Raises OSError (address in use), ConfigError (static view)."""
        if self.settings.static_view:
            self.cluster.apply(load_static(self.settings.static_view))
        await self.server.start(self.settings.host, self.settings.port)
        self._keep_house()
        self._last("prober", self._prober.run)
        if self.settings.control_plane:
            await self._start_control_plane()

    async def _start_control_plane(self) -> None:
        settings = self.settings
        self.announced = await announced_url(settings, self.server.port)
        self._client = ApiClient(settings.control_plane, settings.token)
        self._follower = ViewFollower(self._client, settings.gateway_id, self.cluster.apply)
        self._reporter = Reporter(
            self._client, settings.gateway_id, self.announced, self.records,
            lambda: self.cluster.view.revision, self.export_stats,
        )  # fmt: skip
        self._last("view", self._follower.run)
        self._last("reports", self._reporter.run)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain (bounded), send the last report, end every task. Idempotent."""
        await self.server.stop(drain_seconds)
        await self._rereading.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reporter is not None:
            self.records.sweep(inf)  # no leg's report is waited for now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    left = inf
                    while self.records.num_buffered < left:
                        left = self.records.num_buffered
                        await self._reporter.flush(last=True)
        await self._agents.close()
        await self._bootstraps.close()
        await self._staged.close()
        if self._client is not None:
            self._client.close()
        self.cluster.close()
        self.tokenizers.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.sleep(0)

    def _end_running(self) -> None:
        for run in list(self._context.running.values()):
            run.interrupt(StoppingError(run.asked.request_id))

    @property
    def url(self) -> str:
        return bound_url(self.settings, self.server.port)

    def reload_static(self) -> None:
        """Read the static file again (SIGHUP); one with a fault changes nothing."""
        if self.settings.static_view:
            self._rereading.wanted()

    def _keep_house(self) -> None:
        """Apart: what fails in one does not stop the others."""
        steps: dict[str, Callable[[float], None]] = {
            "watch": self._watch.scan,
            "learning": lambda _now: self.cluster.learn(),
            "slots": self.cluster.offer_slots,
            "collector": self._collector.tick,
        }
        for name, step in steps.items():
            self._last(name, partial(regularly, HOUSEKEEPING_SECONDS, step))
        self._last("records", partial(regularly, RECORDS_SECONDS, self.records.sweep))

    def _last(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(self._loop.create_task(lasting(name, run)))

    def _load_tokenizers(self, view: View) -> None:
        """In the tokenisers' thread: 50 ms to seconds each; requests go on without meanwhile."""
        paths = {model.path for model in self.cluster.models.values() if model.path}
        self.tokenizers.keep(paths)
        for path in paths:
            if path not in self.cluster.geometries:
                self.tokenizers.thread.submit(self._read_geometry, path)
            if self.tokenizers.get(path) is None:
                self.tokenizers.thread.submit(self.tokenizers.load, path)

    def _read_geometry(self, path: str) -> None:
        """In the thread; what it finds is handed to the loop."""
        geometry = read_geometry(path)
        if geometry is not None:
            self._loop.call_soon_threadsafe(self.cluster.geometries.__setitem__, path, geometry)

    # --- routes ---

    async def handle(self, request: Request) -> None:
        """The server's handler."""
        path = request.path
        if path not in SPLIT:  # the usual ones are nothing but that
            path = path_of(path)
        if request.method != b"POST" or path not in POSTED:
            if path.startswith(PLACE_PATH):
                await self._would_place(request, path)
            else:
                self._get(request, path)
            return
        request.path = path
        try:
            if b"content-encoding" in request.headers:
                await unpack(request, self.settings.limits.max_body_bytes)
            if path in ANYWHERE:
                await self._passing.run(self._passed(request))
                return
            asked = await self._understand(request)
        except AnswerError as error:
            self.stats.client_errors += error.status < 500
            raise
        self.stats.requests += 1
        await walk(self._context, asked)

    async def _would_place(self, request: Request, path: bytes) -> None:
        """For operators: where this request would go, by its candidates."""
        check_operator(self.settings, request)
        request.path = path.removeprefix(PLACE_PATH)
        if request.method != b"POST" or request.path not in SPLIT:
            known = ", ".join(f"POST {(PLACE_PATH + one).decode()}" for one in SPLIT)
            raise AnswerError(404, f"{path.decode('latin-1')} is not served; {known}", "not_found")
        asked = await self._understand(request, _ANYBODY)
        plan = self._context.scheduler.plan(
            asked.model, asked.prompts, asked.salt, monotonic(), asked.standing,
            asked.max_output_tokens, asked.text, what_if=True,
        )  # fmt: skip
        request.connection.respond(200, placed_body(asked, plan, self.settings.gateway_id))

    def _get(self, request: Request, path: bytes) -> None:
        if path.startswith(OPERATORS_PATH):
            self._operators.answer(request, path)
            return
        known = {b"/v1/models", b"/health", b"/livez", b"/metrics", *POSTED}
        if path not in known and not path.startswith(b"/v1/models/"):
            check_not_stored(path)
            message = f"{path.decode('latin-1')} is not served here; see /v1/models"
            raise AnswerError(404, message, "not_found")
        if request.method not in (b"GET", b"HEAD") or path in POSTED:
            allowed = "POST" if path in POSTED else "GET"
            message = f"{request.method.decode()} {path.decode('latin-1')}: only {allowed} works"
            raise AnswerError(405, message, "method_not_allowed")
        client = request.connection
        if path == b"/health":
            status, body = self._health()
            client.respond(status, body)
        elif path == b"/livez":  # this process answers, whatever its workers do
            client.respond(200, b'{"status":"ok"}')
        elif path == b"/metrics":
            client.respond(200, render(self.export_stats(), self._extra()), CONTENT_TYPE)
        else:
            self._key(request)
            client.respond(200, self._models(unquote(path[11:].decode("latin-1"))))

    # --- understanding a request ---

    async def _understand(self, request: Request, known: ViewKey | None = None) -> Asked:
        key = known or self._key(request)
        tenant, path = key.tenant, request.path
        passed = path in WHOLE
        body = parse(request.body, chat=SPLIT.get(path, False), passed=passed)
        model = self._model(body.model)
        salt = self._salt(tenant, body)
        forms = self.cluster.policies(model).scheduling.normalisation
        applied = with_rules(body, forms) if forms and not passed else []
        longest = self.cluster.models[model].max_model_len  # it may be gone after the wait
        prompts = None if passed else await self._tokens(body, model)
        if longest is not None:
            length = num_ids(body) if prompts is None else max(map(len, prompts), default=0)
            body.is_refused = length + body.output_cap > longest
        request_id = self._new_id()
        rules = self.cluster.policies(model).admission
        standing = rules.standing(tenant, read_priority(request.headers), key.max_priority)
        asked = Asked(request, request_id, body, model, tenant, salt, prompts, standing)
        asked.normalised = applied
        if not passed and (prompts is None or model not in self.cluster.with_blocks):
            asked.text = text_prompt(prompt_text(body), f"{model}\0{salt}".encode())
        if self._tracing is not None:
            asked.trace = trace_of(request.headers.get(b"traceparent", b""))
            request.headers[b"traceparent"] = asked.trace.traceparent
            if not asked.trace.parent_id:  # the state is of a trace that does not go on
                request.headers.pop(b"tracestate", None)
        return asked

    def _new_id(self) -> str:
        # An odd factor makes neighbours differ in the eight characters that consoles show.
        number = (self._id_seed + next(self._ids) * 0x9E3779B1) & 0xFFFFFFFF
        return f"{number:08x}{self._id_suffix}"

    def _salt(self, tenant: str, body: ClientBody) -> str | None:
        own = body.fields.get("cache_salt")
        if tenant != DEFAULT_TENANT and has_illegal_salt(own):
            # An engine that took it as it is would let tenants of one salt share blocks.
            message = "cache_salt: must be a text of 1 to 1024 characters; shorten it"
            raise AnswerError(400, message, "invalid_cache_salt", "cache_salt")
        return legs_salt(tenant, own)

    def _passed(self, request: Request) -> Passed:
        tenant, path = self._key(request).tenant, request.path
        kind = request.headers.get(b"content-type", JSON_TYPE)
        if kind.lower().startswith(b"multipart/form-data"):
            model, sent = self._model(model_of_form(request.body)), request.body
        else:
            body = parse(request.body, chat=False, passed=True)
            salt = self._salt(tenant, body) if path in SALTED else None
            model, sent = self._model(body.model), decode_leg(body, None, salt)
        return Passed(request, self._new_id(), model, path, kind, sent, tenant)

    def _key(self, request: Request) -> ViewKey:
        keys = self.cluster.keys
        if not keys:
            return _ANYBODY
        scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            known = keys.get(hashlib.sha256(key.strip()).hexdigest())
            if known is not None:
                return known
        message = "missing or unknown API key: send `Authorization: Bearer KEY` with a key of ours"
        raise AnswerError(401, message, "invalid_api_key")

    def _model(self, model: object) -> str:
        models = self.cluster.models
        if isinstance(model, str) and model in models:
            return model
        if model is None and len(models) == 1:
            return next(iter(models))
        if model is not None and not isinstance(model, str):
            kind = type(model).__name__
            message = f"model: must be a string, this is a {kind}; {_known(models)}"
            raise AnswerError(400, message, "invalid_model", "model")
        if not self.cluster.has_view:
            raise AnswerError(503, "the gateway has no view of the cluster yet", "no_view",
                              retry_after=1)  # fmt: skip
        raise _no_such_model(model, models)

    async def _tokens(self, body: ClientBody, model: str) -> list[Sequence[int]] | None:
        tokenizer, settings = self.tokenizers.get(self.cluster.models[model].path), self.settings
        inline, most = settings.inline_tokenise_chars, settings.max_tokenise_chars
        if tokenizer is None or prompt_chars(body, most) > most:
            return None
        return await self.tokenizers.tokens(tokenizer, body, inline, most)

    # --- answers of our own ---

    def _health(self) -> tuple[int, bytes]:
        """200 as long as some model can be served; `missing` says what is not there."""
        now = monotonic()
        missing = [
            f"{role} worker for model {model}"
            for model in sorted(self.cluster.models)
            for role in ("prefill", "decode")
            if not self.cluster.serving(model, role, now)
        ]
        serves = any(self.cluster.serving(model, "decode", now) for model in self.cluster.models)
        if not self.cluster.models:
            missing = ["a view of the cluster" if not self.cluster.has_view else "any worker"]
        body = {
            "status": "down" if not serves else "degraded" if missing else "ok",
            "missing": missing,
            "gateway": self.settings.gateway_id,
            "view_revision": self.cluster.view.revision,
            "control_plane": self._control_plane(),
            "agents": self._agents.num_subscribed,
            "other_gateways": self._agents.num_neighbours,
            "modes": self.cluster.modes,
        }  # fmt: skip
        return (200 if serves else 503), msgspec.json.encode(body)

    def _control_plane(self) -> str:
        if self._follower is None or self._reporter is None:
            return "none"
        if not self._follower.connected:
            return "lost"
        refused = self._reporter.refused
        return f"reports refused: {refused}" if refused else "connected"

    def _models(self, name: str) -> bytes:
        """Our own catalogue: no worker is asked (A34)."""
        cards = [self._model_card(model) for model in sorted(self.cluster.models)]
        if not name:
            return msgspec.json.encode({"object": "list", "data": cards})
        for card in cards:
            if card["id"] == name:
                return msgspec.json.encode(card)
        raise _no_such_model(name, self.cluster.models)

    def _model_card(self, model: str) -> dict[str, object]:
        rows = [row for row in self.cluster.view.workers if row.model == model]
        emulated = any(row.engine == "emulated" for row in rows)
        return {
            "id": model,
            "object": "model",
            "created": int(self.stats.started_at.timestamp()),
            "owned_by": "perilune",
            "max_model_len": self.cluster.models[model].max_model_len,
            "metadata": {"emulated": emulated, "workers": [row.id for row in rows]},
        }

    def export_stats(self) -> GatewayStats:
        index_blocks = self.cluster.index.num_blocks()
        return self.stats.export(self.cluster.loads(), index_blocks, rss_bytes())

    def _extra(self) -> Extra:
        stats = self.stats
        return Extra(
            retries_prefill=stats.retries_prefill,
            retries_decode=stats.retries_decode,
            decode_side_prefills=stats.decode_side_prefills,
            handoff_missing=stats.handoff_missing,
            stuck=stats.stuck,
            by_state=self._watch.by_state(),
            cache_bytes={
                "tokens": self.tokenizers.cache.num_bytes,
                "block_keys": self._context.scheduler.key_cache_bytes,
            },
            staged_released=stats.staged_released,
            staged_left=stats.staged_left,
            shares_refused=stats.shares_refused,
            prefetches_cancelled=stats.prefetches_cancelled,
            hedges_sent=self._context.hedges.sent,
            hedges_won=self._context.hedges.won,
            sampled_out=self.records.sampler.sampled_out,
            prompts_left_out=self.records.sampler.prompts_left_out,
            view_revision=self.cluster.view.revision,
            decisions_buffered=self.records.num_buffered,
        )


def _known(models: Iterable[str]) -> str:
    names = sorted(models)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"known models: {', '.join(names[:MAX_NAMED]) or 'none yet'}{more}"


def _no_such_model(model: str | None, models: Iterable[str]) -> AnswerError:
    name = model if model is None or len(model) <= MAX_SHOWN else f"{model[:MAX_SHOWN]}..."
    message = f"the model {name!r} does not exist; {_known(models)}"
    return AnswerError(404, message, "model_not_found", "model")
