"""Workers of a node that has fallen silent: served on where nobody else could, and no further."""

from __future__ import annotations

from typing import Any

from controlplane.gateway.orphans import Orphans
from controlplane.gateway.wire import ViewWorker


def row(name: str, state: str, role: Any = "prefill", model: str = "m") -> ViewWorker:
    return ViewWorker(name, "n1", role, model, "http://127.0.0.1:9", state)


def states(rows: list[ViewWorker]) -> dict[str, str]:
    return {row.id: row.state for row in rows}


def test_a_lost_worker_that_was_ready_serves_on_where_it_is_alone() -> None:
    orphans = Orphans()
    orphans.keep(
        [row("p1", "ready"), row("d1", "ready", "decode"), row("b1", "ready", "both", "o")]
    )
    lost = [row("p1", "lost"), row("d1", "lost", "decode"), row("b1", "lost", "both", "o")]
    assert states(orphans.keep(lost)) == {"p1": "ready", "d1": "ready", "b1": "ready"}
    assert states(orphans.keep(lost)) == {"p1": "ready", "d1": "ready", "b1": "ready"}


def test_nobody_is_kept_where_another_serves() -> None:
    orphans = Orphans()
    orphans.keep([row("p1", "ready"), row("p2", "ready"), row("p3", "ready", model="other")])
    assert states(orphans.keep([row("p1", "lost"), row("p2", "ready"), row("p3", "lost", model="other")])) == {
        "p1": "lost", "p2": "ready", "p3": "ready"}  # fmt: skip
    assert states(orphans.keep([row("p1", "lost"), row("p2", "lost")]))["p1"] == "ready"


def test_what_was_not_ready_when_its_node_fell_silent_stays_lost() -> None:
    orphans = Orphans()
    orphans.keep([row("p1", "ready"), row("p2", "loading")])
    orphans.keep([row("p1", "draining"), row("p2", "loading")])
    assert states(orphans.keep([row("p1", "lost"), row("p2", "lost")])) == {
        "p1": "lost",
        "p2": "lost",
    }
    assert states(Orphans().keep([row("p1", "lost")])) == {"p1": "lost"}


def test_a_name_that_was_taken_off_the_list_is_forgotten() -> None:
    orphans = Orphans()
    orphans.keep([row("p1", "ready")])
    orphans.keep([])
    assert states(orphans.keep([row("p1", "lost")])) == {"p1": "lost"}


async def test_a_silent_agent_costs_no_answers(rig: Any) -> None:
    """The control plane counts its node, and so its workers, as lost after ten seconds."""
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    assert (await rig.complete(prompt="one", max_tokens=2)).status_code == 200
    await rig.publish(**rig.make_view(p1="lost", d1="lost"))
    assert (await rig.complete(prompt="two", max_tokens=2)).status_code == 200
    assert len(rig.seen("p1")) == 2
    assert (await rig.client.get("/health")).json()["status"] == "ok"
    await rig.fleet.stop_worker("d1")  # the machine is gone indeed
    response = await rig.complete(prompt="three", max_tokens=2)
    assert response.status_code == 503
    assert "d1" in response.json()["error"]["message"]
    await rig.publish(**rig.make_view(p1="lost", d1="stopped"))
    response = await rig.complete(prompt="four", max_tokens=2)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_decode_worker")
