"""What is served besides `/v1/completions` and `/v1/chat/completions`, and by whom.

Routes that generate go whole to a decode worker, as requests like any other: with a slot, a record
and retries. The rest is computed in one go: any worker of the model takes it.
"""

import re
from typing import Final

from controlplane.gateway.answers import AnswerError

SPLIT: Final = {b"/v1/completions": False, b"/v1/chat/completions": True}
"""Served in two legs; whether it is chat."""

WHOLE: Final = frozenset((
    b"/v1/responses", b"/v1/messages", b"/v1/chat/completions/batch", b"/v1/systemone",
    b"/inference/v1/generate",
))  # fmt: skip
"""Generate tokens. All their bodies know `cache_salt`, which keeps tenants apart."""

ANYWHERE: Final = frozenset((
    b"/v1/embeddings", b"/v2/embed", b"/pooling", b"/classify",
    b"/score", b"/v1/score", b"/rerank", b"/v1/rerank", b"/v2/rerank",
    b"/tokenize", b"/detokenize", b"/v1/messages/count_tokens",
    b"/v1/completions/render", b"/v1/chat/completions/render", b"/v1/messages/render",
    b"/v1/responses/render",
    b"/v1/audio/transcriptions", b"/v1/audio/translations",
))  # fmt: skip
"""Tokens in, an answer out: no KV is handed over and none is kept."""

SALTED: Final = frozenset((
    b"/v1/embeddings", b"/pooling", b"/classify", b"/score", b"/v1/score", b"/rerank",
    b"/v1/rerank", b"/v2/rerank",
))  # fmt: skip
"""Those of `ANYWHERE` whose bodies know `cache_salt`."""

POSTED: Final = frozenset((*SPLIT, *WHOLE, *ANYWHERE))
_STORED: Final = re.compile(rb"/v1/responses/[^/]+(/cancel)?")
_AUTHORITY: Final = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_FORM_MODEL: Final = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n')


def path_of(target: bytes) -> bytes:
    """Without a query, and without the scheme and authority that servers have to take, too
    (RFC 9112, 3.2.2)."""
    if not target.startswith(b"/"):
        found = _AUTHORITY.match(target)
        if found is not None:
            target = target[found.end() :]
    return target.partition(b"?")[0]


def check_not_stored(path: bytes) -> None:
    """Replies are kept by the worker that made them, if at all; we do not know which that was."""
    if _STORED.fullmatch(path):
        message = "stored responses cannot be had here: they stay in one worker; use store=false"
        raise AnswerError(404, message, "not_stored")


def model_of_form(body: bytes) -> str | None:
    """The field `model` of a multipart body."""
    found = _FORM_MODEL.search(body, 0, 64 * 1024) or _FORM_MODEL.search(body[-64 * 1024 :])
    return found[1].decode("utf-8", "replace") if found else None
