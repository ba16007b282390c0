"""Hosts that name no machine, and hosts in URLs."""

import pytest

from workers.core.hosts import in_url, is_anywhere


@pytest.mark.parametrize(("host", "anywhere"), [
    ("0.0.0.0", True), ("::", True), ("[::]", True), ("", True), ("0", True), ("::0", True),
    ("::ffff:0.0.0.0", True), ("127.0.0.1", False), ("::1", False), ("10.0.0.1", False),
    ("gateway.example", False), ("0.0.0.0.example", False),
])  # fmt: skip
def test_what_leads_to_no_machine(host: str, anywhere: bool) -> None:
    assert is_anywhere(host) is anywhere


def test_ipv6_has_brackets() -> None:
    hosts = ("::1", "[::1]", "10.0.0.1", "name")
    assert [in_url(host) for host in hosts] == ["[::1]", "[::1]", "10.0.0.1", "name"]
