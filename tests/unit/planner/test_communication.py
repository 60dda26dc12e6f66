"""Degrees, bytes and seconds of communication, against published numbers and against sums counted another way."""

import re
from itertools import pairwise

import pytest

from baton.planner import communication
from baton.planner.communication import Degrees, Load
from baton.planner.hardware import HARDWARE
from baton.planner.shape import SHAPES

LLAMA_70B = SHAPES["llama-3-70b"]
GIB = 1 << 30


def test_the_sharding_bound_of_the_book() -> None:
    """Y < F / (B beta), chapter Inference, "Sharding": F 16,384, B 32, beta 8."""
    assert communication.sharding_bound(16384, 32, 8) == 64


def test_at_the_sharding_bound_a_link_takes_as_long_as_the_memory() -> None:
    hidden, inner, tokens, memory, link = 4096, 16384, 32, 8e11, 1e11
    degree = communication.sharding_bound(inner, tokens, memory / link)
    assert 2 * hidden * inner / degree / memory == pytest.approx(2 * tokens * hidden / link)


def test_an_all_reduce_of_a_layer() -> None:
    """B D bytes of an element, 2 (N-1)/N of them sent; a layer has two."""
    size = communication.activation_bytes(LLAMA_70B, 16)
    assert size == 16 * 8192 * 2
    assert communication.all_reduce_bytes(size, 4) == 1.5 * size
    assert communication.all_reduce_bytes(size, 1) == 0
    h100 = HARDWARE["h100"]
    assert communication.layer_seconds(LLAMA_70B, 16, 1, h100) == 0
    # 393 kB at 450 GB/s are 0.9 us; two hops of 1 us are longer.
    assert communication.layer_seconds(LLAMA_70B, 16, 4, h100) == pytest.approx(2 * 2e-6)
    assert communication.layer_seconds(LLAMA_70B, 4096, 4, h100) == pytest.approx(2 * 1.5 * 4096 * 16384 / 450e9)


def test_a_ring_has_more_hops_than_a_switch() -> None:
    assert communication.all_reduce_seconds(1, 8, HARDWARE["v5e"]) == pytest.approx(8e-6)
    assert communication.all_reduce_seconds(1, 8, HARDWARE["h100"]) == pytest.approx(2e-6)


@pytest.mark.parametrize(("size", "bound"), [(359_999, True), (360_001, False), (16 * 8192, True)])
def test_small_collectives_are_bound_by_latency(size: int, bound: bool) -> None:
    """bytes / n / W < 1 us, appendix C: 8 devices, 4.5e10 B/s, hence 360 kB; 16 x 8,192 in int8 are below."""
    assert communication.is_latency_bound(size, 8, 4.5e10) == bound


@pytest.mark.parametrize(("axes", "a", "b"), [(2, 1, 1), (3, 1, 2), (1, 1, 1)])
def test_two_dimensions_cross_one_where_it_is_said(axes: int, a: int, b: int) -> None:
    """The closed form against the sum of the three collectives, with the best X of a fine grid."""
    tokens, hidden, inner, link = 64, 4096, 16384, 9e10
    crossing = communication.weight_stationary_crossing(hidden, inner, (a, b), axes)
    for devices in (round(crossing) - 4, round(crossing) + 4):

        def summed(x: float, devices: int = devices) -> float:
            y = devices / x
            gather = 2 * tokens * hidden / x / (b * link)
            return 2 * gather + 4 * tokens * inner / y / (a * link)

        best = min(summed(1 + step / 1000) for step in range(15_000))
        closed = communication.weight_stationary_2d_seconds(tokens, hidden, inner, devices, link, (a, b))
        assert closed == pytest.approx(best, rel=1e-5)
        one = communication.weight_stationary_1d_seconds(tokens, hidden, link, axes)
        assert (closed < one) == (devices > crossing)


@pytest.mark.parametrize(("axes", "total", "devices"), [((1, 2), 3, 72), ((1, 1), 2, 64), ((1, 1), 1, 16)])
def test_the_crossing_for_an_mlp_of_four_times_the_hidden_size(axes: tuple[int, int], total: int, devices: int) -> None:
    """4 A^2 F / (a b D). The book's own formula, 32 F/D (3/4)^2 with F/D = 4, is 72 too; it prints 81."""
    assert communication.weight_stationary_crossing(4096, 16384, axes, total) == devices
    assert 32 * 4 * (3 / 4) ** 2 == 72


