"""The spec `transfer`: what the control plane takes, agents and the declared file take too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.errors import InvalidError
from controlplane.policies.service import validated
from workers.core.transfer_policy import (
    TransferPolicy,
    cap_of,
    limits_of,
    mode_of,
    transports_of,
)
from workers.core.transfer_types import CapRule, Direction, TransferLimits


def test_defaults_are_the_same_and_change_nothing() -> None:
    spec = validated("transfer", {})
    assert msgspec.convert(spec, TransferPolicy) == TransferPolicy()
    assert spec.keys() == set(TransferPolicy.__struct_fields__)
    assert limits_of(TransferPolicy()) == TransferLimits()
    assert cap_of(TransferPolicy()) == CapRule()


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("mode", ["auto", "pull", "push"], ["both"]),
        ("cap_share", [0.01, 1.0], [0.0, 1.01]),
        ("cap_gbps", [None, 0.0001, 100_000.0], [0.0, 100_001.0]),
        ("link_gbps", [None, 0.0001, 100_000.0], [0.0, 100_001.0]),
        ("piece_bytes", [0, 65_536, 1 << 30], [-1, 4096, 65_535, (1 << 30) + 1]),
        ("parallelism", [1, 16], [0, 17]),
        ("window_mib", [1.0, 16_384.0], [0.5, 16_385.0]),
        ("window_ops", [1, 65_536], [0, 65_537]),
        ("batch_share", [0.01, 1.0], [0.0, 1.1]),
        ("max_attempts", [1, 100], [0, 101]),
        ("retry_share", [0.0, 1.0], [-0.1, 1.1]),
        ("retry_floor_mib", [1.0, 16_384.0], [0.5, 16_385.0]),
        ("connect_seconds", [0.05, 600.0], [0.01, 601.0]),
        ("stall_seconds", [0.05, 600.0], [0.01, 601.0]),
        ("fetch_seconds", [0.05, 600.0], [0.01, 601.0]),
        ("transport_overrides", [{"n1>n2": "rdma"}], [{"n1": "tcp"}, {"n1>n2": "pigeon"}]),
        ("mode_overrides", [{"n1>n2": "push"}], [{"n1>": "push"}, {"n1>n2": "auto"}]),
    ],
)
def test_both_take_and_refuse_the_same(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        spec = validated("transfer", {field: value})
        assert getattr(msgspec.convert(spec, TransferPolicy), field) == value
    for value in bad:
        with pytest.raises(InvalidError):
            validated("transfer", {field: value})
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({field: value}, TransferPolicy)


def test_caps_in_bytes_a_second() -> None:
    assert cap_of(TransferPolicy(cap_gbps=8.0)).of("tcp", 5e9) == 1e9
    shared = cap_of(TransferPolicy(collectives_share_link=True))
    assert shared.of("rdma", 10e9) == pytest.approx(4e9), "40 % of what the link has shown"
    assert shared.of("tcp", 0.0) == 0.0, "nothing has been shown yet"
    assert shared.of("shm", 10e9) == 0.0, "no link"
    known = cap_of(TransferPolicy(collectives_share_link=True, link_gbps=100.0))
    assert known.of("tcp", 1e9) == pytest.approx(5e9)


def test_pairs_are_named_by_the_way_of_the_bytes() -> None:
    policy = TransferPolicy(
        mode="pull",
        transport_overrides={"n1>n2": "tcp", "n2>n3": "rdma"},
        mode_overrides={"n1>n2": "push"},
    )
    assert transports_of(policy, "n2") == {
        ("n1", Direction.PULL): "tcp",
        ("n3", Direction.PUSH): "rdma",
    }
    assert mode_of(policy, "n1", "n2") == "push"
    assert mode_of(policy, "n2", "n1") == "pull"
    assert mode_of(TransferPolicy(), "n1", "n2") is None
