"""Tests that take long say which group of a parallel run they belong to."""

import re
from pathlib import Path

from lanes import LANES, rank

TESTS = Path(__file__).resolve().parents[1]
SLOW = re.compile(r"pytest\.mark\.(heavy|chromium|tmux)\b")
GROUP = re.compile(r"xdist_group\(\"(\w+)\"\)")
OTHER_GROUPS = {"bench", "vllm"}
FILES = {
    str(path.relative_to(TESTS)): path.read_text()
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__)
}


def test_slow_tests_are_in_a_lane() -> None:
    """Else they begin last in a parallel run, or beside one that they disturb: give the mark
    `xdist_group` with a name of `tests/support/lanes.py`."""
    missing = [
        name
        for name, text in FILES.items()
        if SLOW.search(text) and "pytest.mark.vllm" not in text
        if not set(GROUP.findall(text)) & set(LANES)
    ]
    assert missing == []


def test_groups_have_known_names() -> None:
    named = {group for text in FILES.values() for group in GROUP.findall(text)}
    assert named - set(LANES) - OTHER_GROUPS == set()


def test_lanes_begin_before_files() -> None:
    scopes = ["tests/a/test_a.py", "etcd", "tests/b/test_b.py", "vm"]
    assert sorted(scopes, key=rank) == ["vm", "etcd", "tests/a/test_a.py", "tests/b/test_b.py"]
