"""What an agent tells others of where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.agent.settings import AgentSettings, parse_tcp
from workers.core.errors import ConfigError

SOCKET = "unix:/run/n1.sock"


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("", 0, SOCKET),
        ("127.0.0.1", 7710, SOCKET),
        ("localhost", 7710, SOCKET),
        ("10.0.0.7", 0, SOCKET),  # a port that nobody knows yet
        ("10.0.0.7", 7710, "tcp:10.0.0.7:7710"),
    ],
)
def test_gateways_on_other_hosts_are_not_sent_to_a_socket(
    host: str, port: int, expected: str
) -> None:
    settings = AgentSettings(
        "n1", Path("/run/n1.sock"), "a.slab", 1 << 20, 64, tcp_host=host, tcp_port=port
    )
    assert settings.endpoint == SOCKET
    assert settings.events_endpoint == expected


@pytest.mark.parametrize("address", ["0.0.0.0:7710", "[::]:7710", ":::7710", "*:7710"])
def test_an_agent_that_would_tell_others_of_every_address_does_not_start(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"by which they reach this node, for instance 10\.0\.0\.7:7710"
    ):
        parse_tcp(address)
    assert parse_tcp("10.0.0.7:7710") == ("10.0.0.7", 7710)
