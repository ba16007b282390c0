"""A thin client of etcd's v3 API: bounded calls, several endpoints, watches that tell when silent.

Every try has a deadline and every call a longer one over all tries. An endpoint that fails is left
alone for a while. Only what may be repeated is repeated: reads, and what names its own identity (a
lease's id) or its own condition (a guarded transaction).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from workers.core.errors import ConfigError
from workers.directory.base import (
    CompactedError,
    DirectoryError,
    DirectoryReadOnlyError,
    DirectoryUnavailableError,
    LeaseLostError,
)
from workers.directory.etcd_messages import EVENT_DELETE, MESSAGES

PAGE_KEYS: Final = 5000
MAX_TXN_OPS: Final = 128
"""etcd's default; one more is refused."""
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
BAD_SECONDS: Final = 0.5
MAX_BAD_SECONDS: Final = 5.0
_CHANNEL_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", 10_000),  # under 5 s etcd answers with GOAWAY
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
_OUT_OF_SPACE: Final = "database space exceeded"
_NO_LEASE: Final = "lease not found"
_LEASE_EXISTS: Final = "lease already exists"
_COMPACTED: Final = "compacted"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. `ca` alone checks the server; certificate and key name this client."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """ConfigError on files that cannot be read."""
        parts = []
        for name, path in (("ca", self.ca), ("key", self.key), ("cert", self.certificate)):
            try:
                parts.append(path.read_bytes() if path is not None else None)
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
                raise ConfigError(
                    f"directory {name}", str(path), problem, "Check the path."
                ) from None
        return grpc.ssl_channel_credentials(*parts)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds."""

    a_try: float = 1.0
    a_call: float = 5.0
    silence: float = 4.0  # of a watch, before its server counts as gone
    progress: float = 1.0  # between two questions whether a watch is alive


class KeyValue(NamedTuple):
    """One key at one revision."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class KeyEvent(NamedTuple):
    """A key was put (`value`) or deleted (None) at `revision`."""

    key: bytes
    value: bytes | None
    revision: int


class Progress(NamedTuple):
    """The watch is alive and has told everything up to this revision."""

    revision: int


class TxnResult(NamedTuple):
    """`revision` is the store's after it; `responses` one an operation."""

    succeeded: bool
    revision: int
    responses: list[Any]


@dataclass(slots=True, eq=False)
class _Endpoint:
    address: str
    channel: grpc.aio.Channel
    failures: int = 0
    bad_until: float = 0.0
    calls: dict[str, Any] = field(default_factory=dict)

    def failed(self) -> None:
        pause = min(BAD_SECONDS * 2.0 ** min(self.failures, 8), MAX_BAD_SECONDS)
        self.failures += 1
        self.bad_until = time.monotonic() + pause

    def succeeded(self) -> None:
        self.failures, self.bad_until = 0, 0.0


