"""Turns a llama-architecture GGUF file into what transformers and vLLM load.

Weights are dequantised and written as bfloat16 safetensors. llama.cpp permutes the rows of the
query and key projections for its own rotary embedding; here they are put back.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workers.core.errors import ConfigError
from workers.models import bf16_file
from workers.models.bf16_file import FloatArray
from workers.models.tokenizer import Vocabulary

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The architecture as the GGUF states it."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_tokens: int
    rope_theta: float
    rms_norm_eps: float


class LlamaGguf:
    """An opened GGUF file. Raises ConfigError where it is not a llama-like model."""

    def __init__(self, path: Path) -> None:
        # At run time only: the command line starts without it, and it costs 0.2 s.
        gguf: Any = importlib.import_module("gguf")
        self._dequantize = gguf.dequantize
        self._reader = gguf.GGUFReader(path)
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise ConfigError(
                "general.architecture",
                architecture,
                f"{path.name} is not a llama model",
                "Use a llama-architecture GGUF",
            )

    def _value(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise ConfigError("GGUF metadata", key, "it is missing", "Use another GGUF file")
        return field.contents()

    def shape(self) -> LlamaShape:
        return LlamaShape(
            num_layers=self._value("llama.block_count"),
            hidden_size=self._value("llama.embedding_length"),
            intermediate_size=self._value("llama.feed_forward_length"),
            num_heads=self._value("llama.attention.head_count"),
            num_kv_heads=self._value("llama.attention.head_count_kv"),
            vocab_size=self._value("llama.vocab_size"),
            max_tokens=self._value("llama.context_length"),
            rope_theta=self._value("llama.rope.freq_base"),
            # Stored as float32; the config's 1e-05 has to come out as it went in.
            rms_norm_eps=float(f"{self._value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        )

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            tokens=self._value("tokenizer.ggml.tokens"),
            token_types=self._value("tokenizer.ggml.token_type"),
            merges=self._value("tokenizer.ggml.merges"),
            bos_id=self._value("tokenizer.ggml.bos_token_id"),
            eos_id=self._value("tokenizer.ggml.eos_token_id"),
            unk_id=self._value("tokenizer.ggml.unknown_token_id"),
            pad_id=self._value("tokenizer.ggml.padding_token_id"),
            chat_template=self._value("tokenizer.chat_template"),
            max_tokens=self._value("llama.context_length"),
        )

    def write_safetensors(self, target: Path) -> None:
        """Write every tensor as bfloat16 under its Hugging Face name."""
        tensors = {hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        shape = self.shape()

        def load(name: str) -> FloatArray:
            tensor = tensors[name]
            values = cast("FloatArray", self._dequantize(tensor.data, tensor.tensor_type))
            if name.endswith("q_proj.weight"):
                return unpermute(values, shape.num_heads)
            if name.endswith("k_proj.weight"):
                return unpermute(values, shape.num_kv_heads)
            return values

        # GGUF names the fastest axis first.
        shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in tensors.items()
        }
        bf16_file.write(target, shapes, load)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor ("blk.3.attn_q.weight")."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"model.{_OUTER_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{kind}"
    raise ConfigError("GGUF tensor", name, "no counterpart is known", "Use another GGUF file")


def unpermute(weight: FloatArray, num_heads: int) -> FloatArray:
    """Undo llama.cpp's interleaving of rotary halves within each head's rows."""
    rows, *rest = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return cast("FloatArray", halves.swapaxes(1, 2).reshape(weight.shape))


def llama_config(shape: LlamaShape, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "head_dim": shape.hidden_size // shape.num_heads,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_tokens,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        # The GGUF has no output matrix: the embedding serves as one.
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {
        "_from_model_config": True,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
    }
