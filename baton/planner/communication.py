"""Communication between devices that share a model, in bytes and seconds, and the parallelism that a model needs.

A tensor-parallel layer has two pairs of matrices: q, k, v (by columns) and o (by rows); gate, up (by columns) and down
(by rows). Nothing is exchanged within a pair. Each pair ends with one all-reduce of `[tokens, hidden_size]`. A pipeline
sends the same array once between two stages.

Below, B is the number of tokens in a step, D the hidden size, F the size of the MLP, W bytes a second that a device
sends along one axis, N the number of devices. Sources: "How to Scale Your Model" (jax-ml.github.io/scaling-book),
chapters Sharding and Inference with its appendices B and C; Pope et al., "Efficiently Scaling Transformer Inference"
(arXiv 2211.05102).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.planner import memory
from baton.planner.hardware import Hardware
from baton.planner.shape import ModelShape

HOP_SECONDS = 1e-6
"""Fixed time of one hop of a collective between TPUs (appendix C); a GPU that starts a kernel for it takes longer."""
ALL_REDUCES = 2
"""All-reduces of a tensor-parallel layer."""
SLOW_LINK = 25e9
"""Bytes a second between groups of devices: the network of a host (chapter TPUs, "DCN")."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Devices that share one copy of a model: `tp` tensor-parallel ranks in each of `pp` pipeline stages."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of one copy."""
        return self.tp * self.pp


def activation_bytes(shape: ModelShape, tokens: int, element_bytes: int = 2) -> int:
    """Bytes of the array of one all-reduce, and of one transfer between stages: B D bytes of an element."""
    return tokens * shape.hidden_size * element_bytes


def link_bandwidth(devices: int, hardware: Hardware) -> float:
    """Bytes a second between devices: the fast link if it joins them all, else at most the network."""
    return hardware.device_link if devices <= hardware.fast_link_devices else min(hardware.device_link, SLOW_LINK)


def all_reduce_bytes(size: int, devices: int) -> float:
    """Bytes that each device sends for an all-reduce of `size` bytes: a reduce-scatter and an all-gather, 2 (N-1)/N."""
    return 2 * size * (devices - 1) / devices


@dataclass(frozen=True, slots=True)
class Hops:
    """Hops of a reduce-scatter or an all-gather: in each of `count` a device sends `sent` bytes at `bytes_per_s`."""

    count: int
    sent: float
    bytes_per_s: float

    @property
    def transfer_seconds(self) -> float:
        """Seconds in which the bytes of one hop are sent."""
        return self.sent / self.bytes_per_s

    @property
    def seconds(self) -> float:
        """Seconds of all hops: each takes its fixed time, or the time of its bytes if that is longer."""
        return self.count * max(HOP_SECONDS, self.transfer_seconds)


def hops(size: int, devices: int, hardware: Hardware) -> Hops:
    """Hops of half an all-reduce of `size` bytes over two or more devices (appendix C).

    On one axis of a torus the farthest device is N/2 hops away, rounded down, because a ring sends both ways; each way
    has half of the link's bandwidth, and size / N bytes in a hop. All hops take size / W for an even N. A ring of the
    whole axis is assumed: a part of an axis that does not close needs up to twice the time. Through a switch there is
    one hop, in which a device sends size / N bytes to each other device.
    """
    bandwidth = link_bandwidth(devices, hardware)
    if hardware.axes:
        return Hops(devices // 2, size / devices, bandwidth / 2)
    return Hops(1, size * (devices - 1) / devices, bandwidth)


def is_latency_bound(size: int, devices: int, hardware: Hardware) -> bool:
    """Whether the fixed time of hops is all that an all-reduce of `size` bytes takes: bytes of a hop / W < 1 us.

    On a torus this is size / N / W < 1 us with the bandwidth of one way (appendix C).
    """
    return devices > 1 and hops(size, devices, hardware).transfer_seconds < HOP_SECONDS


def all_reduce_seconds(size: int, devices: int, hardware: Hardware) -> float:
    """Seconds of an all-reduce of `size` bytes: those of a reduce-scatter and an all-gather; 0 for one device."""
    return 2 * hops(size, devices, hardware).seconds if devices > 1 else 0.0


def bandwidth_ratio(devices: int, hardware: Hardware) -> float:
    """Beta: bytes a second of the memory over those of the link between so many devices."""
    return hardware.bytes_per_s / link_bandwidth(devices, hardware)


def sharding_bound(intermediate_size: int, tokens: int, beta: float, weight_bits: int = 16) -> float:
    """The number of tensor-parallel ranks from which communication takes longer than reading weights: F / (B beta).

    A device reads one matrix of 2 D F / Y bytes at beta W, and exchanges 2 B D bytes at W. The second is longer from
    Y = F / (B beta) on (chapter Inference, "Sharding"). Weights of other than 16 bits have bits / 16 of the bytes.
    """
    return intermediate_size * weight_bits / 16 / (tokens * beta)


def sharding_limit(shape: ModelShape, tokens: int, weight_bits: int, hardware: Hardware) -> float:
    """`sharding_bound` of a model on this hardware: more ranks than the fast link joins have the slow one."""
    joined = hardware.fast_link_devices
    fast = sharding_bound(shape.intermediate_size, tokens, bandwidth_ratio(joined, hardware), weight_bits)
    slow = sharding_bound(shape.intermediate_size, tokens, bandwidth_ratio(joined + 1, hardware), weight_bits)
    return fast if fast <= joined else max(joined, slow)


def weight_stationary_crossing(hidden: int, intermediate: int, axes: tuple[int, int] = (1, 1), total: int = 1) -> float:
    """Number of devices from which weights divided along D and F communicate less than along F: 4 A^2 F / (a b D).

    Divided along F alone, an MLP in bfloat16 gathers its input and scatters its output, 2 B D bytes each, over all
    A = `total` axes of the torus: 4 B D / (A W) seconds.

    Divided along D in X parts and along F in Y, N = X Y, where X and Y have a, b = `axes` of the torus: the input is
    gathered over Y (2 B D / X bytes at b W), the hidden part is summed over X (an all-reduce, 4 B F / Y at a W), the
    output is summed and scattered over Y (2 B D / X at b W). Together

        T(X) = 4 B D / (b W X) + 4 B F X / (a W N).

    The two terms have a constant product, so their sum is least where they are equal: X = sqrt(a D N / (b F)), and

        T = 8 B / W sqrt(D F / (a b N)),

    which falls with N. It is 4 B D / (A W) at N = 4 A^2 F / (a b D). With F = 4 D this is 16 behind a switch (all 1),
    64 on a torus of two axes (a = b = 1, A = 2), and 72 on three (a = 1, b = 2, A = 3). The book has
    128 (3/4)^2 = 81 for the last (chapter Inference, question 7), but this product is 72.
    """
    a, b = axes
    return 4 * total**2 * intermediate / (a * b * hidden)


def pipeline_utilisation(micro_batches: int, stages: int) -> float:
    """Share of the time in which a stage works: m / (m + p - 1) (Huang et al., GPipe, arXiv 1811.06965)."""
    return micro_batches / (micro_batches + stages - 1)


def torus_axes(hardware: Hardware) -> tuple[tuple[int, int], int]:
    """Axes for X and Y of two-dimensional sharding, and those for one dimension; 1 each behind a switch."""
    return (1, max(1, hardware.axes - 1)), max(1, hardware.axes)


def layer_seconds(shape: ModelShape, tokens: int, tp: int, hardware: Hardware) -> float:
    """Seconds of a layer's two all-reduces."""
    return ALL_REDUCES * all_reduce_seconds(activation_bytes(shape, tokens), tp, hardware)


