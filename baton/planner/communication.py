"""Communication between devices that share a model, in bytes and seconds, and degrees of parallelism that pay.

A tensor-parallel layer has two pairs of matrices: q, k, v (by columns) and o (by rows); gate, up (by columns) and down
(by rows). Nothing is exchanged within a pair. Each pair ends with one all-reduce of `[tokens, hidden_size]`. A pipeline
sends the same array once between two stages.

Below, B is the number of tokens in a step, D the hidden size, F the size of the MLP, W bytes a second that a device
sends along one axis, N the number of devices. Sources: "How to Scale Your Model" (jax-ml.github.io/scaling-book),
chapters Sharding and Inference with its appendices B and C; Pope et al., "Efficiently Scaling Transformer Inference"
(arXiv 2211.05102).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from baton.errors import ConfigError
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
class Degrees:
    """Devices that share one copy of a model: `tensor` in each stage, `pipeline` stages."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of one copy."""
        return self.tensor * self.pipeline


def activation_bytes(shape: ModelShape, tokens: int, element_bytes: int = 2) -> int:
    """Bytes of the array of one all-reduce, and of one transfer between stages: B D bytes of an element."""
    return tokens * shape.hidden_size * element_bytes


def link(devices: int, hardware: Hardware) -> float:
    """Bytes a second between devices: the fast link if they are all in one group, else at most the network."""
    return hardware.device_link if devices <= hardware.group else min(hardware.device_link, SLOW_LINK)


def all_reduce_bytes(size: int, devices: int) -> float:
    """Bytes that each device sends for an all-reduce of `size` bytes: a reduce-scatter and an all-gather, 2 (N-1)/N."""
    return 2 * size * (devices - 1) / devices


def is_latency_bound(size: int, devices: int, bytes_per_s: float) -> bool:
    """Whether the fixed time of a hop is longer than that of its bytes: size / N / W < 1 us (appendix C)."""
    return size / devices / bytes_per_s < HOP_SECONDS


def all_reduce_seconds(size: int, devices: int, hardware: Hardware) -> float:
    """Seconds of an all-reduce of `size` bytes over devices that `link` joins: the longer of hops and bytes.

    An all-gather takes max(hops * 1 us, bytes / W), an all-reduce twice that. A ring that sends both ways has N/2 hops,
    a switch has one (appendix C). Only one axis of a torus is counted.
    """
    if devices == 1:
        return 0.0
    hops = math.ceil(devices / 2) if hardware.axes else 1
    return max(2 * hops * HOP_SECONDS, all_reduce_bytes(size, devices) / link(devices, hardware))


def bandwidth_ratio(hardware: Hardware) -> float:
    """Beta: bytes a second of the memory over those of the link to other devices."""
    return hardware.bytes_per_s / hardware.device_link


def sharding_bound(intermediate_size: int, tokens: int, beta: float) -> float:
    """The tensor-parallel degree from which communication takes longer than reading the weights: F / (B beta).

    A device reads one matrix of 2 D F / Y bytes at beta W, and exchanges 2 B D bytes at W. The second is longer from
    Y = F / (B beta) on (chapter Inference, "Sharding").
    """
    return intermediate_size / (tokens * beta)


def weight_stationary_1d_seconds(tokens: int, hidden: int, bytes_per_s: float, axes: int = 1) -> float:
    """Seconds of communication of an MLP whose weights are divided along F alone: 4 B D / (A W) in bfloat16.

    An all-gather before it and a reduce-scatter after it move 2 B D bytes each, over A axes at the same time.
    """
    return 4 * tokens * hidden / (axes * bytes_per_s)


def weight_stationary_2d_seconds(
    tokens: int, hidden: int, intermediate: int, devices: int, bytes_per_s: float, axes: tuple[int, int] = (1, 1)
) -> float:
    """Seconds of communication of an MLP whose weights are divided along D in X parts and along F in Y, N = X Y.

    `axes` are the numbers a, b of axes of the torus that X and Y have; a collective over Y has b W bytes a second. In
    bfloat16: the input is gathered over Y (2 B D / X bytes at b W), the hidden part is summed over X (an all-reduce,
    4 B F / Y at a W), the output is summed and scattered over Y (2 B D / X at b W). Together

        T(X) = 4 B D / (b W X) + 4 B F X / (a W N).

    The two terms have a constant product, so their sum is least where they are equal: X = sqrt(a D N / (b F)), and

        T = 8 B / W sqrt(D F / (a b N)).

    This is the optimum for real X. It falls with the square root of N; that of one dimension does not fall.
    """
    a, b = axes
    return 8 * tokens / bytes_per_s * math.sqrt(hidden * intermediate / (a * b * devices))


