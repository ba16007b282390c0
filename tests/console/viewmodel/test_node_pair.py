"""One pair of nodes: what moved, where the time went, which link and why, the slowest."""

from __future__ import annotations

from typing import Any

from console.viewmodel.node_pair import NO_LINK, NONE, NOT_YET, alarms, bar, node_pair
from controlplane.stats.schemas import Matrix
from controlplane.transfers.schemas import NodeTransferList

EMPTY = NodeTransferList(rows=[], total=0, links=[], alarms=[])


def texts(table: Any, key: str) -> list[str]:
    at = [column.key for column in table.columns].index(key)
    return [row.cells[at].text for row in table.rows]


def test_by_path_and_class_with_failures_by_cause(world: Any) -> None:
    view = node_pair("n1", "n2", world.report("n1", "n2"))
    assert texts(view.kinds, "class") == ["first token", "batch"]
    assert texts(view.kinds, "missing") == ["2 timeout, 1 corrupt!", "0"]
    assert texts(view.kinds, "flying") == ["2", "2"]
    assert [row.cells[6].tone for row in view.kinds.rows] == ["warn", "plain"]  # retries
    assert "missing, tcp first token: 2 timeout, 1 corrupt" in [text.text for text in view.head]


def test_latency_by_stage_with_the_share_of_each(world: Any) -> None:
    view = node_pair("n1", "n2", world.report("n1", "n2"))
    assert texts(view.stages, "what")[:3] == ["P50", "P99", "share, sum"]
    assert texts(view.stages, "wire")[:3] == ["71 ms", "2.59 s", "97.7 %"]
    assert texts(view.stages, "total")[1] == "2.61 s!"
    # finer than the histogram's first bucket nothing is known
    assert texts(view.stages, "setup")[0] == "<0.05 ms"


def test_a_bar_shows_every_stage_that_took_time(world: Any) -> None:
    row = world.pair_transfers("n1", "n2")
    assert bar(row) == "qs" + "w" * 25 + "v"
    assert len(bar(row, 10)) == 10
    assert bar(row.model_copy(update={"stages": []})) == ""


def test_the_pullers_links_come_first_and_say_what_is_chosen_and_set(world: Any) -> None:
    view = node_pair("n1", "n2", world.report("n1", "n2"))
    assert texts(view.links, "link") == ["n2 to n1", "n2 to n1", "n1 to n2"]
    assert texts(view.links, "choice") == ["chosen", "not now", "set by hand"]
    assert texts(view.links, "breaker") == ["closed", "open!", "closed"]
    assert texts(view.links, "cost")[0] == "3.2 ms"
    notes = [text.text for text in view.notes]
    assert "n2 to n1 takes tcp: tcp 3.16 ms, rdma 1.02 s for 1.05 MB" in notes
    assert "last error of n2 to n1 by rdma: retry exceeded" in notes
    assert any("pulls took less of late" in text.text for text in view.head)


def test_a_bandwidth_that_nothing_has_measured_is_marked(world: Any) -> None:
    view = node_pair("n1", "n2", world.report("n1", "n2"))
    assert texts(view.links, "rate") == ["380 MB/s", "380 MB/s", "4 GB/s?"]
    assert any(text.text.startswith("? assumed") for text in view.notes)


def test_slowest_first_over_all_classes_and_bounded(world: Any) -> None:
    many = [world.slow(i, 0.1 * i) for i in range(1, 9)]
    rows = [
        world.pair_transfers("n1", "n2", slowest=many),
        world.pair_transfers("n1", "n2", priority="batch", slowest=[world.slow(99, 3.0)]),
        world.pair_transfers("n1", "n2", transport="shm", slowest=many),
    ]
    found = EMPTY.model_copy(update={"rows": rows})
    view = node_pair("n1", "n2", found)
    assert texts(view.slowest, "transfer")[0] == "fetch:99"
    assert len(view.slowest.rows) == 10
    assert len({row.key for row in view.slowest.rows}) == 10
    assert texts(view.slowest, "error")[0] == "timed out after 3 tries"


def test_alarms_of_the_pair_alone(world: Any) -> None:
    found = world.report("n1", "n2")
    assert [t.text for t in node_pair("n1", "n2", found).alarms] == ["ALARM n2: no transfers with n1 by rdma: retry exceeded"]  # fmt: skip
    assert node_pair("n3", "n2", found).alarms == ()
    assert len(alarms(found)) == 1
    assert alarms(None) == ()


def test_e05_numbers_of_a_silent_node_say_how_old_they_are(world: Any) -> None:
    nodes = [
        world.node(1, id="n1"),
        world.node(2, id="n2", state="lost", heartbeat_age_seconds=38.0),
    ]
    head = node_pair("n1", "n2", world.report("n1", "n2"), nodes=nodes).head
    assert ("~ n2 is lost: what follows is 38 s old", "stale") in [(t.text, t.tone) for t in head]


def test_waiting_and_nothing_are_told_apart(world: Any) -> None:
    assert node_pair("n1", "n2", None).kinds.empty == NOT_YET
    view = node_pair("n1", "n2", EMPTY)
    assert (view.kinds.empty, view.links.empty) == (NONE, NO_LINK)
    assert view.head[0].text == "last 5 min: no traffic"
    own = node_pair("n1", "n1", EMPTY)
    assert "read in place" in own.head[0].text


def test_the_window_says_what_is_slow_and_what_is_missing(world: Any) -> None:
    matrix = Matrix(window_seconds=300, pairs=[world.node_pair("n1", "n2", 2.61, failures=3)])
    head = node_pair("n1", "n2", EMPTY, matrix=matrix).head[0]
    assert head.tone == "warn"
    assert "P99 2.61 s!" in head.text
    assert "3 pieces missing!" in head.text


def test_e21_names_cannot_drive_a_terminal(world: Any) -> None:
    found = world.report("n1", "n2")
    link = found.links[0].model_copy(update={"last_error": "a\x1b[31mred"})
    view = node_pair("n1", "n2", found.model_copy(update={"links": [link]}))
    assert "\x1b" not in "".join(text.text for text in view.notes)
