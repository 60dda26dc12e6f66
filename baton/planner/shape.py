"""`ModelShape`: sizes of a model, and the counts of parameters that follow from them.

Each count says what it counts, because published tables count differently: with or without the embedding, norms and
biases; all experts of a mixture, or those that one token uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.errors import ModelError
from baton.model.config import ModelConfig
from baton.model.families import FAMILIES

_MIXTURES = {
    "MixtralForCausalLM": ("MistralForCausalLM", "intermediate_size", "num_local_experts"),
    "Qwen3MoeForCausalLM": ("Qwen3ForCausalLM", "moe_intermediate_size", "num_experts"),
}
"""Mixtures of experts: the dense architecture with the same attention, and the fields of an MLP's size and number."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the arithmetic depends on; `windows` has one entry a layer, None for full attention.

    `max_positions`: the longest context of the model in tokens, None if unknown. `tied`: the output projection is the
    embedding. `experts`: number of MLPs of a layer in a mixture of experts, and `active_experts` of them compute a
    token; both are 0 for a dense model. The weights of a mixture's router are not counted: they are below a thousandth.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    max_positions: int | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        """The shape of a model."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            windows=config.windows,
            tied=config.tie_word_embeddings,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
            max_positions=config.max_position_embeddings,
        )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelShape:
        """The shape of the model in a folder or a config.json; also of mixtures of experts, which Baton does not run.

        Raises ModelError with the file, or with the field and its value.
        """
        raw = _config(Path(path))
        if quantization := raw.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"quantization_config: {method!r} is not read; remove it from a copy of config.json, and give the bits "
                "of the weights as --weight-bits"
            )
        names = raw.get("architectures") or ()
        if names and not any(name in FAMILIES or name in _MIXTURES for name in names):
            known = ", ".join((*FAMILIES, *_MIXTURES))
            raise ModelError(f"unsupported architecture {', '.join(map(str, names))}; supported in plans: {known}")
        mixture = next((name for name in names if name in _MIXTURES), None)
        return cls.of(ModelConfig.from_pretrained(path)) if mixture is None else cls._of_mixture(mixture, raw)

    @classmethod
    def _of_mixture(cls, architecture: str, raw: Mapping[str, Any]) -> ModelShape:
        like, inner, experts = _MIXTURES[architecture]
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            raise ModelError("mlp_only_layers, decoder_sparse_step: only mixtures in all layers are supported")
        for name in (inner, experts, "num_experts_per_tok"):
            if type(raw.get(name)) is not int or raw[name] < 1:
                raise ModelError(f"{name} must be a positive integer, not {raw.get(name)!r}")
        if raw["num_experts_per_tok"] > raw[experts]:
            raise ModelError(f"num_experts_per_tok {raw['num_experts_per_tok']} exceeds {experts} {raw[experts]}")
        dense = {"sliding_window": None, **raw, "architectures": [like], "intermediate_size": raw[inner]}
        shape = cls.of(ModelConfig.from_dict(dense))
        return replace(shape, experts=raw[experts], active_experts=raw["num_experts_per_tok"])

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's q, k, v and o."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of one MLP's gate, up and down; of one expert of a mixture."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices that a token uses: q, k, v and o; gate, up and down of its experts."""
        return self.attention_weights + (self.active_experts or 1) * self.mlp_weights

    @property
    def kv_weights(self) -> int:
        """Elements of one layer's k and v."""
        return self.hidden_size * self.head_dim * 2 * self.num_kv_heads

    @property
    def lm_head_weights(self) -> int:
        """Elements of the output projection."""
        return self.hidden_size * self.vocab_size

    @property
    def step_weights(self) -> int:
        """Elements of all matrices that a decode step of one token reads."""
        return self.num_layers * self.layer_weights + self.lm_head_weights

    @property
    def activated(self) -> int:
        """Parameters that compute a token, as published for Qwen1.5: matrices with biases, and the output projection.

        L * [(H + 1) * H + 2 * floor((H + 1) * H / g) + H^2 + 3 * H * I] + H * V, where g query heads share a KV head.
        The embedding and norms are not counted.
        """
        return self.step_weights + self.num_layers * self.biases(self.active_experts)

    @property
    def matrix_weights(self) -> int:
        """Elements of all matrices in memory: every layer with all experts, embedding and output projection."""
        layer = self.attention_weights + (self.experts or 1) * self.mlp_weights
        return self.num_layers * layer + (1 if self.tied else 2) * self.lm_head_weights

    @property
    def parameters(self) -> int:
        """All parameters: every tensor of the checkpoint, with the embedding, norms, biases and all experts."""
        layer = self.biases(self.experts) + self.layer_norms
        return self.matrix_weights + self.num_layers * layer + self.hidden_size

    def biases(self, experts: int = 0) -> int:
        """Elements of the biases of one layer's attention, and of its MLP or of so many experts."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        o = self.hidden_size if self.o_bias else 0
        mlp = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return qkv + o + (experts or 1) * mlp

    @property
    def layer_norms(self) -> int:
        """Elements of one layer's norms: of attention, of the MLP, and of queries and keys where a family has them."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def kv_token_elements(self) -> int:
        """Elements of one token's K and V over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's K and V over all layers, as `KvFormat.token_bytes` has them."""
        return self.kv_token_elements * element_bytes


