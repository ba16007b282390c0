"""What each connector is told, field by field."""

import pytest

from controlplane.core.handshake import (
    HANDSHAKES,
    Bootstrap,
    at_once,
    decode_params,
    is_taken_once,
    nothing_pairs,
    owes_release,
    pairs,
    prefill_fields,
    prefill_params,
)

REPLY = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
HOLDER = Bootstrap("http://10.0.0.1:8998", "engine-1")


def test_nixl_leg_1_asks_for_a_remote_decode():
    params = prefill_params("nixl", "t")
    assert params == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip


def test_nixl_leg_2_gets_the_reply_as_it_came():
    assert decode_params("nixl", "t", REPLY, None) == REPLY


@pytest.mark.parametrize("reply", [None, {}])
def test_a11_null_params_never_reach_decode(reply):
    assert decode_params("nixl", "t", reply, None) is None


def test_mooncake_legs_meet_by_the_transfer_id():
    assert prefill_params("mooncake", "t") == {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t",
    }  # fmt: skip
    assert decode_params("mooncake", "t", None, HOLDER) == {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "t",
        "remote_bootstrap_addr": "http://10.0.0.1:8998", "remote_engine_id": "engine-1",
    }  # fmt: skip


def test_mooncake_without_a_known_engine_id_computes_on_decode():
    assert decode_params("mooncake", "t", None, None) is None


def test_plain_legs_are_told_nothing():
    assert prefill_params("none", "t") is None
    assert decode_params("none", "t", REPLY, HOLDER) is None


def test_legs_of_one_request_run_the_same_connector():
    assert [pairs(a, b) for a in HANDSHAKES for b in HANDSHAKES] == [
        a == b for a in HANDSHAKES for b in HANDSHAKES
    ]


def test_what_else_differs():
    assert [name for name in HANDSHAKES if at_once(name)] == ["mooncake"]
    assert [name for name in HANDSHAKES if owes_release(name)] == ["nixl"]
    assert [name for name in HANDSHAKES if is_taken_once(name)] == ["nixl", "mooncake"]


def test_only_a_mooncake_leg_1_must_not_end_by_a_stop_token():
    fields = {name: dict(prefill_fields(name)) for name in HANDSHAKES}
    assert fields == {"perilune": {}, "nixl": {}, "mooncake": {"min_tokens": 1}, "none": {}}


def test_a_caller_may_change_what_it_got():
    params = prefill_params("nixl", "t")
    assert params is not None
    params["remote_host"] = "changed"
    assert prefill_params("nixl", "t") != params


def test_a_model_whose_workers_do_not_fit_is_told_so():
    assert nothing_pairs(["nixl", "nixl"], ["none", "nixl"]) == ""
    assert nothing_pairs([], ["none"]) == nothing_pairs(["nixl"], []) == ""
    said = nothing_pairs(["nixl", "mooncake"], ["none"])
    assert "prefill workers have handshake mooncake, nixl, its decode workers none" in said
