"""What a gateway tells the control plane of its own address: never one that leads to no machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import structlog

from controlplane.gateway.__main__ import settings_from
from controlplane.gateway.address import announced_url, bound_url
from controlplane.gateway.settings import Settings
from workers.core.errors import ConfigError

LOCAL = "http://127.0.0.1:7700"


@pytest.mark.parametrize(("host", "control_plane", "announced"), [
    ("127.0.0.1", LOCAL, "http://127.0.0.1:81"),
    ("::1", LOCAL, "http://[::1]:81"),
    ("gateway.example", LOCAL, "http://gateway.example:81"),
    ("0.0.0.0", LOCAL, "http://127.0.0.1:81"),
    ("0.0.0.0", "http://localhost:7700", "http://127.0.0.1:81"),
    ("", LOCAL, "http://127.0.0.1:81"),
])  # fmt: skip
async def test_it_is_what_it_is_bound_to_or_whence_the_control_plane_is_reached(
    host: str, control_plane: str, announced: str
) -> None:
    settings = Settings(host=host, control_plane=control_plane)
    assert await announced_url(settings, 81) == announced


async def test_it_is_what_it_was_told() -> None:
    settings = Settings(host="0.0.0.0", advertise="https://gateway.example/perilune/")
    assert await announced_url(settings, 81) == "https://gateway.example/perilune"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_where_nothing_can_be_derived_the_way_out_is_said(host: str) -> None:
    settings = Settings(host=host, control_plane="http://nowhere.invalid:7700")
    with structlog.testing.capture_logs() as logs:
        url = await announced_url(settings, 81)
    assert host not in url
    (said,) = logs
    assert (said["event"], said["host"], said["announced"]) == ("address_unknown", host, url)
    assert "--advertise" in said["way_out"]


def test_ipv6_in_its_own_url() -> None:
    assert bound_url(Settings(host="::"), 81) == "http://[::]:81"


@pytest.mark.parametrize("url", ["http://0.0.0.0:8000", "http://[::]:8000", "gateway:8000"])
def test_an_address_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        settings_from(["--control-plane", LOCAL, "--advertise", url])
    settings, _ = settings_from(["--control-plane", LOCAL, "--advertise", "http://10.0.0.5:8000"])
    assert settings.advertise == "http://10.0.0.5:8000"


async def test_the_control_plane_hears_an_address_that_works(rig: Any, eventually: Any) -> None:
    rig.settings = replace(rig.settings, host="0.0.0.0")
    await rig.start()
    await eventually(lambda: rig.control_plane.reports, "a report")
    assert rig.control_plane.reports[0].url == f"http://127.0.0.1:{rig.gateway.server.port}"
