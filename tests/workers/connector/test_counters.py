"""What the connector counts is what docs/metrics.md says it counts."""

import re
from pathlib import Path

from workers.connector.counters import COUNTERS

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(
    r"^\| `perilune_connector_(\w+)_total` \| counter \| \w+ \| ([^|]*) \|$", re.MULTILINE
)


def test_documented_and_counted_are_the_same() -> None:
    assert {name: text.strip() for name, text in ROW.findall(DOC.read_text())} == COUNTERS
