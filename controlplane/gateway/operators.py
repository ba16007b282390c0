"""What operators ask of a gateway itself: which requests run and what they wait for; to end one.

GET  /debug/requests               POST /debug/requests/{id}/cancel
"""

import secrets
from time import monotonic

import msgspec

from controlplane.gateway.answers import AnswerError
from controlplane.gateway.client_connection import Request
from controlplane.gateway.running import Context
from controlplane.gateway.settings import Settings
from controlplane.gateway.watch import Watch, listing_body

PATH = b"/debug/requests"
_CANCEL = b"/cancel"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_ACTOR_CHARS = 64


class Operators:
    """Answers what is under `PATH`."""

    def __init__(self, context: Context, watch: Watch) -> None:
        self._context = context
        self._watch = watch

    def answer(self, request: Request, path: bytes) -> None:
        """Raises `AnswerError` where the request is none of ours, or its sender no operator."""
        check_operator(self._context.settings, request)
        if path == PATH:
            _only(request, path, b"GET", b"HEAD")
            context = self._context
            body = listing_body(
                self._watch, context.settings.gateway_id, context.cluster.data_paths(),
                len(context.running),
            )  # fmt: skip
            request.connection.respond(200, body)
            return
        name = path[len(PATH) + 1 : -len(_CANCEL)].decode("latin-1")
        if not path.endswith(_CANCEL) or not name or "/" in name:
            raise AnswerError(404, f"{path.decode('latin-1')} is not served here", "not_found")
        _only(request, path, b"POST")
        actor = request.headers.get(b"x-perilune-actor", b"").decode("latin-1")
        row = self._watch.cancel(name, actor[:MAX_ACTOR_CHARS], monotonic())
        if row is None:
            message = f"request {name} does not run here (any more), or is ending already"
            raise AnswerError(404, message, "not_running")
        request.connection.respond(200, msgspec.json.encode(row))


def check_operator(settings: Settings, request: Request) -> None:
    """The operator's token; without a control plane nobody has one, and loopback is enough."""
    token = settings.token
    given = request.headers.get(b"authorization", b"")
    right = secrets.compare_digest(given, b"Bearer " + token.encode())
    if right if token else settings.host in _LOOPBACK:
        return
    message = "for operators: send `Authorization: Bearer TOKEN` with the control plane's token"
    raise AnswerError(401, message, "operator_token")


def _only(request: Request, path: bytes, *methods: bytes) -> None:
    if request.method in methods:
        return
    message = (
        f"{request.method.decode()} {path.decode('latin-1')}: only {methods[0].decode()} works"
    )
    raise AnswerError(405, message, "method_not_allowed")
