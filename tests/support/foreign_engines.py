"""Engines that are not ours, as strict about `kv_transfer_params` as upstream's connectors (vLLM 0.32):
every field is checked, what prefill stages is counted until decode has taken it, which it may once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from workers.engines.emulated.http import Exchange, Server

NIXL_ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
MEET_SECONDS = 10.0


USAGE = {"prompt_tokens": 32, "completion_tokens": 1, "total_tokens": 33}


class WrongFieldError(Exception):
    """A field that the connector would not understand."""


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise WrongFieldError(f"{what} is {found!r}, not {wanted!r}")


@dataclass
class Fabric:
    """What the engines of one test share: KV that prefill has staged, meetings by transfer id."""

    staged: dict[str, dict[str, Any]] = field(default_factory=dict)
    meetings: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    arrivals: dict[str, asyncio.Event] = field(default_factory=dict)  # of leg 2, by transfer id
    over: set[str] = field(default_factory=set)  # transfers whose leg 1 has ended
    taken: int = 0
    read: set[str] = field(default_factory=set)  # request ids of what has been taken
    wrong: list[str] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def meeting(self, transfer_id: str) -> asyncio.Future[None]:
        if transfer_id not in self.meetings:
            self.meetings[transfer_id] = asyncio.get_running_loop().create_future()
        return self.meetings[transfer_id]

    def arrival(self, transfer_id: str) -> asyncio.Event:
        return self.arrivals.setdefault(transfer_id, asyncio.Event())


class ForeignEngine:
    """One worker. `bodies`: what it was sent; `gate` holds its answers back while it is closed,
    `stream_gate` those of a stream after the first piece. With `is_strict` the legs of a request have
    to be in flight at the same time."""

    def __init__(
        self, fabric: Fabric, role: Literal["prefill", "decode", "both"], handshake: str,
        engine_id: str = "engine-1",
    ) -> None:  # fmt: skip
        self.fabric, self.role, self.handshake = fabric, role, handshake
        self.engine_id = engine_id
        self.bodies: list[dict[str, Any]] = []
        self.reply_params: Any = "own"  # or what a broken one says instead
        self.gate = asyncio.Event()
        self.gate.set()
        self.stream_gate = asyncio.Event()
        self.stream_gate.set()
        self.bootstrap_gate = asyncio.Event()
        self.bootstrap_gate.set()
        self.fail_with = 0
        self.says = "as told"
        self.cuts_stream = False  # after its first piece
        self.is_strict = False
        self.dies = False  # cuts the connection instead of an answer
        self.dies_of_taking: Literal["", "fails", "gone"] = ""
        self.refuses = 0  # so many requests, as wrong
        self.running = 0
        self.usage: Any = USAGE
        self._server = Server(self._handle)

    async def start(self) -> ForeignEngine:
        await self._server.start("127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        await self._server.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def bootstrap(self) -> str:
        return f"{self.url}/bootstrap"

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path == "/bootstrap/query":
            await self.bootstrap_gate.wait()
            exchange.send(
                200, {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "a"}}}}
            )
            return
        if exchange.path == "/health":
            exchange.send(200, {})
            return
        body = exchange.json()
        self.bodies.append(body)
        self.running += 1
        try:
            await self._serve(exchange, body)
        finally:
            self.running -= 1

    async def _serve(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if self.dies:
            await self.gate.wait()
            exchange.reset()
            return
        if self.refuses:
            self.refuses -= 1
            exchange.send(400, {"error": {"message": "as told", "code": 400}})
            return
        if self.fail_with:
            await self.gate.wait()
            exchange.send(self.fail_with, {"error": {"message": self.says, "code": self.fail_with}})
            return
        try:
            if self.role == "prefill":
                await self._prefill(exchange, body)
            else:
                await self._decode(exchange, body)
        except WrongFieldError as error:
            self.fabric.wrong.append(str(error))
            exchange.send(500, {"error": {"message": str(error), "code": 500}})

    async def _prefill(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self._check_sequences(body)
        expect("max_tokens of leg 1", body.get("max_tokens"), 1)
        expect("stream of leg 1", bool(body.get("stream")), False)
        params: Any = body.get("kv_transfer_params")
        staged: dict[str, Any] | None = None
        if self.handshake == "nixl":
            expect("kv_transfer_params of leg 1", params, NIXL_ASK)
            await self.gate.wait()
            number = next(self.fabric.numbers)
            staged = {
                "do_remote_prefill": True, "do_remote_decode": False,
                "remote_block_ids": [[number, number + 1]], "remote_engine_id": self.engine_id,
                "remote_request_id": f"cmpl-{number}-0", "remote_host": "127.0.0.1",
                "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
                "remote_num_tokens": 32, "remote_blocks_expiry_time": None,
                "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
            }  # fmt: skip
            self.fabric.staged[staged["remote_request_id"]] = staged
        elif self.handshake == "mooncake":
            wanted: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False,
                      "transfer_id": (params or {}).get("transfer_id")}  # fmt: skip
            expect("kv_transfer_params of leg 1", params, wanted)
            expect("min_tokens of leg 1", body.get("min_tokens"), 1)
            await self._meet(wanted["transfer_id"])
            meeting = self.fabric.meeting(wanted["transfer_id"])
            if not meeting.done():
                meeting.set_result(None)
        else:
            expect("kv_transfer_params of leg 1", params, None)
        reply = staged if self.reply_params == "own" else self.reply_params
        exchange.send(200, {**self._answer(body), "kv_transfer_params": reply})

    async def _meet(self, transfer_id: str) -> None:
        """Leg 1, until it may answer."""
        try:
            if self.is_strict:
                try:
                    async with asyncio.timeout(MEET_SECONDS):
                        await self.fabric.arrival(transfer_id).wait()
                except TimeoutError:
                    raise WrongFieldError("leg 2 did not come while leg 1 was open") from None
            await self.gate.wait()
        finally:
            self.fabric.over.add(transfer_id)

    def _check_sequences(self, body: dict[str, Any]) -> None:
        """Each prompt and each choice would stage, or take, under the same name."""
        if self.handshake != "none" and body.get("kv_transfer_params"):
            prompt = body["prompt"]
            expect("prompts of a leg", isinstance(prompt, str) or isinstance(prompt[0], int), True)
            expect("choices of a leg", body.get("n", 1), 1)

    def _take_staged(self, params: Any, body: dict[str, Any]) -> None:
        """Each once. What is no longer staged may be read for one token only, which no cache keeps."""
        request_id = str((params or {}).get("remote_request_id"))
        staged = self.fabric.staged.pop(request_id, None)
        if staged is None and request_id in self.fabric.read and body["prompt"] == [1]:
            return
        expect("kv_transfer_params of leg 2", params, staged)
        self.fabric.read.add(request_id)
        self.fabric.taken += 1

    async def _decode(self, exchange: Exchange, body: dict[str, Any]) -> None:
        params: Any = body.get("kv_transfer_params", "absent")
        self._check_sequences(body)
        if self.handshake == "nixl" and params != "absent":
            self._take_staged(params, body)
            if self.dies_of_taking == "gone":
                await self.stop()
            if self.dies_of_taking:
                exchange.send(500, {"error": {"message": "as told", "code": 500}})
                return
        elif self.handshake == "mooncake" and params != "absent":
            transfer_id = params.get("transfer_id")
            wanted = {
                "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id,
                "remote_bootstrap_addr": params.get("remote_bootstrap_addr"),
                "remote_engine_id": params.get("remote_engine_id"),
            }  # fmt: skip
            expect("kv_transfer_params of leg 2", params, wanted)
            if self.is_strict:
                expect("leg 1 when leg 2 comes", transfer_id in self.fabric.over, False)
            self.fabric.arrival(transfer_id).set()
            async with asyncio.timeout(MEET_SECONDS):
                await self.fabric.meeting(transfer_id)
            self.fabric.taken += 1
        else:
            expect("kv_transfer_params of leg 2", params, "absent")
        await self.gate.wait()
        if not body.get("stream"):
            exchange.send(200, self._answer(body))
            return
        exchange.start()
        for number in range(3):
            await exchange.chunk(b'data: {"choices":[{"index":0,"text":"t%d"}]}\n\n' % number)
            await self.stream_gate.wait()
            if self.cuts_stream:
                exchange.reset()
                return
        if body.get("stream_options"):
            last = json.dumps({"choices": [], "usage": self.usage})
            await exchange.chunk(b"data: %b\n\n" % last.encode())
        await exchange.chunk(b"data: [DONE]\n\n")
        exchange.end()

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "cmpl-1", "object": "text_completion", "model": body["model"],
            "choices": [{"index": 0, "text": "ok", "finish_reason": "length"}],
            "usage": self.usage,
        }  # fmt: skip
