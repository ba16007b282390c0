"""The differential table against emulated engines: one of them directly, and two behind the gateway.

Emulated engines check less than real ones, so a row may be served here that they refuse; what
counts is that the gateway changes nothing. The same table runs against vLLM in tests/e2e/cluster.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
from differential import ask, check_usage, differences
from openai_table import CATALOGUE, TABLE, Row


def ask_all(url: str, model: str) -> list[dict[str, Any]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        return [ask(client, row, model) for row in TABLE]


OWN = {
    "body.usage.prompt_tokens_details": "each engine has a cache of its own",
    "body.kv_transfer_params": "this engine shows them only where a leg had some",
}


async def test_every_row_is_answered_as_the_engine_itself_answers_it(rig: Any) -> None:
    rig.engine = replace(rig.engine, decode_ms=0.05, prefill_ms_per_token=0.001)
    await rig.start()
    model = rig.engine.model
    direct, ours = await asyncio.gather(
        asyncio.to_thread(ask_all, rig.fleet.urls["d2"], model),
        asyncio.to_thread(ask_all, rig.gateway.url, model),
    )
    failed: dict[str, list[str]] = {}
    for row, left, right in zip(TABLE, direct, ours, strict=True):
        check_usage(right)
        excused = Row(row.name, row.api, row.arguments, CATALOGUE if row.model else OWN)
        if found := list(differences(excused, left, right)):
            failed[row.name] = found
    assert not failed, json.dumps(failed, indent=1)
