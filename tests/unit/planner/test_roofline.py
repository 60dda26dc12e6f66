"""The arithmetic of forward passes against numbers counted another way, and times against published numbers."""

import math

import pytest

from baton.planner.hardware import HARDWARE
from baton.planner.roofline import (
    StepTime,
    attention_intensity,
    critical_batch,
    decode_bytes,
    decode_flops,
    decode_time,
    experts_read,
    feasible_points,
    kv_read_bytes,
    pareto,
    prefill_flops,
    prefill_time,
    speculative_time,
    speculative_tokens,
    step_time,
    weights_read,
    what_if,
)
from baton.planner.shape import SHAPES, ModelShape

LLAMA_8B = ModelShape(4096, 14336, 32, 8, 128, 128256, (None,) * 32)
SMALL = ModelShape(8, 16, 4, 2, 4, 100, (None, 3))


def _counted(shape: ModelShape, tokens: int, past: int) -> int:
    """Attention's operations, pair by pair; in the last layer those of the last token."""
    last = len(shape.windows) - 1
    pairs = sum(
        1
        for layer, window in enumerate(shape.windows)
        for query in range(past + tokens - 1 if layer == last else past, past + tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    return pairs * 4 * shape.num_heads * shape.head_dim


def test_llama_has_eight_billion_weights() -> None:
    assert LLAMA_8B.step_weights + LLAMA_8B.lm_head_weights == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_8B.kv_token_bytes(2) == 131072


@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (2, 0), (7, 0), (5, 2), (5, 9), (1, 2), (1, 3)])
def test_prefill_counts_only_what_the_mask_leaves(tokens: int, past: int) -> None:
    kv_only = 8 * 2 * 2 * 4
    linear = 2 * SMALL.layer_weights * (tokens + 1) + 2 * kv_only * (tokens - 1) + 2 * SMALL.lm_head_weights
    assert prefill_flops(SMALL, tokens, past) == linear + _counted(SMALL, tokens, past)


def test_chunks_add_up_to_the_whole() -> None:
    parts = [(0, 300), (300, 500), (800, 1248)]
    assert sum(prefill_flops(LLAMA_8B, tokens, past, 0) for past, tokens in parts) == prefill_flops(
        LLAMA_8B, 2048, 0, 0
    )


def test_a_step_is_one_token_of_each_sequence() -> None:
    contexts = [1, 3, 4, 9]
    assert decode_flops(SMALL, 4, contexts) == sum(prefill_flops(SMALL, 1, context - 1) for context in contexts)
    assert decode_flops(SMALL, 4, 5) == decode_flops(SMALL, 4, [5] * 4)
    with pytest.raises(ValueError, match="3 contexts for a batch of 4"):
        decode_flops(SMALL, 4, [1, 2, 3])


def test_a_step_reads_weights_once_and_each_context_once() -> None:
    token = SMALL.kv_token_bytes(2)
    layer = token // SMALL.num_layers
    assert decode_bytes(SMALL, 2, [2, 7], 1000, token) == 1000 + (2 + 2) * layer + (7 + 3) * layer + 2 * token
    weights = LLAMA_8B.step_weights * 2
    assert decode_bytes(LLAMA_8B, 64, 1024, weights, 131072) == weights + 64 * 1025 * 131072


@pytest.mark.parametrize(
    ("kv_bytes", "batch", "ms", "tokens_per_s"),
    [
        (6.7e9, 1, 4.98, 200.61),
        (6.7e9, 8, 12.13, 659.30),
        (6.7e9, 16, 20.30, 787.99),
        (6.7e9, 32, 36.65, 873.21),
        (6.7e9, 64, 69.33, 923.13),
        (6.7e9, 240, 249.09, 963.53),
        (1.34e9, 1, 4.17, 239.94),
        (1.34e9, 8, 5.60, 1429.19),
        (1.34e9, 16, 7.23, 2212.48),
        (1.34e9, 32, 10.50, 3047.62),
        (1.34e9, 64, 17.04, 3756.62),
        (1.34e9, 240, 52.99, 4529.34),
    ],
)
def test_steps_of_llama_2_13b_are_those_of_the_book(
    kv_bytes: float, batch: int, ms: float, tokens_per_s: float
) -> None:
    """B KV / W + max(2 B P / C, bytes / W), 8 x v5e, 26.0 GB of weights; chapter Inference, "Modeling throughput"."""
    step = step_time(batch, 13e9, 26e9, kv_bytes, 8 * 1.97e14, 8 * 8.2e11)
    assert round(1e3 * step.seconds, 2) == ms
    assert round(batch / step.seconds, 2) == tokens_per_s


