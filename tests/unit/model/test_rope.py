"""Rotary angles: their kinds against transformers, and their exactness far out against 50 digits."""

import ctypes
import math
from typing import Any

import mpmath
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.model.config import ModelConfig
from baton.model.layers import Rotary
from baton.model.rope import RopeConfig
from baton.native import abi
from baton.native.packed import TYPES
from tests.kernels import LIBRARY, needs_native

CPU = torch.device("cpu")
FAR = (0, 1, 4_097, 2**20 + 1, 2**24 - 1, 99_999_999)
"""Positions. Float32 angles are off by 0.03 rad at the fourth."""

EXACT = 1.5e-7
"""Rounding to float32 (6e-8), and an angle of 1e8 rad whose factors are float64 (4e-8)."""

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "attention_factor": 1.25, "truncate": False},
}


def configs(parameters: dict[str, Any], theta: float) -> tuple[ModelConfig, transformers.LlamaConfig]:
    whole = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=2048, rope_parameters={"rope_theta": theta, **parameters}
    )
    return ModelConfig.from_dict({**whole.to_dict(), "architectures": ["LlamaForCausalLM"]}), whole


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_frequencies_and_factors_are_transformers(parameters: dict[str, Any], theta: float) -> None:
    config, theirs = configs(parameters, theta)
    if config.rope.kind == "default":
        expected, factor = 1.0 / theta ** (torch.arange(0, 64, 2) / 64), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[config.rope.kind](theirs, CPU)
    found = torch.tensor(config.rope.inverse_frequencies(64), dtype=torch.float64)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0.0)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("kind", "factor"), [("default", 1.0), ("linear", 3.0)])
def test_frequencies_are_exact_in_float64(kind: str, factor: float) -> None:
    with mpmath.workdps(50):
        expected = [mpmath.mpf(10_000) ** (-mpmath.mpf(2 * pair) / 128) / mpmath.mpf(factor) for pair in range(64)]
        found = RopeConfig(10_000.0, kind, factor).inverse_frequencies(128)
        assert all(abs(one / other - 1) < 3e-16 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", **LLAMA3}, 2048),
    ],
)
def test_the_models_length_counts_scaled_positions(parameters: dict[str, Any], length: int) -> None:
    raw = {**configs({"rope_type": "default"}, 1e4)[1].to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert (
        ModelConfig.from_dict({**raw, "rope_parameters": {"rope_theta": 1e4, **parameters}}).max_position_embeddings
        == length
    )


def waves(rope: RopeConfig, head_dim: int, position: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each pair of dimensions, float64 `[head_dim / 2]`, by 50 digits."""
    with mpmath.workdps(50):
        angles = [position * mpmath.mpf(frequency) for frequency in rope.inverse_frequencies(head_dim)]
        both = [[rope.attention_factor * float(wave(angle)) for angle in angles] for wave in (mpmath.cos, mpmath.sin)]
    cos, sin = torch.tensor(both, dtype=torch.float64)
    return cos, sin


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_angles_are_exact_to_position_100_million(parameters: dict[str, Any], theta: float) -> None:
    rope = configs(parameters, theta)[0].rope
    cos, sin = Rotary(rope, 64, CPU).angles(torch.tensor(FAR))
    for index, position in enumerate(FAR):
        wanted_cos, wanted_sin = waves(rope, 64, position)
        assert (cos[index, 0, :32].double() - wanted_cos).abs().max() < EXACT * rope.attention_factor
        assert (sin[index, 0, 32:].double() - wanted_sin).abs().max() < EXACT * rope.attention_factor


@needs_native
@pytest.mark.parametrize("position", FAR)
def test_native_angles_are_exact_to_position_100_million(position: int) -> None:
    """A key as it lies in its page. The token sees only itself, and all of its page table is one page."""
    rope, size, page_size = configs(PARAMETERS["yarn"], 1e6)[0].rope, 8, 1 << 20
    frequencies = torch.tensor(rope.inverse_frequencies(size), dtype=torch.float64)
    layer = (abi.BatonLayer * 1)(abi.BatonLayer(window=1))
    model = abi.BatonModel(
        1, 1, 1, 1, 1, 1, size, TYPES[torch.float32], 1e-6,
        ctypes.cast(layer, ctypes.c_void_p), None, None, None, frequencies.data_ptr(), rope.attention_factor,
    )  # fmt: skip
    pages = torch.zeros(2, page_size, size)
    keys, values = ((ctypes.c_void_p * 1)(part.data_ptr()) for part in pages)
    kv = abi.BatonKv(
        ctypes.cast(keys, ctypes.c_void_p), ctypes.cast(values, ctypes.c_void_p), 1, page_size, TYPES[torch.float32]
    )
    tables = torch.zeros(1, position // page_size + 1, dtype=torch.int32)
    one = ctypes.c_int32 * 1
    batch = abi.BatonBatch(1, one(1), one(position + 1), tables.data_ptr(), tables.shape[1], tables.stride(0))
    qkv, out = torch.randn(3, size, generator=torch.Generator().manual_seed(1)), torch.empty(size)
    key = qkv[1].double()
    workspace = LIBRARY.baton_native_workspace_new()
    status = LIBRARY.baton_native_attend(model, kv, batch, 0, 1, qkv.data_ptr(), out.data_ptr(), workspace)
    LIBRARY.baton_native_workspace_free(workspace)
    assert status == 0
    cos, sin = waves(rope, size, position)
    low, high = key.split(size // 2)
    wanted = torch.cat((low * cos - high * sin, high * cos + low * sin))
    assert (pages[0, position % page_size].double() - wanted).abs().max() < 4 * EXACT * math.ceil(key.abs().max())
