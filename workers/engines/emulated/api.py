"""The HTTP surface of one emulated worker."""

import asyncio
from collections import deque
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec

from workers.engines.emulated.faults import Faults, FaultSwitch
from workers.engines.emulated.generate import Answer, usage_of
from workers.engines.emulated.http import Exchange
from workers.engines.emulated.text import Prompts
from workers.engines.emulated.validate import Generation, RefusedRequest, parse
from workers.engines.emulated.worker import Transfer, Worker

MAX_RECORDS = 1000
_DONE = b"data: [DONE]\n\n"


class Api:
    """Routes of one worker; `handle` is the server's handler."""

    def __init__(self, worker: Worker, prompts: Prompts) -> None:
        self.worker = worker
        self.faults = FaultSwitch()
        self.records: deque[dict[str, Any]] = deque(maxlen=MAX_RECORDS)
        self._prompts = prompts

    async def handle(self, exchange: Exchange) -> None:
        route = (exchange.method, exchange.path)
        match route:
            case ("POST", "/v1/completions"):
                await self._generate(exchange, chat=False)
            case ("POST", "/v1/chat/completions"):
                await self._generate(exchange, chat=True)
            case ("GET", "/v1/models"):
                exchange.send(200, self._models())
            case ("GET", "/health"):
                if self.faults.hangs_health:
                    await asyncio.sleep(3600)
                exchange.send(200, b"")
            case ("GET", "/metrics"):
                exchange.send(200, self.worker.metrics(), "text/plain; version=0.0.4")
            case ("POST", "/tokenize"):
                self._tokenize(exchange)
            case ("POST", "/reset_prefix_cache"):
                self.worker.device.clear()
                exchange.send(200, {"success": True})
            case _:
                self._debug(exchange)

    def _debug(self, exchange: Exchange) -> None:
        match (exchange.method, exchange.path):
            case ("GET", "/debug/requests"):
                exchange.send(200, list(self.records))
            case ("DELETE", "/debug/requests"):
                self.records.clear()
                exchange.send(200, {})
            case ("POST", "/debug/faults"):
                try:
                    self.faults.set(msgspec.json.decode(bytes(exchange.body) or b"{}", type=Faults))
                except msgspec.DecodeError as error:
                    exchange.send(400, {"error": {"message": str(error), "code": 400}})
                    return
                exchange.send(200, {})
            case ("GET", "/debug/state"):
                exchange.send(200, {
                    field: getattr(self.worker.counters, field)
                    for field in type(self.worker.counters).__slots__
                })  # fmt: skip
            case _:
                exchange.send(404, {"detail": "Not Found"})

    def _models(self) -> dict[str, Any]:
        config = self.worker.config
        card = {
            "id": config.model,
            "object": "model",
            "owned_by": "perilune-emulated",
            "max_model_len": config.max_model_len,
            "metadata": {"emulated": True, "role": self.worker.spec.role},
        }
        return {"object": "list", "data": [card]}

    def _tokenize(self, exchange: Exchange) -> None:
        fields = exchange.json()
        if "messages" in fields:
            tokens = self._prompts.chat(fields)
        else:
            special = fields.get("add_special_tokens", True)
            tokens = self._prompts.encode(fields["prompt"], add_special_tokens=special)
        limit = self.worker.config.max_model_len
        exchange.send(200, {"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    # --- generation ---

    async def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        record = self._record(exchange)
        faults = self.faults.take(exchange.body)
        counters = self.worker.counters
        counters.requests += 1
        counters.running += 1
        try:
            if await self._meet_faults(exchange, faults):
                return
            request = parse(
                bytes(exchange.body), chat=chat, config=self.worker.config, prompts=self._prompts
            )
            await self._answer(exchange, request, faults)
            counters.finished += 1
            record["finished"] = True
        except RefusedRequest as refusal:
            exchange.send(refusal.status, refusal.body)
        except asyncio.CancelledError:
            counters.aborted += 1
            record["aborted"] = True
            raise
        finally:
            counters.running -= 1

    def _record(self, exchange: Exchange) -> dict[str, Any]:
        try:
            body = exchange.json()
        except msgspec.DecodeError:
            body = None
        record = {
            "path": exchange.path,
            "headers": exchange.headers,
            "body": body,
            "raw": exchange.body.decode(errors="replace"),
            "at": monotonic(),
            "finished": False,
            "aborted": False,
        }
        self.records.append(record)
        return record

    async def _meet_faults(self, exchange: Exchange, faults: Faults) -> bool:
        """Whether a fault has ended the request."""
        if faults.hang:
            await asyncio.sleep(3600)
        if faults.delay_seconds > 0:
            await asyncio.sleep(faults.delay_seconds)
        if faults.reset:
            exchange.reset()
            return True
        if faults.empty or faults.error_body:
            error = {"message": "emulated transfer failure", "type": "Fault", "code": 500}
            exchange.send(200, b"" if faults.empty else {"error": error})
            return True
        if faults.status:
            if faults.retry_after:
                exchange.extra_headers["retry-after"] = str(faults.retry_after)
            error = {"message": "emulated fault", "type": "Fault", "code": faults.status}
            exchange.send(faults.status, {"error": error})
            return True
        return False

    async def _answer(self, exchange: Exchange, request: Generation, faults: Faults) -> None:
        cached, blocks = 0, 0
        for tokens in request.prompts:
            done = await self.worker.prefill(tokens, request.salt, request.transfer)
            cached += done.cached_tokens
            blocks += done.num_blocks
        base = exchange.headers.get("x-request-id") or uuid4().hex
        answer = Answer(request, self.worker.config, base)
        if request.stream:
            await self._stream(exchange, request, answer, cached, faults)
            return
        for number in range(answer.num_steps):
            await self.worker.step(first=not number)
        payload = answer.whole()
        self.worker.counters.generation_tokens += answer.num_tokens
        payload["usage"] = usage_of(request, answer, self.worker.config, cached)
        if request.has_transfer and not faults.drop_transfer_params:
            payload["kv_transfer_params"] = self._transfer_params(request.transfer, blocks)
        exchange.send(200, payload)

    def _transfer_params(self, transfer: Transfer, blocks: int) -> dict[str, Any]:
        """What leg 1 says to leg 2: ours, or as NIXL's connector does."""
        if not transfer.foreign:
            return {"perilune": {"transfer_id": transfer.transfer_id, "num_blocks": blocks}}
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [],
            "remote_engine_id": self.worker.spec.worker_id, "remote_host": "127.0.0.1",
            "remote_port": 0, "tp_size": 1,
        }  # fmt: skip

    async def _stream(
        self, exchange: Exchange, request: Generation, answer: Answer, cached: int, faults: Faults
    ) -> None:
        exchange.start()
        for step in range(answer.num_steps + 1):
            if step > 0:
                await self.worker.step(first=step == 1)
            for event in answer.events(step):
                if exchange.chunks_sent == faults.reset_after_chunks:
                    exchange.reset()
                    return
                if exchange.chunks_sent == faults.end_after_chunks:
                    exchange.end()
                    return
                await exchange.chunk(b"data: " + msgspec.json.encode(event) + b"\n\n")
        self.worker.counters.generation_tokens += answer.num_tokens
        if request.include_usage:
            event = answer.usage_event(usage_of(request, answer, self.worker.config, cached))
            await exchange.chunk(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await exchange.chunk(_DONE)
        exchange.end()
