"""The OpenAPI document against the real thing, by schemathesis: no 5xx, answers as described."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

EXAMPLES = 3
SLOW = {"/api/v1/events", "/api/v1/view"}


@pytest.fixture
def live(sqlite_url, tmp_path, make_settings_for, serve):
    """A server in a thread of its own: schemathesis blocks."""
    started, stop = threading.Event(), asyncio.Event()
    found = {}

    def run():
        async def main():
            async with serve(make_settings_for(sqlite_url, tmp_path)) as server:
                found.update(server=server, loop=asyncio.get_running_loop())
                started.set()
                await stop.wait()

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    yield found["server"]
    found["loop"].call_soon_threadsafe(stop.set)
    thread.join(30)


def test_every_operation_answers_as_described(live):
    import schemathesis  # noqa: PLC0415 - collection elsewhere would pay a second for it
    from schemathesis import GenerationMode, checks  # noqa: PLC0415

    wanted = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    checked = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path not in SLOW:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _check(operation, mode, live.token, wanted)
            checked += 1
    assert checked >= 30


def _check(operation, mode, token, checks):
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def check(case):
        case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=checks)

    with contextlib.suppress(
        Unsatisfiable
    ):  # an operation without parameters cannot be called wrong
        check()