def step_seconds(shape: ModelShape, tokens: int, parallelism: Parallelism, hardware: Hardware) -> float:
    """Seconds of communication of one step: all layers' all-reduces, and a transfer between each two stages."""
    transfer = HOP_SECONDS + activation_bytes(shape, tokens) / link_bandwidth(parallelism.devices, hardware)
    reduces = shape.num_layers * layer_seconds(shape, tokens, parallelism.tp, hardware)
    return reduces + (parallelism.pp - 1) * transfer


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one copy of the model: `sequences` at once, with `tokens` of KV in all of them together.

    `weight_bits` and `kv_bits`: bits of an element of the weights, and of KV.
    """

    sequences: int
    tokens: int
    weight_bits: int = 16
    kv_bits: int = 16


def rank_bytes(shape: ModelShape, parallelism: Parallelism, workload: Workload) -> int:
    """Bytes of weights and KV of the largest rank. Raises ConfigError if heads or layers can't be divided so."""
    tp = parallelism.tp
    return max(
        memory.weights(shape, workload.weight_bits, tp=tp, stage=stage).total
        + workload.tokens * memory.kv_token_bytes(shape, workload.kv_bits, tp=tp, layers=stage.layers)
        for stage in set(memory.pipeline_stages(shape, parallelism.pp))
    )


