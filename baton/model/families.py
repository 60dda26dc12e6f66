"""Model families as data.

A family has the facts that follow from an architecture's name and are not in `config.json`: the linears with a bias,
the normalisation of queries and keys, the layers with a sliding window, the defaults of omitted fields, and the names
of tensors in checkpoints. One decoder (`baton.model.decoder`) computes all families. So a new family is a new entry
here, and at most one new fact or one new kind of attention or MLP.

No torch: the router reads configs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any


class AttentionKind(StrEnum):
    """A layer's kind of attention."""

    GROUPED = "grouped"  # keys and values of each KV head, which a group of query heads shares


class MlpKind(StrEnum):
    """A layer's kind of MLP."""

    GATED = "gated"  # SwiGLU


class Bias(Enum):
    """The rule for the bias of a block's linears."""

    NEVER = "never"
    ALWAYS = "always"
    CONFIG = "config"  # the block's own field of config.json decides


class Window(Enum):
    """The meaning of `sliding_window` in config.json."""

    NONE = "none"  # ignored: every layer attends to its whole context
    ALL_LAYERS = "all"  # every layer has a sliding window
    BY_LAYER = "by layer"  # `layer_types`, else `use_sliding_window` from layer `max_window_layers` on


@dataclass(frozen=True)
class TensorNames:
    """Names of modules in checkpoints. A tensor is named `<module>.<tensor>`, for example "lm_head.weight".

    Layer names are relative to `layer`, with the layer's index filled in.
    """

    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{index}."
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    # Buffers in old checkpoints; they are computed here instead.
    ignorable: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Family:
    """One architecture.

    `defaults` are transformers' values of fields that config.json omits, if they differ from the common ones
    (`num_key_value_heads = num_attention_heads`, no window, and so on).
    """

    architecture: str
    model_type: str
    attention: AttentionKind = AttentionKind.GROUPED
    mlp: MlpKind = MlpKind.GATED
    qkv_bias: Bias = Bias.NEVER
    o_bias: Bias = Bias.NEVER
    mlp_bias: Bias = Bias.NEVER
    qk_norm: bool = False
    window: Window = Window.NONE
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: TensorNames = TensorNames()


_FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        qkv_bias=Bias.CONFIG,
        o_bias=Bias.CONFIG,
        mlp_bias=Bias.CONFIG,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        window=Window.ALL_LAYERS,
        defaults={"sliding_window": 4096},
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        qkv_bias=Bias.ALWAYS,
        window=Window.BY_LAYER,
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        qkv_bias=Bias.CONFIG,
        o_bias=Bias.CONFIG,
        qk_norm=True,
        window=Window.BY_LAYER,
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _FAMILIES})
"""Supported families by architecture name, as in config.json's `architectures`."""
