import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.hashing import (
    PUBLISHED_TEST_VECTOR,
    block_hashes,
    hash_test_vector,
    namespace_digest,
    root_hash,
)
from workers.core.stats_messages import NamespaceSpec

VECTOR_HEX = "0118515345cdc9a60777c3e3b3da96e368267eaa459a10a2e555fa4bd7083ed1"
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def make_spec(**changes: object) -> NamespaceSpec:
    values: dict[str, object] = {
        "model_id": "smollm2",
        "weights_version": "1",
        "kv_dtype": "bfloat16",
        "page_layout": "LBHNC",
        "isa": "vec",
        "page_bytes": (24576, 24576),
        "engine_block_tokens": 32,
        "block_tokens": 64,
        "tp_size": 1,
        "rank_layout": "tp1",
    }
    return NamespaceSpec(**(values | changes))  # type: ignore[arg-type]


class TestVector:
    def test_has_the_published_value(self) -> None:
        assert hash_test_vector().hex() == VECTOR_HEX
        assert hash_test_vector() == PUBLISHED_TEST_VECTOR

    @pytest.mark.parametrize("seed", ["0", "1", "random"])
    def test_b26_other_process_and_hash_seed_give_equal_keys(self, seed: str) -> None:
        self._compare_with_a_process(seed, "list(range(200)), 64")

    @pytest.mark.parametrize("seed", ["0", "12345"])
    def test_b27_absent_extras_hash_alike_in_every_process(self, seed: str) -> None:
        self._compare_with_a_process(seed, "list(range(200)), 64, extras=()")

    def _compare_with_a_process(self, seed: str, arguments: str) -> None:
        code = (
            "from workers.core.hashing import *;"
            "print(hash_test_vector().hex());"
            "print(*[h.hex() for h in block_hashes(root_hash(b'n' * 32, None, None),"
            f" {arguments})])"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        vector, keys = done.stdout.splitlines()
        here = block_hashes(root_hash(b"n" * 32, None, None), list(range(200)), 64)
        assert vector == VECTOR_HEX
        assert keys.split() == [key.hex() for key in here]


class TestBlockHashes:
    root = root_hash(b"n" * 32, None, None)

    def test_partly_filled_last_block_has_no_key(self) -> None:
        assert [len(block_hashes(self.root, range(n), 64)) for n in (0, 63, 64, 127, 128)] == [
            0, 0, 1, 1, 2,
        ]  # fmt: skip
        assert {len(key) for key in block_hashes(self.root, range(256), 64)} == {16}

    @given(tokens=TOKENS, more=TOKENS, block_tokens=st.integers(1, 5))
    def test_chain_of_a_prefix_is_a_prefix_of_the_chain(
        self, tokens: list[int], more: list[int], block_tokens: int
    ) -> None:
        short = block_hashes(self.root, tokens, block_tokens)
        assert block_hashes(self.root, tokens + more, block_tokens)[: len(short)] == short

    @given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=40), cut=st.integers(1, 9))
    def test_chain_goes_on_from_any_key(self, tokens: list[int], cut: int) -> None:
        whole = block_hashes(self.root, tokens, 4)
        cut = min(cut, len(whole))
        assert block_hashes(whole[cut - 1], tokens[4 * cut :], 4) == whole[cut:]

    @given(tokens=st.lists(st.integers(0, 9), min_size=12, max_size=12), at=st.integers(0, 11))
    def test_a_changed_token_changes_its_block_and_all_after(
        self, tokens: list[int], at: int
    ) -> None:
        changed = list(tokens)
        changed[at] += 1
        before, after = block_hashes(self.root, tokens, 4), block_hashes(self.root, changed, 4)
        assert [a == b for a, b in zip(before, after, strict=True)] == [
            i < at // 4 for i in range(3)
        ]

    def test_extras_count_whole_and_in_order(self) -> None:
        def last(*extras: bytes) -> bytes:
            return block_hashes(self.root, range(8), 4, extras=[(), extras])[1]

        keys = [last(), last(b"a"), last(b"ab"), last(b"a", b"b"), last(b"b", b"a"), last(b"")]
        assert len(set(keys)) == len(keys)
        assert last() == block_hashes(self.root, range(8), 4)[1]

    def test_extras_change_later_blocks_too(self) -> None:
        plain = block_hashes(self.root, range(12), 4)
        image = block_hashes(self.root, range(12), 4, extras=[(), (b"image",)])
        assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False]

    @pytest.mark.parametrize("tokens", [[0, 2**31], [-(2**31) - 1, 0], [1.5, 2]])
    def test_what_is_no_int32_is_refused(self, tokens: list[int]) -> None:
        with pytest.raises(ValueError, match="32-bit"):
            block_hashes(self.root, tokens, 2)

    def test_block_tokens_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="block_tokens = 0"):
            block_hashes(self.root, [1], 0)


class TestRoot:
    def test_salt_lora_and_namespace_separate(self) -> None:
        roots = [
            root_hash(namespace, salt, lora)
            for namespace in (b"a" * 32, b"b" * 32)
            for salt in (None, "", "x", "xy")
            for lora in (None, "", "x", "y")
        ]
        assert len(set(roots)) == len(roots)
        assert {len(root) for root in roots} == {32}

    def test_lone_surrogate_from_json_is_a_salt_like_any(self) -> None:
        assert root_hash(b"", "\ud800", None) != root_hash(b"", "\ud801", None)


class TestNamespace:
    def test_every_field_counts(self) -> None:
        other = {
            "page_bytes": (24576, 24577),
            "engine_block_tokens": 16,
            "block_tokens": 128,
            "tp_size": 2,
            "format_version": 2,
        }
        fields = NamespaceSpec.__struct_fields__
        specs = [make_spec(), *(make_spec(**{f: other.get(f, "other")}) for f in fields)]
        assert len({namespace_digest(spec) for spec in specs}) == len(fields) + 1

    def test_digests_are_stable(self) -> None:
        assert namespace_digest(make_spec()) == namespace_digest(make_spec())
        digests = [namespace_digest(make_spec(page_bytes=p)) for p in ((1, 23), (12, 3), (123,))]
        assert all(a != b for a, b in pairwise(digests))