def weight_stationary_crossing(hidden: int, intermediate: int, axes: tuple[int, int] = (1, 1), total: int = 1) -> float:
    """Number of devices from which two dimensions communicate less than one: 4 A^2 F / (a b D).

    From 8 B / W sqrt(D F / (a b N)) < 4 B D / (A W), with A = `total` axes for one dimension. With F = 4 D this is 16
    behind a switch (all 1), 64 on a torus of two axes (a = b = 1, A = 2), and 72 on three (a = 1, b = 2, A = 3). The
    book has 128 (3/4)^2 = 81 for the last (chapter Inference, question 7), but this product is 72.
    """
    a, b = axes
    return 4 * total**2 * intermediate / (a * b * hidden)


def pipeline_utilisation(micro_batches: int, stages: int) -> float:
    """Share of the time in which a stage works: m / (m + p - 1) (Huang et al., GPipe, arXiv 1811.06965)."""
    return micro_batches / (micro_batches + stages - 1)


def torus_axes(hardware: Hardware) -> tuple[tuple[int, int], int]:
    """Axes for X and Y of two-dimensional sharding, and those for one dimension; 1 each behind a switch."""
    return (1, max(1, hardware.axes - 1)), max(1, hardware.axes)


def layer_seconds(shape: ModelShape, tokens: int, tensor: int, hardware: Hardware) -> float:
    """Seconds of a layer's two all-reduces."""
    return ALL_REDUCES * all_reduce_seconds(activation_bytes(shape, tokens), tensor, hardware)


def step_seconds(shape: ModelShape, tokens: int, degrees: Degrees, hardware: Hardware) -> float:
    """Seconds of communication of one step: all layers' all-reduces, and a transfer between each two stages."""
    transfer = HOP_SECONDS + activation_bytes(shape, tokens) / link(degrees.devices, hardware)
    reduces = shape.num_layers * layer_seconds(shape, tokens, degrees.tensor, hardware)
    return reduces + (degrees.pipeline - 1) * transfer


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of KV that a copy of a model holds in `sequences` sequences, and bits of elements of weights and KV."""

    sequences: int
    tokens: int
    weight_bits: int = 16
    kv_bits: int = 16


def rank_bytes(shape: ModelShape, degrees: Degrees, load: Load) -> int:
    """Bytes of weights and KV of the largest rank. Raises ConfigError if the degrees do not divide the model."""
    tensor = degrees.tensor
    return max(
        memory.weights(shape, load.weight_bits, tensor=tensor, stage=stage).total
        + load.tokens * memory.kv_token_bytes(shape, load.kv_bits, tensor=tensor, layers=stage.layers)
        for stage in memory.stages(shape, degrees.pipeline)
    )


def least_degrees(shape: ModelShape, load: Load, hardware: Hardware) -> Degrees | None:
    """The fewest devices whose memory holds weights and KV: tensor-parallel within a group, pipeline across groups.

    Degrees of tensor parallelism are powers of two that divide heads, KV heads and MLP. None if no number of stages is
    enough.
    """
    tensor = 1
    with contextlib.suppress(ConfigError):
        while rank_bytes(shape, Degrees(tensor), load) > hardware.memory and 2 * tensor <= hardware.group:
            memory.divided(shape, 2 * tensor)
            tensor *= 2
    for stages in range(1, shape.num_layers + 1):
        if rank_bytes(shape, Degrees(tensor, stages), load) <= hardware.memory:
            return Degrees(tensor, stages)
    return None


def advice(shape: ModelShape, load: Load, hardware: Hardware) -> str:
    """One line: how to share the model between devices."""
    degrees = least_degrees(shape, load, hardware)
    if degrees is None:
        return "no number of pipeline stages holds this; use fewer sequences, a shorter context or fewer bits"
    if degrees.devices == 1:
        return "replicas: one device holds all; more devices serve more requests as copies of it"
    bound = sharding_bound(shape.intermediate_size, load.sequences, bandwidth_ratio(hardware))
    limit = f"its communication takes longer than reading weights from {bound:.0f} on"
    if degrees.pipeline == 1:
        return f"tensor parallel {degrees.tensor} within the fast link ({limit}), then replicas of that"
    within = f"tensor parallel {degrees.tensor} within a group ({limit}), " if degrees.tensor > 1 else ""
    return f"{within}pipeline parallel {degrees.pipeline} across slow links, then replicas of that"
