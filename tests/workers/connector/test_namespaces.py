"""What must not share blocks does not, whatever else is equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from connector_halves import BLOCK, TOKENS, holds, until

from workers.connector.lora import lora_identity
from workers.connector.scheduler_half import media_extras, request_info
from workers.core.hashing import block_hashes, namespace_digest, root_hash

LEG_1 = {"transfer_id": "t", "leg": "prefill"}
LEG_2 = {"transfer_id": "t", "leg": "decode", "num_blocks": 5}


class TestEngines:
    """One worker stores, another with one difference looks for the same tokens."""

    @pytest.fixture
    def stored(self, halves_agent, make_engine):
        make_engine().run(TOKENS)
        until(lambda: halves_agent.stats().stored_blocks_total == 5, "stores")

    @pytest.mark.parametrize(
        "change",
        [
            {"kv_dtype": "fp8_e4m3/uint8"},
            {"page_layout": "other"},
            {"isa": "amx"},
            {"model_id": "other"},
        ],
    )
    def test_b32_another_format_of_blocks_is_never_read(self, stored, make_engine, change):
        assert make_engine("d1", "kv_consumer", **change).run(TOKENS)[0] == 0

    def test_b31_weights_of_another_version_share_nothing(self, halves_agent, make_engine, stored):
        new = make_engine("p2", "kv_both", weights_version="2")
        assert new.run(TOKENS)[0] == 0
        until(lambda: halves_agent.stats().stored_blocks_total == 10, "the new version's blocks")
        assert new.run(TOKENS, "again", first_block=20)[0] == 40
        assert holds(new.cache, TOKENS, 20, 41)
        old = make_engine("d1", "kv_consumer")
        assert old.run(TOKENS)[0] == 40
        assert len(halves_agent.stats().namespaces) == 2

    @pytest.mark.parametrize("change", [{"tp_size": 2}, {"rank_layout": "tp2"}])
    def test_b28_another_shape_of_ranks_is_never_read(self, stored, make_engine, change):
        assert make_engine("d1", "kv_consumer", **change).run(TOKENS)[0] == 0

    def test_tenants_do_not_share_by_default(self, make_engine, stored):
        engine = make_engine("p2", "kv_both")
        assert engine.run(TOKENS, "r1", cache_salt="tenant-a")[0] == 0
        assert engine.run(TOKENS, "r2", cache_salt="tenant-b", first_block=20)[0] == 0
        assert engine.run(TOKENS, "r3")[0] == 40

    def test_b33_adapters_share_nothing(self, halves_agent, make_engine, stored, tmp_path):
        engine = make_engine("p2", "kv_both")
        one, two = (adapter(tmp_path / name, name) for name in ("a", "b"))
        assert engine.run(TOKENS, "r1", lora_request=one)[0] == 0
        until(lambda: halves_agent.stats().stored_blocks_total == 10, "adapter a's blocks")
        assert engine.run(TOKENS, "r2", lora_request=two)[0] == 0
        assert engine.run(TOKENS, "r3", lora_request=one)[0] == 40


def adapter(folder, name, *, weights=b"w", config="{}", number=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder))


class TestLora:
    def test_no_adapter(self):
        assert lora_identity(None) is None

    def test_equal_content_is_one_adapter_wherever_it_lies(self, tmp_path):
        one, two = adapter(tmp_path / "x", "a"), adapter(tmp_path / "y", "a", number=9)
        assert lora_identity(one) == lora_identity(two)

    @pytest.mark.parametrize("change", [{"weights": b"v"}, {"config": '{"r": 8}'}])
    def test_b33_one_name_with_other_content_is_another(self, tmp_path, change):
        one = lora_identity(adapter(tmp_path / "x", "a"))
        assert lora_identity(adapter(tmp_path / "y", "a", **change)) != one

    def test_b33_content_replaced_in_place_is_another(self, tmp_path):
        one = lora_identity(adapter(tmp_path / "x", "a"))
        assert lora_identity(adapter(tmp_path / "x", "a", weights=b"longer")) != one

    def test_two_names_are_two_adapters(self, tmp_path):
        one = lora_identity(adapter(tmp_path / "x", "a"))
        assert lora_identity(adapter(tmp_path / "x", "b")) != one

    def test_a_path_that_is_no_folder_counts_by_its_text(self):
        def at(path):
            lora = SimpleNamespace(lora_name="", lora_int_id=3, lora_path=path)
            return lora_identity(lora)

        assert at("org/one") != at("org/two")
        assert at("org/one") == at("org/one")


class TestKeys:
    def test_b28_every_rank_computes_the_same_keys(self):
        """Two processes whose own hashes differ, as ranks' do."""
        script = (
            "import json\n"
            "from workers.core.hashing import block_hashes, root_hash\n"
            "keys = block_hashes(root_hash(b'n' * 32, 'salt', None), list(range(64)), 8)\n"
            "print(json.dumps([key.hex() for key in keys]))\n"
        )
        found = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", script], check=True, capture_output=True, timeout=60,
                    env={**os.environ, "PYTHONHASHSEED": seed},
                ).stdout
            )
            for seed in ("0", "1")
        ]  # fmt: skip
        assert found[0] == found[1]
        keys = block_hashes(root_hash(b"n" * 32, "salt", None), list(range(64)), 8)
        assert [key.hex() for key in keys] == found[0]

    def test_b35_images_that_differ_in_their_high_bits_only_share_nothing(self):
        """Digests that agree in all but the first of 64 digits."""

        def keys(identifier):
            feature = SimpleNamespace(
                identifier=identifier, mm_position=SimpleNamespace(offset=4, length=16)
            )
            extras = media_extras([feature], len(TOKENS), BLOCK)
            return block_hashes(root_hash(b"n" * 32, None, None), TOKENS, BLOCK, extras)

        one, two = keys("a" + "0" * 63), keys("b" + "0" * 63)
        assert not set(one) & set(two)  # from the image's first block on
        assert one == keys("a" + "0" * 63)

    def test_salt_adapter_and_absence_are_told_apart(self):
        roots = {
            root_hash(b"n" * 32, salt, lora)
            for salt in (None, "", "x")
            for lora in (None, "", "x", "x\0y")
        }
        assert len(roots) == 12

    def test_every_field_of_the_namespace_counts(self, spec_with):
        changes = {
            "model_id": "m2", "weights_version": "2", "kv_dtype": "fp8", "page_layout": "x",
            "isa": "amx", "page_bytes": (4096, 8192), "engine_block_tokens": 16,
            "block_tokens": 128, "tp_size": 2, "rank_layout": "tp2", "format_version": 2,
        }  # fmt: skip
        digests = {namespace_digest(spec_with(**{k: v})) for k, v in changes.items()}
        assert len(digests | {namespace_digest(spec_with())}) == len(changes) + 1


