"""Counts of parameters, against published and hand-computed numbers."""

import pytest

from baton.planner.shape import SHAPES, ModelShape

BY_FORMULA = [
    # Qwen1.5: V, H, layers L, MLP I, query heads a KV head g, activated parameters, KV elements a token
    ("qwen1.5-0.5b", 151936, 1024, 24, 2816, 1, 463_937_536, 49_152),
    ("qwen1.5-1.8b", 151936, 2048, 24, 5504, 1, 1_525_563_392, 98_304),
    ("qwen1.5-4b", 151936, 2560, 40, 6912, 1, 3_561_205_760, 204_800),
    ("qwen1.5-7b", 151936, 4096, 32, 11008, 1, 7_098_728_448, 262_144),
    ("qwen1.5-14b", 152064, 5120, 40, 13696, 1, 13_388_308_480, 409_600),
    ("qwen1.5-32b", 152064, 5120, 64, 27392, 5, 31_732_989_952, 131_072),
    ("qwen1.5-72b", 152064, 8192, 80, 24576, 1, 71_040_892_928, 1_310_720),
    ("qwen1.5-110b", 152064, 8192, 80, 49152, 8, 109_962_887_168, 163_840),
]


@pytest.mark.parametrize(("name", "v", "h", "layers", "inner", "g", "activated", "kv"), BY_FORMULA)
def test_qwen_by_the_published_formula(
    name: str, v: int, h: int, layers: int, inner: int, g: int, activated: int, kv: int
) -> None:
    """L [(H+1)H + 2 floor((H+1)H/g) + H^2 + 3HI] + HV, embedding and norms not counted; KV 2 L floor(H/g).

    Source: calculators of the limits of inference, for Qwen1.5's config.json.
    """
    shape = SHAPES[name]
    assert layers * ((h + 1) * h + 2 * ((h + 1) * h // g) + h * h + 3 * h * inner) + h * v == activated
    assert shape.activated == activated
    assert shape.kv_token_elements == 2 * layers * (h // g) == kv


def test_llama_has_eight_billion_parameters() -> None:
    """All tensors: 2VH + L(2H(q + kv) + 3HI + 2H) + H; source: the checkpoint's index on the hub."""
    assert SHAPES["llama-3.1-8b"].parameters == 8_030_261_248
    assert SHAPES["llama-3.1-8b"].kv_token_bytes(2) == 131_072


def test_the_practice_model_and_its_mixture() -> None:
    """P = L D (3F + 2H(N + K)) + V D, with 3F of each expert; source: "How to Scale Your Model", chapter Inference."""
    dense, mixture = SHAPES["practice-18b"], SHAPES["practice-moe"]
    assert dense.matrix_weights == dense.step_weights == 18_385_207_296
    assert dense.kv_token_bytes(1) == 262_144
    assert mixture.matrix_weights == 211_658_735_616
    assert mixture.step_weights == 31_270_109_184


def test_biases_and_norms_of_every_kind_count() -> None:
    """By hand, for 2 layers: q, k, v, o of 4 heads and 2 KV heads of 4; gate, up, down; norms and two of 4 for QK."""
    shape = ModelShape(
        8,
        16,
        4,
        2,
        4,
        100,
        (None, 3),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
        experts=3,
        active_experts=2,
    )
    attention, mlp = 8 * 16 + 2 * 8 * 8 + 16 * 8, 3 * 8 * 16
    biases = 32 + 8
    assert shape.biases(3) == biases + 3 * (16 + 16 + 8)
    assert shape.layer_norms == 16 + 8
    assert shape.parameters == 2 * (attention + 3 * mlp + biases + 3 * 40 + 24) + 2 * 100 * 8 + 8
    assert shape.activated == 2 * (attention + 2 * mlp + biases + 2 * 40) + 100 * 8