def _config(path: Path) -> dict[str, Any]:
    """Contents of config.json; empty if it can't be read, which ModelConfig reports."""
    try:
        raw = json.loads((path if path.is_file() else path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _row(*sizes: int, layers: int, **others: Any) -> ModelShape:
    hidden, inner, heads, kv_heads, head_dim, vocab = sizes
    return ModelShape(hidden, inner, heads, kv_heads, head_dim, vocab, (None,) * layers, **others)


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        # hidden size, size of the MLP, heads, KV heads, head dim, vocabulary; from config.json on the hub
        "llama-2-7b": _row(4096, 11008, 32, 32, 128, 32000, layers=32, max_positions=4096),
        "llama-2-13b": _row(5120, 13824, 40, 40, 128, 32000, layers=40, max_positions=4096),
        "llama-2-70b": _row(8192, 28672, 64, 8, 128, 32000, layers=80, max_positions=4096),
        "llama-3-8b": _row(4096, 14336, 32, 8, 128, 128256, layers=32, max_positions=8192),
        "llama-3-70b": _row(8192, 28672, 64, 8, 128, 128256, layers=80, max_positions=8192),
        "llama-3.1-8b": _row(4096, 14336, 32, 8, 128, 128256, layers=32, max_positions=1 << 17),
        "llama-3.1-70b": _row(8192, 28672, 64, 8, 128, 128256, layers=80, max_positions=1 << 17),
        "llama-3.1-405b": _row(16384, 53248, 128, 8, 128, 128256, layers=126, max_positions=1 << 17),
        "mistral-7b": _row(4096, 14336, 32, 8, 128, 32768, layers=32, max_positions=1 << 15),
        "qwen1.5-0.5b": _row(1024, 2816, 16, 16, 64, 151936, layers=24, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-1.8b": _row(2048, 5504, 16, 16, 128, 151936, layers=24, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-4b": _row(2560, 6912, 20, 20, 128, 151936, layers=40, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-7b": _row(4096, 11008, 32, 32, 128, 151936, layers=32, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-14b": _row(5120, 13696, 40, 40, 128, 152064, layers=40, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-32b": _row(5120, 27392, 40, 8, 128, 152064, layers=64, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-72b": _row(8192, 24576, 64, 64, 128, 152064, layers=80, max_positions=1 << 15, qkv_bias=True),
        "qwen1.5-110b": _row(8192, 49152, 64, 8, 128, 152064, layers=80, max_positions=1 << 15, qkv_bias=True),
        "qwen2.5-7b": _row(3584, 18944, 28, 4, 128, 152064, layers=28, max_positions=1 << 15, qkv_bias=True),
        "qwen2.5-72b": _row(8192, 29568, 64, 8, 128, 152064, layers=80, max_positions=1 << 15, qkv_bias=True),
        "qwen3-0.6b": _row(1024, 3072, 16, 8, 128, 151936, layers=28, max_positions=40960, qk_norm=True, tied=True),
        "qwen3-8b": _row(4096, 12288, 32, 8, 128, 151936, layers=36, max_positions=40960, qk_norm=True),
        "qwen3-32b": _row(5120, 25600, 64, 8, 128, 151936, layers=64, max_positions=40960, qk_norm=True),
        # The practice model of "How to Scale Your Model", chapter Inference, and the mixture of it.
        "practice-18b": _row(4096, 16384, 32, 8, 256, 32128, layers=64, tied=True),
        "practice-moe": _row(4096, 16384, 32, 8, 256, 32128, layers=64, tied=True, experts=16, active_experts=2),
    }
)
"""Shapes of known models by name."""