@pytest.mark.parametrize(("batch", "ms"), [(4, 2.5677), (256, 21.055)])
def test_the_pop_quiz_of_the_book(batch: int, ms: float) -> None:
    """The same formula: 30e9 int8 weights, bf16 arithmetic, 100 kB a token, 8,192 tokens, 16 x v5e of 8.1e11 B/s."""
    step = step_time(batch, 30e9, 30e9, 100e3 * 8192, 16 * 1.97e14, 16 * 8.1e11)
    assert 1e3 * step.seconds == pytest.approx(ms, rel=2e-5)


@pytest.mark.parametrize(
    ("flops", "bandwidth", "bits", "experts", "batch"),
    [
        (1.97e14, 8.2e11, 16, 1, 240.24),
        (1.97e14, 8.2e11, 8, 1, 120.12),
        (1.97e14, 8.1e11, 8, 1, 121.60),
        (1.97e14, 8.2e11, 16, 16 / 2, 1921.95),
        (240, 1, 16, 16 / 2, 1920),
    ],
    ids=["bf16", "int8 weights", "int8 weights, 8.1e11", "16 experts of 2", "the same with 240"],
)
def test_critical_batches(flops: float, bandwidth: float, bits: int, experts: float, batch: float) -> None:
    """C / W * bits / 16 * E/k; chapter Inference, "Linear operations" and questions 4 and 5."""
    assert critical_batch(flops, bandwidth, bits, experts) == pytest.approx(batch, abs=5e-3)


def test_loading_the_practice_model() -> None:
    """P / W in int8, 16 x v5e of 8.1e11 B/s; chapter Inference, question 3."""
    step = step_time(1, 18_385_207_296, 18_385_207_296, 0, math.inf, 16 * 8.1e11)
    assert 1e3 * step.seconds == pytest.approx(1.4186, abs=5e-5)
    assert SHAPES["practice-18b"].step_weights == 18_385_207_296


@pytest.mark.parametrize(
    ("parameters", "tokens_per_s"),
    [(463_937_536, 1086), (1_525_563_392, 330), (3_561_205_760, 141.5), (7_098_728_448, 71.0)],
    ids=["0.5B", "1.8B", "4B", "7B"],
)
def test_decode_ceilings_of_a_4090(parameters: int, tokens_per_s: float) -> None:
    """1 / (2 P / W): one sequence without KV; 1.008e12 B/s (Ada white paper), activated parameters of Qwen1.5."""
    card = HARDWARE["4090"]
    step = step_time(1, parameters, 2 * parameters, 0, card.flops_per_s(16), card.bytes_per_s)
    assert step.bound == "weights"
    assert 1 / step.seconds == pytest.approx(tokens_per_s, abs=0.5 if tokens_per_s > 200 else 0.05)


def test_speculation() -> None:
    """(1 - a^(k+1)) / (1 - a), Leviathan et al., equation 1."""
    assert speculative_tokens(0.8, 4) == pytest.approx(3.3616)
    assert speculative_tokens(1, 4) == 5
    assert speculative_tokens(0, 4) == 1
    assert speculative_time(StepTime(1, 2, 3), 4, 7) == StepTime(1, 10, 7)


def test_drafts_of_a_mixture_read_more_experts() -> None:
    """5 tokens use 7.79 of 16 experts, E (1 - (1 - k/E)^5): 63.25 ms a step, and no gain for one sequence."""
    plain, *others = what_if(SHAPES["practice-moe"], HARDWARE["h100"], 1, 128)
    (drafted,) = (each for each in others if "drafts" in each.name)
    assert 1e3 * plain.seconds == pytest.approx(18.69, abs=5e-3)
    assert 1e3 * drafted.seconds == pytest.approx(63.25, abs=5e-3)
    assert drafted.tokens_per_s == pytest.approx(53.1, abs=0.05)


