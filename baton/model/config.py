"""A model's configuration, read once from the checkpoint's `config.json`.

`ModelConfig.from_pretrained` reads all names that versions of transformers have given to fields (`rope_theta` and
`rope_scaling` or `rope_parameters`, `type` or `rope_type`, `torch_dtype` or `dtype`). It checks each value and derives
others, so that no other code reads the JSON. It refuses values, by field and value, for which the model would not
compute exactly what transformers computes.

No torch: the router reads vocabulary, length and end-of-sequence ids through this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest, ModelError
from baton.model.families import FAMILIES, AttentionKind, Bias, Family, MlpKind, Window
from baton.model.rope import ROPE_KINDS, RopeConfig, yarn_attention_factor
from baton.request import PARAMETERS, SamplingParams

_ACTIVATIONS = ("silu", "swish")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class LayerConfig:
    """One layer. A token attends to itself and the `window - 1` tokens before it, or to all if `window` is None."""

    attention: AttentionKind
    window: int | None
    mlp: MlpKind


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer in numbers.

    `max_position_embeddings` counts positions after RoPE's scaling. `eos_token_ids` are those of generation_config.json
    if it has any, as in `generate`. `dtype` is the checkpoint's own ("bfloat16"), or None if it has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def family(self) -> Family:
        """The facts that the architecture's name implies."""
        return FAMILIES[self.architecture]

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, or the file of a checkpoint directory (and `generation_config.json` beside it, if there).

        Raises ModelError with the file, or with the field and its value.
        """
        file = Path(path) if Path(path).is_file() else Path(path) / "config.json"
        return cls.from_dict(_read_json(file), _generation_config(file.parent))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read parsed JSON objects. Raises ModelError with the field and its value."""
        family = _family(raw)
        fields = _Fields({**family.defaults, **raw})
        _refuse_unsupported(fields)
        windows = _windows(family, fields, fields.positive("num_hidden_layers"))
        num_heads = fields.positive("num_attention_heads")
        num_kv_heads = fields.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        eos = (generation or {}).get("eos_token_id")
        rope = _rope(fields)
        return cls(
            architecture=family.architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.positive("hidden_size"),
            intermediate_size=fields.positive("intermediate_size"),
            layers=tuple(LayerConfig(family.attention, window, family.mlp) for window in windows),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=rope.max_position(fields.positive("max_position_embeddings")),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=_bias(family.qkv_bias, fields, "attention_bias"),
            o_bias=_bias(family.o_bias, fields, "attention_bias"),
            mlp_bias=_bias(family.mlp_bias, fields, "mlp_bias"),
            qk_norm=family.qk_norm,
            eos_token_ids=_token_ids("eos_token_id", fields.get("eos_token_id") if eos is None else eos),
            bos_token_id=(_token_ids("bos_token_id", fields.get("bos_token_id")) or (None,))[0],
            dtype=_dtype(fields),
        )


_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling parameters by their names in generation_config.json, as in vLLM."""


def default_sampling(directory: Path) -> dict[str, Any]:
    """Values of sampling parameters in the generation_config.json of a checkpoint; none without that file.

    Raises ModelError with a value that can't be used.
    """
    raw = _generation_config(directory)
    found = {ours: raw[theirs] for theirs, ours in _SAMPLING.items() if raw.get(theirs) is not None}
    if found.get("top_k") == -1:
        # Another way to write "all".
        found["top_k"] = 0
    for name, value in found.items():
        number = type(value) is int or (type(value) is float and PARAMETERS[name].kind == "float")
        try:
            if not number:
                raise InvalidRequest(name, "must be a number", value)
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            raise ModelError(f"generation_config.json: {error} (--generation-config none ignores the file)") from None
    return found


class _Fields:
    """config.json with typed, checked look-ups, which raise ModelError. A null counts as absent, as in transformers."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def get(self, name: str) -> Any:
        return self._raw.get(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number. Raises ModelError if it is absent and has no default, or is not a positive number."""
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json lacks {self._prefix}{name}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{self._prefix}{name} must be a positive number, not {value!r}")
        return float(value)

    def natural(self, name: str) -> int:
        """An integer of 0 or more. Raises ModelError for all else."""
        return 0 if self._raw.get(name) == 0 else self.positive(name)

    def positive(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError if it is absent and has no default, or is not a positive integer."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self._prefix}{name} must be an integer, not {value!r}")
        return int(value)

    def flag(self, name: str) -> bool:
        """A boolean; False if it is absent. Raises ModelError if it is neither true nor false."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{name} must be true or false, not {value!r}")
        return bool(value)


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures") or [
        family.architecture for family in FAMILIES.values() if family.model_type == raw.get("model_type")
    ]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    seen = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    raise ModelError(f"unsupported architecture {seen}; supported: {', '.join(FAMILIES)}")


