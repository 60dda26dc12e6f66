"""Parallelism, bytes and seconds of communication, against published numbers and against sums counted another way."""

import re
from itertools import pairwise

import pytest

from baton.planner import communication
from baton.planner.communication import Parallelism, Workload
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
    """bytes / n / W < 1 us, appendix C: 8 devices, 4.5e10 B/s one way, hence 360 kB; 16 x 8,192 in int8 are below."""
    assert (size / 8 / 4.5e10 < 1e-6) == bound
    assert communication.is_latency_bound(size, 8, HARDWARE["v5e"]) == bound


@pytest.mark.parametrize("name", ["v5e", "h100", "4090"])
@pytest.mark.parametrize("devices", [2, 3, 8, 64])
@pytest.mark.parametrize("size", [1, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 26])
def test_an_all_reduce_bound_by_latency_takes_the_time_of_its_hops(name: str, devices: int, size: int) -> None:
    hardware = HARDWARE[name]
    hops = devices // 2 if hardware.axes else 1
    seconds = communication.all_reduce_seconds(size, devices, hardware)
    assert communication.is_latency_bound(size, devices, hardware) == (seconds == 2 * hops * 1e-6)


@pytest.mark.parametrize(("axes", "a", "b"), [(2, 1, 1), (3, 1, 2), (1, 1, 1)])
def test_two_dimensions_cross_one_where_it_is_said(axes: int, a: int, b: int) -> None:
    """The sum of the three collectives with the best X of a fine grid, against 4 B D / (A W) of one dimension."""
    tokens, hidden, inner, link = 64, 4096, 16384, 9e10
    one = 4 * tokens * hidden / (axes * link)
    crossing = communication.weight_stationary_crossing(hidden, inner, (a, b), axes)
    for devices in (round(crossing) - 4, round(crossing) + 4):

        def summed(x: float, devices: int = devices) -> float:
            y = devices / x
            gather = 2 * tokens * hidden / x / (b * link)
            return 2 * gather + 4 * tokens * inner / y / (a * link)

        best = min(summed(1 + step / 1000) for step in range(15_000))
        assert (best < one) == (devices > crossing)


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
    within = communication.step_seconds(LLAMA_70B, 1024, Parallelism(4, 2), h100)
    beyond = communication.step_seconds(LLAMA_70B, 1024, Parallelism(8, 2), h100)
    reduces = 80 * communication.layer_seconds(LLAMA_70B, 1024, 4, h100)
    assert within == pytest.approx(reduces + 1e-6 + size / 450e9)
    assert beyond == pytest.approx(80 * communication.layer_seconds(LLAMA_70B, 1024, 8, h100) + 1e-6 + size / 25e9)