def test_pipelines_wait_less_with_more_micro_batches() -> None:
    """m / (m + p - 1), GPipe."""
    assert communication.pipeline_utilisation(1, 4) == 0.25
    assert communication.pipeline_utilisation(12, 4) == 0.8
    rates = [communication.pipeline_utilisation(count, 4) for count in range(1, 50)]
    assert all(one < two for one, two in pairwise(rates))


def test_stages_beyond_a_group_are_joined_by_the_slow_link() -> None:
    h100, size = HARDWARE["h100"], communication.activation_bytes(LLAMA_70B, 1024)
    within = communication.step_seconds(LLAMA_70B, 1024, Degrees(4, 2), h100)
    beyond = communication.step_seconds(LLAMA_70B, 1024, Degrees(8, 2), h100)
    reduces = 80 * communication.layer_seconds(LLAMA_70B, 1024, 4, h100)
    assert within == pytest.approx(reduces + 1e-6 + size / 450e9)
    assert beyond == pytest.approx(80 * communication.layer_seconds(LLAMA_70B, 1024, 8, h100) + 1e-6 + size / 25e9)


def load(gib: float) -> Load:
    """KV of so many GiB in 20 sequences, and weights of 16 bits, which have 131.5 GiB."""
    return Load(20, int(gib * GIB) // LLAMA_70B.kv_token_bytes(2))


@pytest.mark.parametrize(
    ("model", "hardware", "gib", "degrees"),
    [
        ("llama-3-8b", "h100", 0, Degrees(1)),
        ("llama-3-70b", "h100", 0, Degrees(2)),
        ("llama-3-70b", "h100", 160 - 132, Degrees(2)),
        ("llama-3-70b", "h100", 160 - 131, Degrees(4)),
        ("llama-3-70b", "h100", 640 - 132, Degrees(8)),
        ("llama-3-70b", "h100", 640 - 131, Degrees(8, 2)),
        ("llama-3-8b", "4090", 0, Degrees(1)),
        ("llama-3-70b", "4090", 0, Degrees(1, 7)),
        ("llama-3-70b", "4090", 24 * 81, None),
    ],
)
def test_degrees_grow_within_a_group_first(model: str, hardware: str, gib: int, degrees: Degrees | None) -> None:
    assert communication.least_degrees(SHAPES[model], load(gib), HARDWARE[hardware]) == degrees


def test_tensor_parallelism_ends_where_kv_heads_do_not_divide() -> None:
    assert communication.least_degrees(SHAPES["llama-3.1-405b"], load(0), HARDWARE["v5e"]).tensor == 8


def test_every_stage_fits_the_least_degrees() -> None:
    """Six cards hold the sum of 131.5 GiB, but the first of six stages has 14 of the 80 layers, and the embedding."""
    card = HARDWARE["4090"]
    found = communication.least_degrees(LLAMA_70B, load(0), card)
    assert communication.rank_bytes(LLAMA_70B, found, load(0)) <= card.memory
    assert communication.rank_bytes(LLAMA_70B, Degrees(1, found.pipeline - 1), load(0)) > card.memory


@pytest.mark.parametrize(
    ("model", "hardware", "gib", "said"),
    [
        ("llama-3-8b", "h100", 0, "^replicas"),
        ("llama-3-70b", "h100", 20, "^tensor parallel 2 within the fast link"),
        ("llama-3-70b", "h100", 600, "^tensor parallel 8 within a group .*, pipeline parallel 2 across slow links"),
        ("llama-3-70b", "4090", 0, "^pipeline parallel 7 across slow links"),
        ("llama-3-70b", "4090", 10_000, "^no number of pipeline stages"),
    ],
)
def test_advice(model: str, hardware: str, gib: int, said: str) -> None:
    assert re.search(said, communication.advice(SHAPES[model], load(gib), HARDWARE[hardware]))


def test_beyond_a_group_the_network_is_the_link() -> None:
    assert communication.link(8, HARDWARE["h100"]) == 450e9
    assert communication.link(9, HARDWARE["h100"]) == 25e9
    assert communication.link(2, HARDWARE["4090"]) == 25e9
