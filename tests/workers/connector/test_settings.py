from __future__ import annotations

import pytest

from workers.connector.settings import parse_settings
from workers.core.errors import ConfigError

GOOD = {"agent_socket": "/run/a.sock", "worker_id": "w1", "block_tokens": 64}


def parse(changes=None, engine_block_tokens=32, kv_role="kv_producer"):
    extra = {**GOOD, **(changes or {})}
    extra = {name: value for name, value in extra.items() if value is not None}
    return parse_settings(
        extra, engine_block_tokens=engine_block_tokens, kv_role=kv_role, model="m"
    )


class TestSettings:
    def test_defaults(self):
        settings = parse()
        assert settings.pages_per_block == 2
        assert settings.model_id == "m"
        assert settings.stores

    def test_consumer_does_not_store(self):
        assert not parse(kv_role="kv_consumer").stores

    @pytest.mark.parametrize("block", [48, 16, 0, -32])
    def test_b29_pool_block_must_be_a_multiple_of_the_engines(self, block):
        with pytest.raises(ConfigError) as caught:
            parse({"block_tokens": block})
        assert repr(block) in str(caught.value)
        assert "--block-size 32" in str(caught.value)

    @pytest.mark.parametrize("name", ["agent_socket", "worker_id", "block_tokens"])
    def test_missing(self, name):
        with pytest.raises(ConfigError, match=f"{name} = None: it is missing"):
            parse({name: None})

    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [
            ("agent_sockets", "x", "no such setting"),
            ("kv_role", "kv_both", "no such setting"),
            ("block_tokens", "64", "it is str, not int"),
            ("block_tokens", True, "it is bool, not int"),
            ("worker_id", 3, "it is int, not str"),
            ("layer_loads", 1, "it is int, not bool"),
            ("worker_id", "", "it is empty"),
            ("load_timeout_seconds", 0, "above 0"),
            ("store_queue_blocks", -1, "above 0"),
            ("promote_timeout_seconds", 0, "above 0"),
            ("store_step_seconds", 0.0, "above 0"),
            ("store_backlog_bytes", (1 << 30) + 1, "at most 1073741824 bytes"),
        ],
    )
    def test_wrong(self, name, value, problem):
        with pytest.raises(ConfigError, match=problem) as caught:
            parse({name: value})
        assert caught.value.value == value

    def test_whole_numbers_do_for_seconds(self):
        assert parse({"load_timeout_seconds": 3}).load_timeout_seconds == 3.0
