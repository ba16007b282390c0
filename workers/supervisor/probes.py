"""Health probes: bounded, and silent about why (the log and the exit status say that)."""

from __future__ import annotations

import asyncio
import contextlib

import httpx2

PROBE_TIMEOUT_SECONDS = 2.0


async def answers(probe: str, http: httpx2.AsyncClient) -> bool:
    """Does the URL answer 200, or the Unix socket accept, in time?"""
    if probe.startswith("http"):
        return await _answers_http(probe, http)
    return await _accepts(probe)


async def _answers_http(url: str, http: httpx2.AsyncClient) -> bool:
    try:
        reply = await http.get(url, timeout=PROBE_TIMEOUT_SECONDS)
    except (httpx2.HTTPError, OSError):
        return False
    return reply.status_code == httpx2.codes.OK


async def _accepts(path: str) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_unix_connection(path)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