class TestCounts:
    def test_b36_a_hit_is_counted_once_over_both_legs(self, halves_agent, make_engine):
        """Two of five blocks were in the pool: that is the hit, and not what leg 2 then reads."""
        make_engine("p0").run(TOKENS[:17])
        until(lambda: halves_agent.stats().stored_blocks_total == 2, "stores")
        prefill, decode = make_engine(), make_engine("d1", "kv_consumer")
        assert prefill.run(TOKENS, params=LEG_1)[0] == 16
        assert decode.run(TOKENS, params=LEG_2)[0] == 40
        stats = until(
            lambda: (s := halves_agent.stats()).prompt_tokens_total >= 58 and s, "all reports"
        )
        until(lambda: halves_agent.stats().loaded_blocks_total == 7, "both legs' reads")
        assert (stats.prompt_tokens_total, stats.hit_tokens_total) == (17 + 41, 16)

    def test_b37_requests_that_skip_the_cache_count_nowhere(self, halves_agent, make_engine):
        engine = make_engine("p1", "kv_both")
        engine.run(TOKENS)
        before = until(
            lambda: (s := halves_agent.stats()).prompt_tokens_total and s, "the first report"
        )
        for number in range(3):
            engine.run(TOKENS, f"r{number}", skip_reading_prefix_cache=True)
        engine.run(TOKENS[:9], "last")
        after = until(
            lambda: (s := halves_agent.stats()).prompt_tokens_total > 41 and s, "the last report"
        )
        assert after.prompt_tokens_total - before.prompt_tokens_total == 9
        assert after.lookups_total - before.lookups_total == 1


def test_hints_of_a_session_are_read_and_nothing_else():
    def session(value):
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=[1], cache_salt=None, lora_request=None,
            kv_transfer_params={"perilune": {"session": value}}, sampling_params=object(),
        )  # fmt: skip
        return request_info(request, BLOCK).session

    assert [session(v) for v in ("continue", "over", "Over", 3, None, [], {})] == [
        "continue", "over", "", "", "", "", "",
    ]  # fmt: skip