def test_only_ranks_that_divide_the_heads_share_a_layer() -> None:
    names = [each.name for each in what_if(SHAPES["qwen2.5-7b"], HARDWARE["h100"], 8, 8192)]
    assert [name for name in names if "devices" in name] == ["2 devices share each layer", "4 devices share each layer"]


def test_attention_intensity_is_the_group() -> None:
    """2 T N / (K bytes), and the same from the counts of a step: attention's operations over the bytes of KV."""
    assert attention_intensity(LLAMA_8B, 16) == 4
    assert attention_intensity(LLAMA_8B, 8, tokens=10) == 80
    flops = decode_flops(LLAMA_8B, 1, 1000) - 2 * LLAMA_8B.step_weights
    assert attention_intensity(LLAMA_8B, 16) == flops / kv_read_bytes(LLAMA_8B, 1000, 16)


def test_experts_that_a_step_reads() -> None:
    """E (1 - (1 - k/E)^B): k for one token, nearly all for many."""
    mixture = SHAPES["practice-moe"]
    assert experts_read(16, 2, 1) == pytest.approx(2)
    assert weights_read(mixture, 1) == pytest.approx(mixture.step_weights)
    assert weights_read(mixture, 1000) == pytest.approx(211_658_735_616)
    assert weights_read(LLAMA_8B, 1000) == LLAMA_8B.step_weights


def test_a_decode_step_of_a_shape() -> None:
    card = HARDWARE["h100"]
    step = decode_time(LLAMA_8B, card, 4, 1024, weight_bits=8, kv_bits=8, devices=2)
    assert step.kv == pytest.approx(4 * 1024 * 65536 / 6.7e12)
    assert step.weights == pytest.approx(LLAMA_8B.step_weights / 6.7e12)
    assert step.compute == pytest.approx(8 * LLAMA_8B.step_weights / 1978.8e12)
    assert step.seconds == step.kv + step.weights
    assert decode_time(LLAMA_8B, card, 1, 1 << 20).bound == "KV"
    assert decode_time(LLAMA_8B, card, 400, 1).bound == "compute"


def test_more_devices_than_kv_heads_read_them_several_times() -> None:
    card = HARDWARE["h100"]
    at = {tp: decode_time(LLAMA_8B, card, 4, 1024, devices=tp) for tp in (8, 16, 32)}
    assert at[8].kv == at[16].kv == at[32].kv == pytest.approx(4 * 1024 * 131_072 / 8 / 3.35e12)
    assert at[32].weights == at[8].weights / 4


def test_windows_bound_the_kv_that_a_step_reads() -> None:
    assert kv_read_bytes(SMALL, 10, 16) == (10 + 3) * 2 * 2 * 4 * 2


def test_short_prompts_wait_for_weights_and_long_ones_for_arithmetic() -> None:
    card = HARDWARE["h100"]
    assert prefill_time(LLAMA_8B, card, 1) == pytest.approx(2 * LLAMA_8B.step_weights / 3.35e12)
    assert prefill_time(LLAMA_8B, card, 8192) == pytest.approx(prefill_flops(LLAMA_8B, 8192) / 989.4e12)


def test_points_fit_and_count_all_reduces_and_devices() -> None:
    """Step of `decode_time` and two all-reduces of 2 us a layer; the throughput is that of one of the devices."""
    card = HARDWARE["h100"]
    found = feasible_points(SHAPES["llama-3-70b"], lambda rows: card, (1, 64), 8192)
    assert [(each.tp, each.batch) for each in found] == [(2, 1), (4, 1), (4, 64), (8, 1), (8, 64)]
    step = decode_time(SHAPES["llama-3-70b"], card, 1, 8192, devices=4).seconds + 80 * 4e-6
    assert found[1].seconds == pytest.approx(step)
    assert found[1].tokens_per_s == pytest.approx(1 / step / 4)


def test_the_pareto_front_leaves_out_what_is_slower_and_serves_less() -> None:
    assert pareto([(1, 10), (2, 30), (3, 20), (4, 40)]) == [True, True, False, True]
    assert pareto([(1, 10), (1, 10)]) == [True, True]
