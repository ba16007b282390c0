"""The bench's own figures: a known text must be far cheaper than a new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from controlplane.bench.tokenise import SIZES, tokenise_figures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_a_known_text_costs_a_fraction(folder: Path) -> None:
    figures = tokenise_figures(str(folder), repeats=15)
    assert set(figures) == {str(size) for size in SIZES}
    long = figures["20000"]
    assert 0 < long["known_ms"] < long["fresh_ms"] / 3, figures