class EtcdClient:
    """One process's access; made inside the event loop that uses it. `close` ends it."""

    def __init__(
        self, endpoints: Sequence[str], tls: Tls | None = None, bounds: Bounds | None = None
    ) -> None:
        if not endpoints:
            raise ConfigError("directory", "", "names no endpoint", "Write etcd://HOST:PORT,...")
        self.bounds = bounds or Bounds()
        self._endpoints = [_Endpoint(address, _channel(address, tls)) for address in endpoints]
        self._current = self._endpoints[0]
        self._watched = self._endpoints[-1]

    async def close(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    # --- reading ----------------------------------------------------------------------------

    async def get(self, key: bytes) -> tuple[KeyValue | None, int]:
        """The key and the store's revision."""
        reply = await self._repeat("KV/Range", MESSAGES["RangeRequest"](key=key), "RangeResponse")
        return (_key_value(reply.kvs[0]) if reply.kvs else None), reply.header.revision

    async def read_all(self, prefix: bytes) -> tuple[list[KeyValue], int]:
        """All keys under `prefix` as of one revision, read in pages. CompactedError: once more."""
        found: list[KeyValue] = []
        revision, start = 0, prefix
        while True:
            request = MESSAGES["RangeRequest"](
                key=start, range_end=prefix_end(prefix), limit=PAGE_KEYS, revision=revision
            )
            reply = await self._repeat("KV/Range", request, "RangeResponse")
            revision = revision or reply.header.revision
            found += map(_key_value, reply.kvs)
            if not reply.more or not reply.kvs:
                return found, revision
            start = found[-1].key + b"\0"

    # --- writing ----------------------------------------------------------------------------

    async def txn(
        self, compare: Sequence[Any], success: Sequence[Any], *, repeat: bool = False
    ) -> TxnResult:
        """`repeat` only where a second run of a first one that went through does no harm."""
        request = MESSAGES["TxnRequest"](compare=compare, success=success)
        run = self._repeat if repeat else self._once
        reply = await run("KV/Txn", request, "TxnResponse")
        return TxnResult(reply.succeeded, reply.header.revision, list(reply.responses))

    async def grant(self, lease: int, ttl_seconds: float) -> float:
        """A lease under an id chosen by the caller, so that asking again is harmless."""
        request = MESSAGES["LeaseGrantRequest"](ID=lease, TTL=max(1, round(ttl_seconds)))
        try:
            reply = await self._repeat("Lease/LeaseGrant", request, "LeaseGrantResponse")
        except DirectoryError as error:
            if _LEASE_EXISTS in str(error):  # a try before got through unheard
                return float(request.TTL)
            raise
        return float(reply.TTL)

    async def keep_alive(self, lease: int) -> float:
        """Seconds that it lives from now on. LeaseLostError."""
        request = MESSAGES["LeaseKeepAliveRequest"](ID=lease)
        reply = await self._retry(lambda endpoint: self._keep_alive(endpoint, request), again=True)
        if reply.TTL <= 0:
            raise LeaseLostError(f"lease {lease:x} is over")
        return float(reply.TTL)

    async def revoke(self, lease: int) -> None:
        """End a lease and every key on it; one that is over is fine."""
        request = MESSAGES["LeaseRevokeRequest"](ID=lease)
        with contextlib.suppress(LeaseLostError):
            await self._repeat("Lease/LeaseRevoke", request, "LeaseRevokeResponse")

    # --- watching ---------------------------------------------------------------------------

    async def watch(self, prefix: bytes, revision: int) -> AsyncIterator[list[KeyEvent] | Progress]:
        """What happened under `prefix` from `revision` on, until the server fails or falls silent.

        Ends with DirectoryUnavailableError, or CompactedError where `revision` is forgotten.
        """
        endpoint = self._pick(avoid=self._current if len(self._endpoints) > 1 else None)
        self._watched = endpoint
        call = self._method(endpoint, "Watch/Watch", "WatchResponse", "stream_stream")(
            metadata=(("hasleader", "true"),)
        )
        try:
            create = MESSAGES["WatchCreateRequest"](
                key=prefix, range_end=prefix_end(prefix), start_revision=revision,
                progress_notify=True,
            )  # fmt: skip
            await _within(self.bounds.a_try, call.write(_request(create_request=create)))
            async for reply in self._heard(call):
                _refuse_end(endpoint, reply)
                endpoint.succeeded()
                if reply.events:
                    yield [_key_event(event) for event in reply.events]
                else:
                    yield Progress(reply.header.revision)
        except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            endpoint.failed()
            raise _told(endpoint, error) from None
        except DirectoryUnavailableError:
            endpoint.failed()
            raise
        finally:
            call.cancel()

    async def _heard(self, call: Any) -> AsyncIterator[Any]:
        """Replies; when none comes for a while the server is asked whether it is there."""
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        heard = time.monotonic()
        try:
            while True:
                # not `wait_for`: a cancelled read cancels the call
                await asyncio.wait([reading], timeout=self.bounds.progress)
                if reading.done():
                    reply = reading.result()
                    if reply is grpc.aio.EOF:
                        raise DirectoryUnavailableError("the server ended the watch")
                    heard = time.monotonic()
                    reading = asyncio.ensure_future(call.read())
                    yield reply
                    continue
                if time.monotonic() - heard > self.bounds.silence:
                    raise DirectoryUnavailableError(f"silent for {self.bounds.silence:g} s")
                progress = MESSAGES["WatchProgressRequest"]()
                await _within(self.bounds.a_try, call.write(_request(progress_request=progress)))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    # --- inside -----------------------------------------------------------------------------

    async def _once(self, method: str, request: Any, reply: str) -> Any:
        return await self._retry(self._caller(method, request, reply), again=False)

    async def _repeat(self, method: str, request: Any, reply: str) -> Any:
        return await self._retry(self._caller(method, request, reply), again=True)

    def _caller(
        self, method: str, request: Any, reply: str
    ) -> Callable[[_Endpoint], Awaitable[Any]]:
        async def call(endpoint: _Endpoint) -> Any:
            unary = self._method(endpoint, method, reply, "unary_unary")
            return await unary(request, timeout=self.bounds.a_try)

        return call

    async def _retry(self, call: Callable[[_Endpoint], Awaitable[Any]], *, again: bool) -> Any:
        deadline = time.monotonic() + self.bounds.a_call
        while True:
            endpoint = self._pick()
            try:
                reply = await call(endpoint)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                told = _told(endpoint, error)
            else:
                endpoint.succeeded()
                self._current = endpoint
                return reply
            if not isinstance(told, DirectoryUnavailableError):
                raise told
            endpoint.failed()
            if not again or time.monotonic() + self.bounds.a_try > deadline:
                raise told
            if all(each.bad_until > time.monotonic() for each in self._endpoints):
                await asyncio.sleep(0.1)

    async def _keep_alive(self, endpoint: _Endpoint, request: Any) -> Any:
        method = self._method(
            endpoint, "Lease/LeaseKeepAlive", "LeaseKeepAliveResponse", "stream_stream"
        )
        call = method(timeout=self.bounds.a_try)
        try:
            await call.write(request)
            reply = await call.read()
        except asyncio.InvalidStateError as error:
            raise TimeoutError(str(error)) from None
        finally:
            call.cancel()
        if reply is grpc.aio.EOF:
            raise TimeoutError("no answer to the keep-alive")
        return reply

    def _pick(self, avoid: _Endpoint | None = None) -> _Endpoint:
        """The one that answered last, else the next one that is not bad, else the least bad.

        A watch avoids the endpoint of the calls: one stopped server then stops only one of both.
        """
        now = time.monotonic()
        start = self._endpoints.index(self._current)
        order = self._endpoints[start:] + self._endpoints[:start]
        good = [each for each in order if each.bad_until <= now and each is not avoid]
        return good[0] if good else min(order, key=lambda each: each.bad_until)

    def _method(self, endpoint: _Endpoint, name: str, reply: str, kind: str) -> Any:
        call = endpoint.calls.get(name)
        if call is None:
            call = endpoint.calls[name] = getattr(endpoint.channel, kind)(
                f"/etcdserverpb.{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=MESSAGES[reply].FromString,
            )
        return call


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    """An operation of a transaction."""
    request = MESSAGES["PutRequest"](key=key, value=value, lease=lease)
    return MESSAGES["RequestOp"](request_put=request)


def delete_prefix(prefix: bytes) -> Any:
    """An operation of a transaction."""
    return delete_range(prefix, prefix_end(prefix))


def delete_range(start: bytes, end: bytes) -> Any:
    """An operation of a transaction: all keys from `start` to before `end`."""
    request = MESSAGES["DeleteRangeRequest"](key=start, range_end=end)
    return MESSAGES["RequestOp"](request_delete_range=request)


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _request(**one: Any) -> Any:
    return MESSAGES["WatchRequest"](**one)


def _channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), options=_CHANNEL_OPTIONS)


