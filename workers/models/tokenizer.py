"""Rebuilds a Hugging Face tokenizer from a GGUF file's metadata (GPT-2 style byte-level BPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# llama.cpp's token types: 3 marks control tokens, which never come from text.
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the GGUF says about its tokenizer."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str
    max_tokens: int


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json.

    The "smollm" pre-tokenizer splits digits one by one before GPT-2's own pattern.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token)
            for index, (token, kind) in enumerate(
                zip(vocabulary.tokens, vocabulary.token_types, strict=True)
            )
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(),
            ],
        },
        "post_processor": None,
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ", 1) for merge in vocabulary.merges],
        },
    }


def _added_token(index: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def _byte_level() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json, chat template included."""
    tokens = vocabulary.tokens
    return {
        # The generic class: a model-named one may bring a pre-tokenizer of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[vocabulary.bos_id],
        "eos_token": tokens[vocabulary.eos_id],
        "unk_token": tokens[vocabulary.unk_id],
        "pad_token": tokens[vocabulary.pad_id],
        "model_max_length": vocabulary.max_tokens,
        "chat_template": vocabulary.chat_template,
    }
