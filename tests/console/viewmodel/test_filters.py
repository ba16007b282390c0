"""The grammar of `/`."""

from __future__ import annotations

import pytest

from console.viewmodel.filters import FieldKind, FilterError, complete, parse
from console.viewmodel.table import Row, Text

FIELDS: dict[str, FieldKind] = {
    "tenant": "text", "node": "text", "status": "text", "ttft": "seconds", "bytes": "bytes", "hit": "ratio",
}  # fmt: skip


def make(name: str, **facts: str | float | None) -> Row:
    return Row(name, (Text(name),), facts)


ROWS = [
    make("alpha", tenant="acme", node="node-03", status="rejected", ttft=2.5, bytes=100e6, hit=0.4),
    make("beta", tenant="batch", node="node-09", status="running", ttft=0.3, bytes=10e6, hit=0.9),
    make("gamma", tenant="acme", node="node-04", status="running", ttft=None, bytes=None, hit=None),
]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", "alpha beta gamma"),
        ("ALPH", "alpha"),
        ("-beta", "alpha gamma"),
        ("acme running", "gamma"),
        ("ttft>2s", "alpha"),
        ("ttft<800ms", "beta"),
        ("bytes>64MiB", "alpha"),
        ("hit<50%", "alpha"),
        ("node=node-03|node-09", "alpha beta"),
        ("tenant!=acme", "beta"),
        ("-tenant=batch", "alpha gamma"),
        ("node~0[34]$", "alpha gamma"),
        ('"beta"', "beta"),
        ("alpha|gamma", "alpha gamma"),
        ("status=rejected tenant=acme", "alpha"),
    ],
)
def test_e34_filters_are_exact(source: str, names: str) -> None:
    assert [row.key for row in parse(source, FIELDS).apply(ROWS)] == names.split()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("ttft>2x", 'Filter: "ttft>2x": expected a time such as 2s or 800ms, at character 6.'),
        (
            "foo=1",
            'no field "foo" here, but bytes, hit, node, status, tenant, ttft, at character 1.',
        ),
        ("a bytes>", "expected a size such as 64MiB or 2GB, at character 9."),
        ("tenant>a", "is text and has no order"),
        ("node~[", "bad pattern"),
        ('x "y', 'a closing " is missing, at character 5.'),
    ],
)
def test_a_bad_filter_points_at_the_character(source: str, message: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(source, FIELDS)
    assert message in str(caught.value)


def test_completion_of_fields_and_values() -> None:
    assert complete("te", FIELDS, ROWS) == ("tenant=",)
    assert complete("x tenant=a", FIELDS, ROWS) == ("x tenant=acme",)
    assert complete("-st", FIELDS, ROWS) == ("-status=",)