async def _within(seconds: float, call: Awaitable[Any]) -> None:
    async with asyncio.timeout(seconds):
        await call


def _refuse_end(endpoint: _Endpoint, reply: Any) -> None:
    if reply.compact_revision:
        raise CompactedError(reply.compact_revision)
    if reply.canceled:
        raise DirectoryUnavailableError(f"{endpoint.address}: {reply.cancel_reason}")


def _told(endpoint: _Endpoint, error: Exception) -> DirectoryError:
    """What went wrong, as an error of ours."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return DirectoryUnavailableError(f"{endpoint.address}: {str(error) or 'no answer in time'}")
    details = error.details() or ""
    text = f"{endpoint.address}: {details}"
    if _OUT_OF_SPACE in details:
        return DirectoryReadOnlyError(
            f"{text}. The store is read-only until someone compacts and defragments it, raises "
            "its quota and disarms its alarm (etcdctl alarm disarm)"
        )
    if _NO_LEASE in details:
        return LeaseLostError(text)
    if _COMPACTED in details:
        return CompactedError(0)
    repeatable = {
        grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL,
    }  # fmt: skip
    kind = DirectoryUnavailableError if error.code() in repeatable else DirectoryError
    return kind(f"{text} ({error.code().name.lower()})")


def _key_value(raw: Any) -> KeyValue:
    return KeyValue(raw.key, raw.value, raw.create_revision, raw.mod_revision, raw.lease)


def _key_event(raw: Any) -> KeyEvent:
    value = None if raw.type == EVENT_DELETE else raw.kv.value
    return KeyEvent(raw.kv.key, value, raw.kv.mod_revision)