def workload(gib: float) -> Workload:
    """KV of so many GiB in 20 sequences, and weights of 16 bits, which have 131.5 GiB."""
    return Workload(20, int(gib * GIB) // LLAMA_70B.kv_token_bytes(2))


@pytest.mark.parametrize(
    ("model", "hardware", "gib", "parallelism"),
    [
        ("llama-3-8b", "h100", 0, Parallelism(1)),
        ("llama-3-70b", "h100", 0, Parallelism(2)),
        ("llama-3-70b", "h100", 160 - 132, Parallelism(2)),
        ("llama-3-70b", "h100", 160 - 131, Parallelism(1, 3)),
        ("llama-3-70b", "h100", 320 - 132, Parallelism(4)),
        ("llama-3-70b", "h100", 640 - 132, Parallelism(8)),
        ("llama-3-70b", "h100", 640 - 131, Parallelism(1, 9)),
        ("llama-3-8b", "4090", 0, Parallelism(1)),
        ("llama-3-70b", "4090", 0, Parallelism(1, 7)),
        ("llama-3-70b", "4090", 24 * 81, None),
    ],
)
def test_degrees_grow_within_a_group_first(
    model: str, hardware: str, gib: int, parallelism: Parallelism | None
) -> None:
    assert communication.smallest_parallelism(SHAPES[model], workload(gib), HARDWARE[hardware]) == parallelism


@pytest.mark.parametrize(
    ("model", "hardware", "sequences", "context"),
    [
        ("llama-3.1-405b", "h100", 1, 8192),
        ("llama-3.1-405b", "v5e", 1, 8192),
        ("qwen1.5-72b", "h100", 4, 8192),
        ("qwen1.5-32b", "a100", 64, 4096),
        ("llama-3.1-70b", "h100", 20, 32768),
        ("practice-moe", "h200", 8, 8192),
    ],
)
def test_no_other_parallelism_has_fewer_devices(model: str, hardware: str, sequences: int, context: int) -> None:
    """A search over every pair; of equal numbers, most tensor parallelism."""
    shape, card = SHAPES[model], HARDWARE[hardware]
    asked = Workload(sequences, sequences * context)
    best: tuple[int, int] | None = None
    for tp in range(1, card.fast_link_devices + 1):
        if (
            shape.num_heads % tp
            or (shape.num_kv_heads % tp and tp % shape.num_kv_heads)
            or shape.intermediate_size % tp
        ):
            continue
        for pp in range(1, shape.num_layers + 1):
            if best is not None and tp * pp > best[0]:
                break
            if communication.rank_bytes(shape, Parallelism(tp, pp), asked) <= card.memory:
                best = min(best or (tp * pp, -tp), (tp * pp, -tp))
    found = communication.smallest_parallelism(shape, asked, card)
    assert found is not None
    assert (found.devices, -found.tp) == best


def test_five_cards_hold_a_70b_with_twenty_long_sequences() -> None:
    asked = Workload(20, 20 * 32768)
    assert communication.smallest_parallelism(LLAMA_70B, asked, HARDWARE["h100"]) == Parallelism(1, 5)


def test_ranks_divide_heads_and_the_fast_link_joins_them() -> None:
    assert communication.tensor_parallel_sizes(SHAPES["qwen2.5-7b"], HARDWARE["h100"]) == [1, 2, 4]
    many = communication.tensor_parallel_sizes(SHAPES["llama-3.1-405b"], HARDWARE["v5e"])
    assert many == [1 << power for power in range(8)], "beyond 8 KV heads, ranks have copies"
    assert communication.tensor_parallel_sizes(LLAMA_70B, HARDWARE["4090"]) == [1]


def test_beyond_the_fast_link_the_sharding_bound_is_that_of_the_network() -> None:
    """F / (B beta), beta 134 at 25e9 B/s; weights of 8 bits have half of the bytes."""
    h100, v5e = HARDWARE["h100"], HARDWARE["v5e"]
    assert communication.sharding_limit(LLAMA_70B, 20, 16, h100) == pytest.approx(28672 / (20 * 134))
    assert communication.sharding_limit(LLAMA_70B, 64, 16, h100) == 8
    assert communication.sharding_limit(LLAMA_70B, 2048, 16, h100) == pytest.approx(28672 / 2048 / (3350 / 450))
    half = communication.sharding_limit(SHAPES["llama-3.1-8b"], 32, 8, v5e)
    assert half == pytest.approx(14336 / 2 / (32 * 8.2e11 / 9e10))
    assert communication.sharding_limit(SHAPES["llama-3.1-8b"], 32, 16, v5e) == pytest.approx(2 * half)


def test_every_stage_of_the_smallest_parallelism_fits() -> None:
    """Six cards hold the sum of 131.5 GiB, but the first of six stages has 14 of the 80 layers, and the embedding."""
    card = HARDWARE["4090"]
    found = communication.smallest_parallelism(LLAMA_70B, workload(0), card)
    assert communication.rank_bytes(LLAMA_70B, found, workload(0)) <= card.memory
    assert communication.rank_bytes(LLAMA_70B, Parallelism(1, found.pp - 1), workload(0)) > card.memory


@pytest.mark.parametrize(
    ("model", "hardware", "gib", "said"),
    [
        ("llama-3-8b", "h100", 0, "^replicas"),
        ("llama-3-70b", "h100", 20, "^tensor parallel 2 within the fast link, then replicas of that .*beyond .* 10"),
        ("llama-3-70b", "h100", 40, "^pipeline parallel 3 within the fast link, .*, or tensor parallel 4 within"),
        (
            "llama-3-70b",
            "h100",
            600,
            "^tensor parallel 2 within .*, pipeline parallel 5 across slow links, then replicas",
        ),
        ("llama-3-70b", "4090", 0, "^pipeline parallel 7 across slow links, then replicas of that$"),
        ("llama-3-70b", "4090", 10_000, "^no number of pipeline stages"),
    ],
)
def test_advice(model: str, hardware: str, gib: int, said: str) -> None:
    assert re.search(said, communication.recommend_parallelism(SHAPES[model], workload(gib), HARDWARE[hardware]))


def test_beyond_a_group_the_network_is_the_link() -> None:
    assert communication.link_bandwidth(8, HARDWARE["h100"]) == 450e9
    assert communication.link_bandwidth(9, HARDWARE["h100"]) == 25e9
    assert communication.link_bandwidth(2, HARDWARE["4090"]) == 25e9
