"""Transfers between nodes and the doctor: walked by keys, from the matrix to a check's way out."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.client_http import UnreachableError
from controlplane.doctor.schemas import DoctorReport, DoctorRun
from controlplane.stats.schemas import Matrix


class TestTransfers:
    async def test_the_cursor_starts_on_the_worst_cell_and_stays(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="transfers", size=(120, 40)) as console:
            await console.until(
                "node-01 -> node-09  P50 1.30 s  P99 2.61 s", "look at the destination"
            )
            slower = world.node_pair("node-04", "node-05", 9.9)
            kept = [
                p for p in world.matrix.pairs if (p.source, p.destination) != ("node-04", "node-05")
            ]
            matrix = Matrix(window_seconds=300, pairs=[*kept, slower])
            console.app.state.load(console.clock(), matrix=matrix)
            await console.until("9.90 s", "node-01 -> node-09  P50")

    async def test_from_the_matrix_down_to_the_pair_and_its_requests(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="transfers", size=(120, 48)) as console:
            await console.until("Transfers > nodes", "ALARM node-09")
            await console.press("j", "enter")
            shown = await console.until(
                "Transfers > node-02 -> node-09", "since its agent started", "DOCTOR  FAIL"
            )
            for words in (
                "2 timeout, 1 co", "queue 1.0 %", "2.61 s!", "set by hand", "now pull:", "timed out after 3 t",
            ):  # fmt: skip
                assert words in shown
            await console.press("enter")
            await console.until("/prefill=p2 decode=d5")

    async def test_values_and_both_matrices(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="transfers", size=(120, 40)) as console:
            await console.until("transfer P99, 5 min; path tcp")
            await console.press("v")
            await console.until("bytes moved per second", "192 MB/s")
            await console.press("v")
            await console.until("failures a minute")
            await console.press("right_square_bracket", "v")
            await console.until("Transfers > workers", "transfer P95, 5 min; path shm")

    async def test_one_node_begins_with_its_workers(self, world: Any, open_console: Any) -> None:
        world.nodes = world.nodes[:1]
        world.matrix = Matrix(window_seconds=300, pairs=[world.pair("p1", "d1", 0.1)])
        async with open_console(world, start="transfers") as console:
            await console.until("Transfers > workers", "p1 -> d1")
            await console.press("left_square_bracket")
            await console.until("One node has joined: nothing can travel", "] shows the workers.")

    async def test_many_alarms_are_counted(self, world: Any, open_console: Any) -> None:
        alarm = world.transfers.alarms[0]
        world.transfers = world.transfers.model_copy(update={"alarms": [alarm] * 5})
        async with open_console(world, start="transfers") as console:
            await console.until("3 more paths carry nothing now")

    async def test_nothing_yet_says_what_is_waited_for(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="transfers", down=True) as console:
            await console.until("No answer from the control plane")


class TestDoctor:
    async def test_findings_then_all_checks(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="overview", size=(120, 40)) as console:
            await console.press("0")
            await console.until("Doctor > findings", "1 fail   2 warn", "38 Gbps", "has 12 Gbps!")
            await console.until("what to do  Compare `ip link` at both ends and the switch.")
            await console.press("j")
            await console.until("what to do  Give the pair a faster link (RDMA).")
            await console.press("right_square_bracket")
            await console.until("Doctor > nodes", "incarnation 4")
            await console.press("slash")
            await console.type("node=node-03")
            await console.press("enter")
            await console.until("/node=node-03 2 of 25")
            await console.press("enter")
            await console.until("node node-03")

    async def test_a_check_of_a_pair_opens_its_transfers(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="doctor") as console:
            await console.until("Enter open the pair")
            await console.press("enter")
            await console.until("Doctor > node-02 -> node-09")

    async def test_a_run_is_asked_for_and_followed(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="doctor", size=(120, 40)) as console:
            await console.until("T run the doctor", "Run 3 by ana")
            await console.press("T")
            await console.until(
                "DOCTOR all nodes and pairs", "12 nodes are asked", "128 pairs probe"
            )
            console.clock.ahead += 1
            await console.press("tab", "tab")
            await console.type("new switch")
            await console.press("enter", "y")
            await console.until("Run 4 by ana is under way", "0 of 16 answers are in")
            (call,) = console.source.sent
            assert (call.method, call.path) == ("POST", "/api/v1/doctor")
            assert call.body == DoctorRun(reason="new switch")
            world.doctor = world.doctor_of(world.at, ("node-01", "node-02"), number=4)
            await console.until("Run 4 by ana, 14:05:56, ended")

    async def test_a_pair_is_probed_from_its_page(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="pair/node-02/node-09", size=(120, 48)) as console:
            await console.until("DOCTOR  FAIL")
            await console.press("T")
            await console.until("DOCTOR node-02 -> node-09 and back", "2 nodes are asked")
            console.clock.ahead += 1
            await console.press("y")
            await console.until("Run 4 of the doctor has begun")
            assert console.source.sent[0].body.pair == "node-02:node-09"

    async def test_a_run_under_way_is_not_asked_for_again(
        self, world: Any, open_console: Any
    ) -> None:
        world.doctor = world.doctor.model_copy(update={"state": "running", "done": 4})
        async with open_console(world, start="doctor") as console:
            await console.until("4 of 14 answers are in", "#####")
            await console.press("T")
            await console.until("Run 3 is under way (4 of 14 answers)")
            assert console.source.sent == []

    @pytest.mark.parametrize("down", [True, False])
    async def test_a_refusal_says_why(
        self, down: bool, world: Any, open_console: Any, problem: Any
    ) -> None:
        async with open_console(world, start="doctor") as console:
            await console.until("Run 3 by ana")
            lost = UnreachableError("http://x", TimeoutError())
            console.source.refuse = (
                lost if down else problem(409, "Run 4 of the doctor is under way")
            )
            await console.press("T")
            await console.until("DOCTOR all nodes")
            console.clock.ahead += 1
            await console.press("y")
            await console.until(
                "whether the run has begun is unknown" if down else "Nothing was done: Run 4"
            )

    async def test_never_run_and_a_viewer(self, world: Any, open_console: Any) -> None:
        world.doctor = DoctorReport()
        async with open_console(world, start="doctor", can_act=False) as console:
            shown = await console.until(
                "has not run since the control plane started", "operator's token runs it"
            )
            assert "T run" not in shown
            await console.press("T")
            assert console.app.page.noun == "doctor"

    async def test_another_ones_run_shows_by_its_audit_row(
        self, world: Any, open_console: Any
    ) -> None:
        async with open_console(world, start="doctor") as console:
            await console.until("Run 3 by ana")
            world.doctor = world.doctor_of(world.at, ("node-01", "node-02"), number=4, actor="ben")
            row = world.audit[0].model_copy(
                update={"id": 99, "verb": "doctor.run", "target": "all"}
            )
            console.source.emit("audit", row.model_dump(mode="json"))
            await console.until("Run 4 by ben")

    async def test_e05_stale_dims_and_says_so(self, world: Any, open_console: Any) -> None:
        async with open_console(world, start="doctor") as console:
            await console.until("Run 3 by ana")
            console.clock.ahead += 14
            await console.until("STALE", "1 fail")

    async def test_e24_small_and_back(self, world: Any, open_console: Any) -> None:
        for start in ("doctor", "pair/node-02/node-09"):
            async with open_console(world, start=start) as console:
                for size in ((60, 15), (20, 5), (1, 1), (80, 24)):
                    await console.pilot.resize_terminal(*size)
                    await console.pilot.pause()
                    console.app.redraw()
                await console.until("Run 3 by ana" if start == "doctor" else "node-02 -> node-09")
