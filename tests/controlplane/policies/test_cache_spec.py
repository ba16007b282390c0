"""The cache policy: every eviction policy with its parameters, and limits that can work."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from controlplane.errors import ApiError
from controlplane.policies.schemas import CacheSpec, EvictionName
from controlplane.policies.service import validated
from workers.core.policies.registry import DEFAULT_POLICY, POLICIES, POLICY_PARAMS


def refused(spec: dict[str, object]) -> Any:
    with pytest.raises(ApiError) as error:
        validated("cache", spec)
    return error.value.problem


def test_names_every_policy_there_is() -> None:
    assert set(get_args(EvictionName)) == set(POLICIES)
    assert CacheSpec().eviction == DEFAULT_POLICY == "decay"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_takes_the_parameters_of_each(name: str) -> None:
    params: dict[str, object] = {key: param.high for key, param in POLICY_PARAMS[name].items()}
    spec = validated("cache", {"eviction": name, "eviction_params": params})
    assert spec["eviction_params"] == params


def test_defaults() -> None:
    spec = validated("cache", {})
    assert (
        spec
        | {
            "eviction": "decay",
            "store_generated": False,
            "write_queue_blocks": 500,
            "lease_seconds": 30.0,
            "eviction_params": {},
            "pin_active_share": 0.2,
            "pin_active_tokens": 512,
            "tenant_quota_gib": {},
            "namespace_quota_gib": {},
            "ssd_cap_gib": None,
        }
        == spec
    )


def test_limits_as_an_operator_writes_them() -> None:
    spec = validated(
        "cache",
        {
            "tenant_quota_gib": {"default": 4, "acme": 2.5},
            "namespace_quota_gib": {"0a" * 32: 1},
            "ssd_cap_gib": 100,
        },
    )
    assert spec["tenant_quota_gib"] == {"default": 4.0, "acme": 2.5}
    assert spec["ssd_cap_gib"] == 100.0


def test_a_parameter_that_is_another_policy_s() -> None:
    problem = refused({"eviction": "lru", "eviction_params": {"half_life_seconds": 60}})
    assert problem.field == "spec.eviction_params"
    assert "half_life_seconds = 60.0: the policy lru has no such parameter" in problem.detail
    assert problem.way_out == "It has hint_seconds."


def test_a_parameter_out_of_its_bounds() -> None:
    problem = refused({"eviction_params": {"half_life_seconds": 0}})
    assert "half_life_seconds = 0.0: is not within 1 to 86400" in problem.detail
    assert problem.value == {"half_life_seconds": 0}
    assert "the default is 170" in problem.way_out


@pytest.mark.parametrize(
    ("spec", "field", "way_out"),
    [
        ({"eviction": "mru"}, "spec.eviction", "decay, credit, lru"),
        ({"eviction_params": {"half_life_seconds": "x"}}, "half_life_seconds", "each a number"),
        ({"eviction_params": {"a b": 1}}, "eviction_params", "each a number"),
        ({"pin_active_share": 0.6}, "spec.pin_active_share", "from 0 to 0.5"),
        ({"pin_active_tokens": -1}, "spec.pin_active_tokens", "from 0 to 1000000"),
        ({"tenant_quota_gib": {"acme": -1}}, "spec.tenant_quota_gib.acme", "GiB from 0"),
        ({"tenant_quota_gib": {"": 1}}, "spec.tenant_quota_gib", "at most 1000 names"),
        ({"namespace_quota_gib": {"n": 1}}, "spec.namespace_quota_gib.n", "64 hex digits"),
        ({"ssd_cap_gib": -0.5}, "spec.ssd_cap_gib", "a number from 0"),
        ({"quota": 1}, "spec.quota", "eviction_params, pin_active_share"),
    ],
)
def test_what_cannot_work_is_named_with_the_way_out(
    spec: dict[str, object], field: str, way_out: str
) -> None:
    problem = refused(spec)
    assert problem.status == 422
    assert field in problem.field
    assert way_out in problem.way_out
