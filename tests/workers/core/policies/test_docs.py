"""docs/eviction.md lists every policy and parameter as they are."""

from __future__ import annotations

from pathlib import Path

from workers.core.policies.registry import DEFAULT_POLICY, POLICY_PARAMS

TEXT = (Path(__file__).parents[4] / "docs" / "eviction.md").read_text(encoding="utf-8")


def test_every_policy_and_parameter_is_there() -> None:
    assert f"`{DEFAULT_POLICY}` (default)" in TEXT
    for policy, params in POLICY_PARAMS.items():
        assert f"\n| `{policy}` " in TEXT
        for name, param in params.items():
            row = f"| `{policy}` | `{name}` | {param.default:g} | {param.low:g} | {param.high:g} | {param.meaning} |"
            assert row in TEXT