def _refuse_unsupported(fields: _Fields) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ModelError(f"unsupported hidden_act {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"unsupported quantization_config: quant_method {method!r}; supported: none")


def _head_dim(fields: _Fields, num_heads: int) -> int:
    hidden_size = fields.positive("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"no head_dim, and hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embeddings, not {head_dim}")
    return head_dim


def _bias(rule: Bias, fields: _Fields, name: str) -> bool:
    return fields.flag(name) if rule is Bias.CONFIG else rule is Bias.ALWAYS


def _rope(fields: _Fields) -> RopeConfig:
    """RoPE from `rope_scaling` or `rope_parameters`, with the precedence of transformers.

    A non-empty `rope_scaling` replaces `rope_parameters`. A `rope_theta` in either replaces the one at top level. An
    `original_max_position_embeddings` at top level replaces the one in either.
    """
    raw = _one_rope(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    inner = _Fields(raw, "rope_parameters.")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_KINDS:
        # Its angles at every position change with the length of the whole sequence.
        why = ", which no cached KV can follow" if kind == "dynamic" else ""
        raise ModelError(f"unsupported rope_type {kind!r}{why}; supported: {', '.join(ROPE_KINDS)}")
    for name, source in (("partial_rotary_factor", raw), ("partial_rotary_factor", fields)):
        value = source.get(name)
        if value is not None and value != 1:
            raise ModelError(f"unsupported {name} {value!r}; supported: 1.0")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, inner.number("factor"))
    length, positions = fields.get("original_max_position_embeddings"), fields.positive("max_position_embeddings")
    length = (fields if length is not None else inner).positive("original_max_position_embeddings", positions)
    if kind == "yarn":
        return _yarn(raw, inner, theta, length, positions)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"rope_parameters.high_freq_factor {high} must exceed low_freq_factor {low}")
    return RopeConfig(theta, kind, inner.number("factor"), low, high, length)


def _yarn(raw: dict[str, Any], inner: _Fields, theta: float, length: int, positions: int) -> RopeConfig:
    factor = inner.number("factor", positions / length)
    if theta <= 1.0:
        raise ModelError(f"rope_theta must exceed 1 for YaRN, not {theta}")
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast <= slow:
        raise ModelError(f"rope_parameters.beta_fast {fast} must exceed beta_slow {slow}")
    scales = [inner.number(name) if raw.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=length,
        beta_fast=fast,
        beta_slow=slow,
        truncate=raw.get("truncate") is None or inner.flag("truncate"),
        attention_factor=inner.number("attention_factor", yarn_attention_factor(factor, *scales)),
    )


def _one_rope(raw: Any) -> dict[str, Any]:
    """Flatten parameters by layer type. Raises ModelError if they differ between layer types."""
    if not isinstance(raw, dict):
        raise ModelError(f"rope_parameters must be an object, not {raw!r}")
    nested = [raw[name] for name in _LAYER_TYPES if raw.get(name) is not None]
    if not nested:
        return raw
    if any(not isinstance(entry, dict) or entry != nested[0] for entry in nested):
        raise ModelError(f"unsupported rope_parameters that differ between layer types: {raw!r}")
    return dict(nested[0])


def _windows(family: Family, fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    if family.window is Window.NONE:
        return (None,) * num_layers
    every = family.window is Window.ALL_LAYERS
    in_use = fields.get("sliding_window") is not None and (every or fields.flag("use_sliding_window"))
    window = fields.positive("sliding_window") if in_use else None
    first = 0 if every else fields.natural("max_window_layers")
    types = fields.get("layer_types")
    if types is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"layer_types must list {num_layers} layers, not {types!r}")
    unknown = [name for name in types if name not in _LAYER_TYPES]
    if unknown:
        raise ModelError(f"unsupported layer_types {unknown[0]!r}; supported: {', '.join(_LAYER_TYPES)}")
    if "sliding_attention" in types and window is None:
        raise ModelError("layer_types names sliding_attention, but no sliding_window is in use")
    if every and window is not None and "full_attention" in types:
        raise ModelError(f"unsupported layer_types 'full_attention' for {family.architecture} with a sliding_window")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in values):
        raise ModelError(f"{name} must be a token id or a list of them, not {value!r}")
    return tuple(values)


def _dtype(fields: _Fields) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")