def tensor_parallel_sizes(shape: ModelShape, hardware: Hardware) -> list[int]:
    """Numbers of ranks that the fast link joins, and that divide the model."""
    sizes = range(1, min(hardware.fast_link_devices, shape.num_heads) + 1)
    return [tp for tp in sizes if memory.divides(shape, tp)]


def smallest_parallelism(shape: ModelShape, workload: Workload, hardware: Hardware) -> Parallelism | None:
    """The fewest devices whose memory holds weights and KV; of equal numbers the one with most tensor parallelism.

    Tensor parallelism has one of `tensor_parallel_sizes`. None if stages of one layer are too large.
    """
    found = _fitting(shape, workload, hardware)
    return min(found, key=lambda each: (each.devices, -each.tp), default=None)


def _fitting(shape: ModelShape, workload: Workload, hardware: Hardware) -> Iterator[Parallelism]:
    """For each number of tensor-parallel ranks, the fewest stages that fit, if any do."""
    for tp in tensor_parallel_sizes(shape, hardware):
        for pp in range(1, shape.num_layers + 1):
            if rank_bytes(shape, Parallelism(tp, pp), workload) <= hardware.memory:
                yield Parallelism(tp, pp)
                break


def recommend_parallelism(shape: ModelShape, workload: Workload, hardware: Hardware) -> str:
    """One line: how to share the model between devices."""
    smallest = smallest_parallelism(shape, workload, hardware)
    if smallest is None:
        return "no number of pipeline stages holds this; use fewer sequences, a shorter context or fewer bits"
    if smallest.devices == 1:
        return "replicas: one device holds all; more devices serve more requests as copies of it"
    # Fewer devices cost less, but each token passes through all stages in turn.
    without_stages = [each.tp for each in _fitting(shape, workload, hardware) if each.pp == 1]
    parts = [f"tensor parallel {smallest.tp} within the fast link"] if smallest.tp > 1 else []
    if smallest.pp > 1:
        links = "within the fast link" if smallest.devices <= hardware.fast_link_devices else "across slow links"
        parts.append(f"pipeline parallel {smallest.pp} {links}")
    parts.append("then replicas of that")
    if smallest.pp > 1 and without_stages:
        parts.append(f"or tensor parallel {min(without_stages)} within the fast link for shorter steps")
    said = ", ".join(parts)
    if smallest.tp == 1 and not without_stages:
        return said
    limit = sharding_limit(shape, workload.sequences, workload.weight_bits, hardware)
    return f"{said} (communication takes longer than reading weights beyond tensor parallel {math.floor(limit)})"
