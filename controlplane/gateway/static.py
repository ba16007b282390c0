"""`--static FILE`: a cluster without a control plane, in a few lines of TOML.

    [[worker]]
    url = "http://10.0.0.1:8000"
    role = "prefill"            # prefill | decode | both
    model = "llama-8b"          # as the engine names it
    handshake = "nixl"          # perilune | nixl | mooncake | none

The file is read again on SIGHUP; one with a fault changes nothing.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from controlplane.core.handshake import HandshakeName
from controlplane.gateway.upstream import check_url
from controlplane.gateway.wire import View, ViewModel, ViewPolicy, ViewWorker
from workers.core.errors import ConfigError

MAX_WORKERS: Final = 4000
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
MAX_SHOWN: Final = 200
_STEPS: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_decode_view = msgspec.json.Decoder(View).decode
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    url: _Name
    role: Literal["prefill", "decode", "both"]
    model: _Name
    handshake: HandshakeName = "none"
    id: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{0,256}$")] = ""
    node: str = "external"
    bootstrap: str = ""
    engine_id: str = ""
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | None = None


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    id: _Name
    tokenizer: str = ""
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    worker: list[_Worker]
    model: list[_Model] = []
    policy: dict[str, dict[str, Any]] = {}  # kind -> spec, for all models


def load_static(path: str, revision: int = 1) -> View:
    """Reads the TOML above, or a ClusterView in JSON. Raises `ConfigError` that names the field."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise _wrong(path, f"cannot be read ({error.strerror})", "Name a file that can.") from None
    if len(raw) > MAX_FILE_BYTES:
        raise _wrong(path, f"has more than {MAX_FILE_BYTES} bytes", "List fewer workers.")
    if raw.lstrip().startswith(b"{"):
        return _json(path, raw)
    try:
        content = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"is no TOML: {error}", "Mend the line that is named.") from None
    except RecursionError:
        raise _wrong(path, "is nested too deep", "Write [[worker]] and its fields.") from None
    try:
        file = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        way_out = (
            "Each worker is a [[worker]] with url, role (prefill, decode or both), model and"
            " handshake (perilune, nixl, mooncake or none)."
        )
        raise _wrong(path, _in_words(error, content), way_out) from None
    return _view(path, file, revision)


def _in_words(error: Exception, content: Any) -> str:
    """With the field's name, its entry counted from 1, and what stands there."""
    message, at, place = str(error).rpartition(" - at `$.")
    if not at:
        return str(error)
    steps = [step or int(index) for step, index in _STEPS.findall(place.rstrip("`"))]
    name, value = "", content
    for step in steps:
        name += f"[{step + 1}]" if isinstance(step, int) else f".{step}" if name else step
        try:
            value = value[step]
        except (LookupError, TypeError):
            return f"{name}: {message}"
    if isinstance(value, dict | list):
        return f"{name}: {message}"
    return f"{name} = {repr(value)[:MAX_SHOWN]}: {message}"


def _view(path: str, file: _File, revision: int) -> View:
    if not 0 < len(file.worker) <= MAX_WORKERS:
        raise _wrong(path, f"lists {len(file.worker)} workers", f"List 1 to {MAX_WORKERS}.")
    workers = [_row(path, number, worker) for number, worker in enumerate(file.worker, 1)]
    _check_ids(path, workers)
    models = [ViewModel(m.id, m.tokenizer, m.max_model_len) for m in file.model]
    policies = [_policy(path, kind, spec) for kind, spec in file.policy.items()]
    return View(
        revision=revision, boot_id="static", cluster="static", workers=workers, models=models,
        policies=policies,
    )  # fmt: skip


def _check_ids(path: str, workers: list[ViewWorker]) -> None:
    seen: set[str] = set()
    for row in workers:
        if row.id in seen:
            raise _wrong(path, f"has the worker id {row.id!r} twice", "Give each its own id.")
        seen.add(row.id)


def _json(path: str, raw: bytes) -> View:
    try:
        view = _decode_view(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        try:
            content = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            content = None
        problem = f"is no ClusterView: {_in_words(error, content)}"
        raise _wrong(path, problem, "Mend the field it names.") from None
    for policy in view.policies:
        _policy(path, policy.kind, policy.spec)
    for number, row in enumerate(view.workers, 1):
        _check_url(path, f"worker[{number}].url", row.url)
        if row.namespace is not None and not re.fullmatch(r"([0-9a-f]{2})+", row.namespace):
            problem = f"worker[{number}].namespace = {row.namespace!r} is no digest in hex"
            raise _wrong(path, problem, "Leave it out.")
    _check_ids(path, view.workers)
    return view if view.boot_id else msgspec.structs.replace(view, boot_id="static")


def _policy(path: str, kind: str, spec: dict[str, Any]) -> ViewPolicy:
    # Imported late: a gateway with a control plane never needs pydantic.
    from pydantic import ValidationError  # noqa: PLC0415

    from controlplane.policies.schemas import SPEC_OF_KIND  # noqa: PLC0415

    schema = SPEC_OF_KIND.get(kind)
    if schema is None:
        known = ", ".join(SPEC_OF_KIND)
        raise _wrong(path, f"policy.{kind} is unknown", f"Kinds of policies: {known}.")
    try:
        checked = schema.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["policy", kind, *map(str, first["loc"])])
        problem = f"{field} = {first['input']!r}: {first['msg']}"
        raise _wrong(path, problem, "Mend that field.") from None
    return ViewPolicy(kind, "default", 1, checked.model_dump(mode="json"))


def _row(path: str, number: int, worker: _Worker) -> ViewWorker:
    name = f"worker[{number}]"
    _check_url(path, f"{name}.url", worker.url)
    if worker.handshake == "mooncake" and worker.role != "decode":
        if not worker.bootstrap:
            way_out = "Give the producer's bootstrap address, like http://10.0.0.1:8998."
            raise _wrong(path, f"{name}.bootstrap is missing", way_out)
        _check_url(path, f"{name}.bootstrap", worker.bootstrap)
    elif worker.bootstrap or worker.engine_id:
        problem = f"{name}.bootstrap is for prefill workers of the handshake mooncake"
        raise _wrong(path, problem, "Leave bootstrap and engine_id out.")
    return ViewWorker(
        id=worker.id or worker.url,
        node_id=worker.node,
        role=worker.role,
        model=worker.model,
        url=worker.url,
        state="ready",
        block_tokens=worker.block_tokens,
        max_concurrent_requests=worker.max_concurrent_requests,
        handshake=worker.handshake,
        bootstrap=worker.bootstrap,
        engine_id=worker.engine_id,
    )


def _check_url(path: str, name: str, url: str) -> None:
    try:
        check_url(url)
    except ValueError as error:
        raise _wrong(path, f"{name} = {url!r}: {error}", "Write http://host:port.") from None


def _wrong(path: str, problem: str, way_out: str) -> ConfigError:
    return ConfigError("--static", path, problem, way_out)
