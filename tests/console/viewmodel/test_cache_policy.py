"""The cache policy's draft: parameters as lines, quotas and caps as text, what changes."""

from __future__ import annotations

from typing import Any

import pytest

from console.viewmodel import policies, spec_text
from console.viewmodel.policies import Draft
from controlplane.policies.schemas import CacheSpec
from workers.core.policies.registry import POLICY_PARAMS


@pytest.fixture
def draft(world: Any) -> Draft:
    spec = CacheSpec(eviction="decay").model_dump(mode="json")
    return Draft(world.policy("cache", 17, spec))


def lines(draft: Draft, **values: str) -> dict[str, policies.FieldView]:
    for name, text in values.items():
        draft = draft.with_value(name, text)
    return {view.name: view for view in policies.check(draft).fields}


def checked(draft: Draft, values: dict[str, str]) -> policies.Checked:
    return policies.check(Draft(draft.base, values))


def test_parameters_are_lines_with_their_own_bounds(draft: Draft) -> None:
    shown = lines(draft)
    names = [name for name in shown if name.startswith("decay.")]
    assert names == [f"decay.{name}" for name in POLICY_PARAMS["decay"]]
    assert shown["decay.half_life_seconds"].allowed == "1 to 86,400; default 170"
    assert "decay" in shown["eviction"].choices
    assert "eviction_params" not in shown


def test_a_parameter_goes_into_the_spec_and_the_difference(draft: Draft) -> None:
    found = checked(draft, {"decay.half_life_seconds": "300"})
    assert found.spec is not None
    assert found.spec["eviction_params"] == {"half_life_seconds": 300.0}
    assert found.changes == (("decay.half_life_seconds", "170", "300"),)


def test_an_error_stands_on_the_parameter(draft: Draft) -> None:
    found = checked(draft, {"decay.half_life_seconds": "0"})
    wrong = {v.name: v.error for v in found.fields if v.error}
    assert wrong == {"decay.half_life_seconds": "must be 1 to 86,400; default 170"}
    assert found.spec is None


def test_another_policy_has_other_lines_and_its_defaults(draft: Draft) -> None:
    found = checked(draft, {"eviction": "lru", "decay.half_life_seconds": "0"})
    assert found.spec is not None
    assert (found.spec["eviction"], found.spec["eviction_params"]) == ("lru", {})
    assert found.changes == (("eviction", "decay", "lru"),)
    assert not [v for v in found.fields if v.name.startswith("decay.")]


def test_a_form_has_the_lines_of_every_policy(draft: Draft) -> None:
    found = policies.check(draft, all_params=True)
    owners = {view.when for view in found.fields if view.when}
    assert owners == {name for name, params in POLICY_PARAMS.items() if params}
    assert found.changes == ()


@pytest.mark.parametrize(
    ("text", "spec", "error"),
    [
        ("acme=4, batch=0.5", {"acme": 4.0, "batch": 0.5}, ""),
        ("none", {}, ""),
        ("", {}, ""),
        ("a=b=2", {"a=b": 2.0}, ""),
        ("acme", None, "must be name=number, name=number, or none"),
        ("acme=-1", None, "acme: Input should be greater than or equal to 0"),
    ],
)
def test_quotas_are_names_with_numbers(
    text: str, spec: dict[str, float] | None, error: str, draft: Draft
) -> None:
    found = checked(draft, {"tenant_quota_gib": text})
    view = next(v for v in found.fields if v.name == "tenant_quota_gib")
    assert view.error == error
    assert (found.spec or {}).get("tenant_quota_gib") == spec


def test_no_cap_is_none(draft: Draft) -> None:
    assert lines(draft)["ssd_cap_gib"].text == "none"
    found = checked(draft, {"ssd_cap_gib": "12"})
    assert found.spec is not None
    assert found.spec["ssd_cap_gib"] == 12.0
    assert checked(draft, {"ssd_cap_gib": "x"}).spec is None


def test_what_a_change_does_is_said(draft: Draft) -> None:
    changed = Draft(draft.base, {"eviction": "lru", "tenant_quota_gib": "acme=4"})
    words = [t.text for t in policies.consequences(changed, policies.check(changed), None)]
    assert words[0].startswith("ok    acts on each node with its next heartbeat")
    assert any("lru takes over what decay knows" in text for text in words)
    assert any("evicted from first" in text for text in words)


def test_text_and_value_are_each_others_inverse() -> None:
    for value in ({"a": 4.0, "b": 0.5}, {}):
        assert spec_text.read_mapping(spec_text.show(value)) == {
            name: spec_text.show(one) for name, one in value.items()
        }
