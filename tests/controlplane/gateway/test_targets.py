"""Leg 1 names the node of leg 2, where its blocks may be pushed to while it computes."""

from __future__ import annotations

from typing import Any

from controlplane.gateway.bodies import Holder

N2 = {"node_id": "n2", "endpoint": "tcp:n2:7710", "incarnation": 7}


async def test_leg_one_knows_the_node_of_leg_two_where_it_is_another(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rows = rig.make_view()["workers"]
    await rig.publish(
        workers=[row | ({"node_id": "n2"} if row["id"] == "d1" else {}) for row in rows]
    )
    assert (await rig.complete(prompt="hello there")).status_code == 200
    rig.gateway.cluster.paths.holders["n2"] = Holder(**N2)
    assert (await rig.complete(prompt="hello again")).status_code == 200
    unreached, reached = (
        record["body"]["kv_transfer_params"]["perilune"] for record in rig.api("p1").records
    )
    assert "target" not in unreached, "nobody has said how n2 is reached"
    assert reached["target"] == N2
    decode = rig.api("d1").records[-1]["body"]["kv_transfer_params"]["perilune"]
    assert "target" not in decode


async def test_one_node_pushes_nothing(rig: Any) -> None:
    rig.workers = ("p1:prefill", "d1:decode")
    await rig.start()
    rig.gateway.cluster.paths.holders["n1"] = Holder("n1", "tcp:n1:7710")
    assert (await rig.complete(prompt="hello there")).status_code == 200
    (record,) = rig.api("p1").records
    assert "target" not in record["body"]["kv_transfer_params"]["perilune"]
