"""One mounted set of pages: reads by REST inside the process, renders, answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from console.viewmodel.curve import curve
from console.viewmodel.levels import Palette
from console.viewmodel.state import Snapshot
from console.web.assets import Assets
from console.web.charts import figure_of
from console.web.curve_chart import curve_csv, curve_figure
from console.web.frame import frame_of
from console.web.inprocess import client_for
from console.web.pages import figures, jobs, policies
from console.web.pages.base import Context, Memory, Page, read_context
from console.web.pages.pool import read_pool
from console.web.render import Renderer
from console.web.respond import FOREVER, send
from console.web.viewer import viewer_of
from controlplane.client_http import ClientError
from controlplane.schema_base import Problem

HTML = "text/html; charset=utf-8"
JSON = "application/json"
MAX_DRAFT_FIELDS = 100
MAX_TARGET_CHARS = 600
PART_HEADER = "x-part"
VARY = "Accept-Encoding, Cookie, X-Part"

Load = Callable[[Context], Awaitable[Page]]


class Website:
    """Holds no connection and no task: nothing to end."""

    def __init__(self, app: FastAPI, cluster: str) -> None:
        self._app = app
        self._cluster = cluster
        self.assets = Assets()
        self._renderer = Renderer(self.assets)
        self._memory = Memory()

    async def page(self, request: Request, load: Load) -> Response:
        """A page, or the page that says why not; its status is the problem's."""
        viewer = viewer_of(request)
        snapshot = Snapshot()
        status = 200
        async with client_for(self._app, request) as client:
            try:
                context = await read_context(client, viewer, self._memory)
                snapshot = context.snapshot
                page = await load(context)
            except ClientError as error:
                page, status = _problem_page(error.problem), error.status or 503
        part = PART_HEADER in request.headers
        if part:
            status = 200  # an update that arrived; what it says is on the page
        frame = frame_of(snapshot, viewer, self._cluster)
        body = self._renderer.html(page, frame, viewer, part=part)
        reply = send(request, body, HTML, status=status, vary=VARY)
        reply.headers["X-Rendered"] = "1"
        return reply

    async def figure(self, request: Request, name: str) -> Response:
        """A heatmap as plotly.js draws it, or as CSV."""
        query = request.query_params
        try:
            async with client_for(self._app, request) as client:
                context = await read_context(client, viewer_of(request), self._memory)
                heat = await figures.load(context, name, query.get("node", ""))
                happened = await figures.events(context, heat)
        except ClientError as error:
            return _problem(request, error.problem)
        if query.get("as") == "csv":
            return _csv(request, figures.to_csv(heat), figures.csv_name(context, name))
        figure = figure_of(heat, _palette(request), happened)
        return _json(request, figure.update(query.get("have", "")))

    async def curve(self, request: Request) -> Response:
        """The what-if curve as plotly.js draws it, or as CSV."""
        query = request.query_params
        try:
            async with client_for(self._app, request) as client:
                context = await read_context(client, viewer_of(request), self._memory)
                report = await read_pool(context)
        except ClientError as error:
            return _problem(request, error.problem)
        if query.get("as") == "csv":
            name = figures.csv_name(context, "what-if")
            return _csv(request, curve_csv(report), name)
        return _json(request, curve_figure(curve(report), _palette(request)))

    async def act(self, request: Request, kind: str) -> Response:
        """What an act would do, and the request that does it; writes nothing."""
        target = request.query_params.get("target", "")[:MAX_TARGET_CHARS]
        try:
            async with client_for(self._app, request) as client:
                context = await read_context(client, viewer_of(request), self._memory)
                found = await jobs.act_of(context, kind, target)
        except ClientError as error:
            return _problem(request, error.problem)
        return _json(request, found)

    async def check(self, request: Request, kind: str, scope: str) -> Response:
        """What a draft would change and do; writes nothing."""
        query = dict(list(request.query_params.items())[:MAX_DRAFT_FIELDS])
        base = query.pop("base", "")
        try:
            async with client_for(self._app, request) as client:
                context = await read_context(client, viewer_of(request), self._memory)
                found = await policies.check_draft(context, kind, scope, query, base)
        except ClientError as error:
            return _problem(request, error.problem)
        return _json(request, found)

    async def static(self, request: Request, digest: str, name: str) -> Response:
        """A file of this version; an old page's address is gone."""
        asset = self.assets.get(digest, name)
        if asset is None:
            return send(request, b"No such file in this version.\n", "text/plain", status=404)
        return send(request, asset.body, asset.media_type, cache=FOREVER, gzipped=asset.gzipped)


def _problem_page(problem: Problem) -> Page:
    return Page("problem.html", problem.title, "", [(problem.title, "")], {"problem": problem})


def _problem(request: Request, problem: Problem) -> Response:
    body = problem.model_dump_json(exclude_none=True).encode()
    return send(request, body, "application/problem+json", status=problem.status or 503)


def _csv(request: Request, text: str, name: str) -> Response:
    reply = send(request, text.encode(), "text/csv; charset=utf-8")
    reply.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return reply


def _palette(request: Request) -> Palette:
    return "light" if request.query_params.get("theme") == "light" else "dark"


def _json(request: Request, body: dict[str, object]) -> Response:
    return send(request, json.dumps(body, separators=(",", ":")).encode(), JSON)
