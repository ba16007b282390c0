"""Token ids put together from cached pieces are the tokenizer's own of the whole text."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from controlplane.gateway import prompts, segments
from controlplane.gateway.bodies import ClientBody
from controlplane.gateway.prompts import PromptTokenizer, Tokenizers
from controlplane.gateway.segments import Segmenter
from controlplane.gateway.token_cache import TokenCache

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end", "<tool>"]
CORPUS = [
    "It's the quick brown fox, isn't it? They'll jump over 12345 lazy dogs and on\n\n  and on.",
    "def f(x):\n    return x_y ** 2  # don't\n\n\tnaïve café — déjà vu 日本語のテキスト über 3.14",
    segments.PROBE,
]
PATTERNS = sorted(segments._WORD_PATTERNS)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def train(pre_tokenizer: Any, normalizer: Any = None, **added: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, **added) for text in SPECIAL])
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SAFE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: train(GPT2),
    "digits": lambda: train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
    ),
    "nfc": lambda: train(GPT2, normalizers.NFC()),
    "lowercase": lambda: train(GPT2, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    **{
        f"pattern{i}": lambda pattern=pattern: train(
            pre_tokenizers.Sequence([split(r"\p{N}{1,3}"), split(pattern), BYTES])
        )
        for i, pattern in enumerate(PATTERNS)
    },
}  # fmt: skip
ONLY_AT_ADDED: dict[str, Callable[[], Tokenizer]] = {
    "no_regex": lambda: train(BYTES),
    "unknown_pattern": lambda: train(pre_tokenizers.Sequence([split(r"\w+ \w+|\s|."), BYTES])),
    "replace": lambda: train(GPT2, normalizers.Replace("x y", "xy")),
}
NEVER: dict[str, Callable[[], Tokenizer]] = {
    "takes_blanks": lambda: train(GPT2, lstrip=True),
    "whole_words": lambda: train(GPT2, single_word=True),
    "head_differs": lambda: train(pre_tokenizers.Metaspace(prepend_scheme="first")),
}


def real_model() -> Path | None:
    home = Path(os.environ.get("PERILUNE_HOME", Path.home() / ".local/share/perilune"))
    folder = home / "models" / "smollm2"
    return folder if (folder / "tokenizer.json").exists() else None


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tokenizer], PromptTokenizer]:
    def load(tokenizer: Tokenizer) -> PromptTokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(folder / "tokenizer.json"))
        return PromptTokenizer(folder)

    return load


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CHUNK_CHARS", 12)


WORDS = st.sampled_from([
    "the", "Fox", "it's", "WE'LL", "'s", "12345", " ", "  ", "\n", "\r\n", "\t", "...", "!?", "é",
    "e\u0301", "日本", "👩‍👩‍👧‍👦", "\u00a0", "\u2003", "x_y", "'", "-", "{", '"', "a", *SPECIAL, "<|im_", "|>", "\u0301", "ß", "İ", "ﬁ",
])  # fmt: skip
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=60).map("".join)


def same(tokenizer: PromptTokenizer, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    pieces = tokenizer._segmenter.segments(text)
    assert "".join(pieces) == text
    assert tokenizer.tokens(ClientBody(b"", {"prompt": text}, chat=False)) == [
        tokenizer.encode(text, add_special_tokens=True)
    ]


@pytest.mark.parametrize("name", SAFE)
def test_any_text_cut_at_words_has_the_whole_texts_ids(name: str, make: Any) -> None:
    tokenizer = make(SAFE[name]())
    assert tokenizer._segmenter.cuts_inside

    @given(TEXTS)
    @settings(max_examples=70, deadline=None)
    def check(text: str) -> None:
        same(tokenizer, text)

    check()
    for text in CORPUS:
        same(tokenizer, text * 3)
        assert len(tokenizer._segmenter.segments(text * 3)) > 5


@pytest.mark.parametrize("name", [*ONLY_AT_ADDED, *NEVER])
def test_what_is_not_provable_is_not_cut(name: str, make: Any) -> None:
    tokenizer = make({**ONLY_AT_ADDED, **NEVER}[name]())
    segmenter = tokenizer._segmenter
    assert not segmenter.cuts_inside
    assert segmenter.cuts_at_added is (name in ONLY_AT_ADDED)

    @given(TEXTS)
    @settings(max_examples=30, deadline=None)
    def check(text: str) -> None:
        same(tokenizer, text)

    check()


def test_the_real_models_ids() -> None:
    folder = real_model()
    if folder is None:
        pytest.skip("the model is not prepared")
    tokenizer = PromptTokenizer(folder)
    assert tokenizer._segmenter.cuts_inside
    text = (Path(__file__).parents[3] / "README.md").read_text()
    rng = random.Random(1)
    for _ in range(40):
        start = rng.randrange(len(text))
        same(tokenizer, text[start : start + rng.randrange(3000)])


def test_a_probe_that_fails_gives_whole_texts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Segmenter, "segments", lambda self, text: list(text) if len(text) > 1 else [text]
    )
    tokenizer = make(SAFE["gpt2"]())
    assert not tokenizer._segmenter.cuts_at_added


def test_equal_heads_are_encoded_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(SAFE["gpt2"]())
    seen: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **more: (seen.append(text), encode(text, **more))[1]
    )
    head = "the quick brown fox jumps over the lazy dog " * 50
    for tail in ("one", "two"):
        tokenizer.tokens(ClientBody(b"", {"prompt": head + tail}, chat=False))
    assert sum(map(len, seen)) < len(head) / 5 + 200  # the corpus repeats: chunks are shared, too
    assert sum(map(len, seen[-2:])) < 100


@given(
    st.lists(st.text("ab<|\n", min_size=1, max_size=4), min_size=1, max_size=12),
    st.text("ab<|\n", max_size=30),
)
def test_added_tokens_are_found_leftmost_and_longest(words: list[str], text: str) -> None:
    spec = {"added_tokens": [{"content": word, "normalized": False} for word in words]}
    found, place = [], 0
    while place < len(text):
        here = [word for word in words if text.startswith(word, place)]
        if here:
            found.append((place, max(here, key=len)))
        place += len(found[-1][1]) if here else 1
    pattern = Segmenter(spec)._added
    assert pattern is not None
    assert [(match.start(), match[0]) for match in pattern.finditer(text)] == found


def test_thousands_of_added_tokens_cost_no_more_than_a_few() -> None:
    words = (
        [f"<unused{i}>" for i in range(6000)] + ["\n" * i for i in range(1, 30)] + ["[x]", "\t\t"]
    )
    spec = {"added_tokens": [{"content": word, "normalized": False} for word in words]}
    segmenter = Segmenter(spec)
    text = "a line of < some [ words <unu\n" * 1000
    start = time.perf_counter()
    pieces = segmenter.segments(text)
    assert time.perf_counter() - start < 0.3  # an alternation takes seconds
    assert len(pieces) == 2000


class TestCache:
    def test_it_is_bounded_by_bytes_and_keeps_what_is_used(self) -> None:
        cache = TokenCache(max_bytes=40_000)
        ids = array("i", range(10)).tobytes()
        for i in range(500):
            cache.put(0, f"text {i}", ids)
            assert cache.get(0, "text 0") is not None
            assert cache.num_bytes <= 40_000
        assert cache.get(0, "text 1") is None
        assert 100 < len(cache) < 200
        cache.put(1, "other", ids)
        cache.forget(0)
        assert len(cache) == 1
        assert cache.get(0, "other") is None
        cache.forget(1)
        assert cache.num_bytes == 0

    def test_the_tokenizer_that_has_most_gives_room(self) -> None:
        cache, ids = TokenCache(max_bytes=40_000), bytes(40)
        cache.put(1, "small", ids)
        for i in range(4):
            cache.put(2, f"{i}" * 4000, ids)  # large, and never used again
        for i in range(500):
            cache.put(0, f"text {i}", ids)
        assert cache.get(1, "small") == ids
        assert cache.get(0, "text 499") == ids
        assert cache.get(2, "0" * 4000) is None
        assert cache.num_bytes <= 40_000

    def test_a_giant_is_not_kept(self) -> None:
        cache = TokenCache(max_bytes=10_000)
        cache.put(0, "x" * 9000, array("i", range(9)).tobytes())
        assert len(cache) == 0


class TestOffTheLoop:
    async def test_long_texts_are_encoded_in_the_thread_up_to_a_bound(
        self, tokenizer_folder: Path
    ) -> None:
        tokenizers = Tokenizers()
        tokenizers.load(str(tokenizer_folder))
        tokenizer = tokenizers.get(str(tokenizer_folder))
        assert tokenizer is not None
        texts = [" ".join(f"fox{i}x{j}" for j in range(400)) for i in range(4)]
        bodies = [ClientBody(b"", {"prompt": text}, chat=False) for text in texts]
        found = await asyncio.gather(
            *(tokenizers.tokens(tokenizer, body, 100, 7_000) for body in bodies)
        )
        known = [ids for ids in found if ids is not None]
        assert 1 <= len(known) < 4  # more than 7,000 characters would have waited
        assert list(known[0][0]) == tokenizer.encode(texts[0], add_special_tokens=True)
        assert tokenizers.pending_chars == 0
        again = await tokenizers.tokens(tokenizer, bodies[0], 0, 0)  # cached: no thread, no bound
        assert again is not None
        tokenizers.close()

    async def test_a_busy_thread_is_not_waited_for_and_its_work_is_kept(
        self, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
    ) -> None:
        monkeypatch.setattr(prompts, "MAX_WAIT_SECONDS", 0.05)
        tokenizers = Tokenizers()
        tokenizers.load(str(tokenizer_folder))
        tokenizer = tokenizers.get(str(tokenizer_folder))
        assert tokenizer is not None
        release = threading.Event()
        tokenizers.thread.submit(release.wait, 20)
        body = ClientBody(b"", {"prompt": "the quick brown fox"}, chat=False)
        assert await tokenizers.tokens(tokenizer, body, 0, 7000) is None
        assert tokenizers.pending_chars > 0
        release.set()
        await eventually(lambda: tokenizers.pending_chars == 0)
        assert len(tokenizers.cache) > 0
        assert await tokenizers.tokens(tokenizer, body, 0, 0) is not None
        tokenizers.close()


def test_settings_of_the_patterns_are_those_of_known_models() -> None:
    """A guard against a slip in a pattern: each must cut this text where the words end."""
    for pattern in PATTERNS:
        pieces = [piece for piece, _ in split(pattern).pre_tokenize_str("one two\nthree 45 x's")]
        assert "".join(pieces) == "one two\nthree 45 x's"
        assert {"one", " two"} <= set(pieces), json.dumps(pieces)
