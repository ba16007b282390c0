"""Ports are checked before anything starts."""

import os
import re
import socket
from dataclasses import replace

import pytest

from workers.core.errors import ConfigError
from workers.supervisor.ports import choose_ports
from workers.supervisor.settings import RoleSettings, Settings

ANY = Settings(port_control_plane=0, port_gateway=0, port_agent=0, port_workers=0)


def test_zero_takes_free_ports_all_different() -> None:
    ports = choose_ports(replace(ANY, prefill=RoleSettings(2), decode=RoleSettings(3)))
    chosen = [ports.control_plane, ports.gateway, *ports.agents, *ports.workers]
    assert len(set(chosen)) == len(chosen) == 8


def test_a_port_in_use_names_the_process() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            choose_ports(replace(ANY, port_gateway=port))
    text = str(caught.value)
    assert text.startswith(f"--port-gateway = {port}: is in use by process {os.getpid()} (")
    assert text.endswith("End that process, or choose another port with --port-gateway.")


def test_one_port_for_two_listeners_is_refused() -> None:
    settings = replace(ANY, port_gateway=18000, port_agent=18000)
    expected = "--port-agent = 18000: is also --port-gateway. Choose different ports."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        choose_ports(settings)


@pytest.mark.parametrize("host", ["203.0.113.7", "no host"])
def test_a_host_that_is_not_here_is_named_and_no_port(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler_endpoint = '{host}': is no address of this"):
        choose_ports(replace(ANY, host=host))
