from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from workers.core.errors import ConfigError
from workers.models import bf16_file
from workers.models.llama_gguf import hf_name, unpermute
from workers.models.tokenizer import Vocabulary, tokenizer_config, tokenizer_json


def permute(weight, num_heads):
    """What llama.cpp's converter does to q and k rows."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


class TestWeights:
    @pytest.mark.parametrize("num_heads", [1, 3])
    def test_unpermute_undoes_permute(self, num_heads):
        weight = np.arange(num_heads * 8 * 5, dtype=np.float32).reshape(num_heads * 8, 5)
        assert np.array_equal(unpermute(permute(weight, num_heads), num_heads), weight)

    def test_bfloat16_rounds_to_nearest_even(self):
        values = np.array([1.0, 1.00390625, 1.01171875, -2.0, 3.14159], dtype=np.float32)
        patterns = bf16_file.to_bfloat16(values)
        back = (patterns.astype(np.uint32) << 16).view(np.float32)
        assert back.tolist() == [1.0, 1.0, 1.015625, -2.0, 3.140625]

    def test_file_is_read_by_the_library(self, tmp_path):
        values = {
            "a": np.array([[1, 2], [3, 4]], dtype=np.float32),
            "b": np.array([0.5], dtype=np.float32),
        }
        shapes = {name: value.shape for name, value in values.items()}
        bf16_file.write(tmp_path / "x.safetensors", shapes, values.__getitem__)
        loaded = load_file(tmp_path / "x.safetensors")
        assert loaded["a"].dtype == torch.bfloat16
        assert loaded["a"].tolist() == [[1, 2], [3, 4]]
        assert loaded["b"].tolist() == [0.5]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
            ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ],
    )
    def test_names(self, name, expected):
        assert hf_name(name) == expected

    def test_unknown_name_is_refused(self):
        with pytest.raises(ConfigError, match=r"blk\.0\.rope\.weight"):
            hf_name("blk.0.rope.weight")


@pytest.fixture
def vocabulary():
    letters = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [chr(c) for c in range(33, 127)] + ["\u0120"]
    return Vocabulary(
        tokens=[*letters, *alphabet, "th", "the"],
        token_types=[3, 3, 3, *[1] * (len(alphabet) + 2)],
        merges=["t h", "th e"],
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=2,
        chat_template="{{ messages }}",
        max_tokens=128,
    )


class TestTokenizer:
    def test_merges_digits_and_specials(self, vocabulary):
        tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
        assert tokenizer.encode("the 123<|im_end|>").tokens == [
            "the", "\u0120", "1", "2", "3", "<|im_end|>",
        ]  # fmt: skip

    def test_config_names_its_special_tokens(self, vocabulary):
        config = tokenizer_config(vocabulary)
        assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
        assert config["chat_template"] == "{{ messages }}"
