"""Operations and bytes of forward passes, and the least time that a device needs for them.

The counts are the least that a pass needs; MFU and MBU follow from them. A multiplication and an addition are two
operations. Attention counts only the scores that the causal mask and a sliding window leave. The output projection
counts only the requested rows. For all other tokens the last layer counts only their K and V. Norms, rotary embeddings,
activations and sampling are left out: they are below one percent, and leaving them out makes both ratios smaller. A
decode step reads each weight once (the embedding table only where it is the output projection too) and each sequence's
KV once, and writes the KV of its new token; activations are assumed to stay in caches.

The times assume that the device reads memory and computes at the same time, each at its peak. Sources: "How to Scale
Your Model" (jax-ml.github.io/scaling-book), chapters Roofline and Inference. In formulas B is the batch, P the number
of parameters, C operations a second and W bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.planner import memory
from baton.planner.communication import layer_seconds, tensor_parallel_sizes
from baton.planner.hardware import Hardware
from baton.planner.shape import ModelShape


def prefill_flops(shape: ModelShape, tokens: int, past: int = 0, logits: int = 1) -> int:
    """Operations of `tokens` new tokens of one sequence after `past` others, and `logits` rows of the projection."""
    *others, last = shape.windows
    weights = len(others) * shape.layer_weights * tokens
    weights += shape.kv_weights * tokens + (shape.layer_weights - shape.kv_weights + shape.lm_head_weights) * logits
    pairs = sum(_pairs(tokens, past, window) for window in others) + _pairs(logits, past + tokens - logits, last)
    return 2 * weights + _pair_flops(shape) * pairs


def decode_flops(shape: ModelShape, batch: int, contexts: int | Sequence[int]) -> int:
    """Operations of one step over `batch` sequences; `contexts` count the new token, one for all or one for each."""
    seen = sum(_pairs(1, context - 1, window) for context in _each(batch, contexts) for window in shape.windows)
    return 2 * shape.step_weights * batch + _pair_flops(shape) * seen


def decode_bytes(
    shape: ModelShape, batch: int, contexts: int | Sequence[int], weight_bytes: int, kv_token_bytes: int
) -> int:
    """Bytes that one step over `batch` sequences moves.

    `contexts` as in `decode_flops`. `weight_bytes`: bytes of all weights that a step reads (`step_weights` times the
    bytes of an element). `kv_token_bytes`: bytes of one token's KV over all layers.
    """
    seen = sum(_pairs(1, context - 1, window) for context in _each(batch, contexts) for window in shape.windows)
    return weight_bytes + kv_token_bytes * seen // shape.num_layers + kv_token_bytes * batch


@dataclass(frozen=True, slots=True)
class StepTime:
    """Least seconds of the parts of a decode step: reading KV, computing with weights, reading weights."""

    kv: float
    compute: float
    weights: float

    @property
    def seconds(self) -> float:
        """Seconds of the step: KV plus the longer of the two others, which overlap."""
        return self.kv + max(self.compute, self.weights)

    @property
    def bound(self) -> str:
        """The part that takes longest: "KV", "compute" or "weights"."""
        parts = {"KV": self.kv, "compute": self.compute, "weights": self.weights}
        return max(parts, key=lambda name: parts[name])


def step_time(
    batch: int, parameters: float, weight_bytes: float, kv_bytes: float, flops_per_s: float, bytes_per_s: float
) -> StepTime:
    """Least time of a step: B KV / W + max(2 B P / C, weight bytes / W) (chapter Inference, "Theoretical estimates").

    `parameters` are those that one token uses, `weight_bytes` those of all weights that the step reads, `kv_bytes`
    those of the KV of one sequence. Attention counts as reading alone: its operations for each byte are few.
    """
    return StepTime(batch * kv_bytes / bytes_per_s, 2 * batch * parameters / flops_per_s, weight_bytes / bytes_per_s)


def experts_read(experts: int, active: int, tokens: int) -> float:
    """Mean number of a layer's experts that `tokens` tokens use: E (1 - (1 - k/E)^B), if all are equally likely."""
    return experts * (1 - (1 - active / experts) ** tokens)


def weights_read(shape: ModelShape, tokens: int) -> float:
    """Mean number of elements of the matrices that a pass over `tokens` tokens reads, with the output projection."""
    if not shape.experts:
        return shape.step_weights
    mlps = experts_read(shape.experts, shape.active_experts, tokens) * shape.mlp_weights
    return shape.num_layers * (shape.attention_weights + mlps) + shape.lm_head_weights


def kv_read_bytes(shape: ModelShape, context: int, kv_bits: float) -> float:
    """Bytes of the KV of one sequence of `context` tokens that a step reads; windows leave out the older tokens."""
    tokens = sum(context if window is None else min(context, window) for window in shape.windows)
    return shape.kv_token_elements / shape.num_layers * tokens * kv_bits / 8


def decode_time(
    shape: ModelShape,
    hardware: Hardware,
    batch: int,
    context: int,
    *,
    weight_bits: float = 16,
    kv_bits: float = 16,
    devices: int = 1,
) -> StepTime:
    """Least time of a step of `batch` sequences, in 16-bit arithmetic, on devices that share all work equally.

    More devices than KV heads read the same heads several times. Communication between them is not counted.
    """
    return step_time(
        batch,
        shape.step_weights,
        weights_read(shape, batch) * weight_bits / 8,
        kv_read_bytes(shape, context, kv_bits) * max(1, devices / shape.num_kv_heads),
        devices * hardware.flops_per_s(16),
        devices * hardware.bytes_per_s,
    )


def prefill_seconds(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Least seconds of a prefill: max(operations / C, bytes / W) (chapter Roofline)."""
    return max(flops / flops_per_s, moved_bytes / bytes_per_s)


def prefill_time(
    shape: ModelShape, hardware: Hardware, tokens: int, *, weight_bits: float = 16, devices: int = 1
) -> float:
    """Least seconds of the prefill of one prompt in one chunk, in 16-bit arithmetic; `devices` as in `decode_time`."""
    moved = weights_read(shape, tokens) * weight_bits / 8
    rates = devices * hardware.flops_per_s(16), devices * hardware.bytes_per_s
    return prefill_seconds(prefill_flops(shape, tokens), moved, *rates)


def critical_batch(flops_per_s: float, bytes_per_s: float, weight_bits: float, sparsity: float = 1) -> float:
    """The number of tokens in a step from which a matrix product is limited by arithmetic and not by memory.

    It is C / W * weight bytes / 2 * sparsity. `sparsity` is the number of experts over those that a token uses, 1 for a
    dense model (chapter Inference, questions 4 and 5).
    """
    return flops_per_s / bytes_per_s * weight_bits / 16 * sparsity


def attention_intensity(shape: ModelShape, kv_bits: float, tokens: int = 1) -> float:
    """Operations of attention for each byte of KV: 2 T N / (K bytes of an element), for T query tokens a sequence.

    A key and a value of one KV head and d elements are 2 d elements to read, and cost 4 d operations for each query of
    the N/K heads that share them (chapter Transformers, question 4). The context cancels, so no batch raises this.
    """
    return 2 * tokens * shape.num_heads / shape.num_kv_heads / (kv_bits / 8)


def speculative_tokens(acceptance: float, drafts: int) -> float:
    """Mean number of tokens of a step that checks k drafts, each accepted with probability a: (1-a^(k+1)) / (1-a).

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), equation 1.
    """
    return drafts + 1 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speculative_time(step: StepTime, drafts: int, weights: float) -> StepTime:
    """The step that checks k drafts of each sequence: k + 1 times the arithmetic, the same KV. Drafts are free.

    `weights`: seconds in which the weights are read that k + 1 times as many tokens use; more only with experts.
    """
    return StepTime(step.kv, (drafts + 1) * step.compute, weights)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (seconds, tokens a second): whether no other point is at least as good in both and better in one."""
    return [
        not any(other[0] <= seconds and other[1] >= rate and other != (seconds, rate) for other in points)
        for seconds, rate in points
    ]


def fits(
    shape: ModelShape,
    hardware: Hardware,
    batch: int,
    context: int,
    *,
    weight_bits: int = 16,
    kv_bits: int = 16,
    devices: int = 1,
) -> bool:
    """Whether each of the devices that share the layers has room for its weights and for the KV of all sequences."""
    return rank_bytes(shape, batch, context, weight_bits, kv_bits, devices) <= hardware.memory


def rank_bytes(
    shape: ModelShape, batch: int, context: int, weight_bits: int = 16, kv_bits: int = 16, devices: int = 1
) -> int:
    """Bytes of weights and KV on each of the devices that share the layers."""
    kv = batch * context * memory.kv_token_bytes(shape, kv_bits, tp=devices)
    return memory.weights(shape, weight_bits, tp=devices).total + kv


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """One way to run decode: `tp` devices that share each layer, and a batch.

    `seconds`: of a step. `tokens_per_s`: of the whole group divided by its devices.
    """

    tp: int
    batch: int
    seconds: float
    tokens_per_s: float


def feasible_points(
    shape: ModelShape,
    hardware_at_batch: Callable[[int], Hardware],
    batches: Sequence[int],
    context: int,
    *,
    weight_bits: int = 16,
    kv_bits: int = 16,
) -> list[OperatingPoint]:
    """All points whose weights and KV fit, with each of `tensor_parallel_sizes`.

    `hardware_at_batch` gives the hardware with its rates at a batch. A step is that of `decode_time` and its
    all-reduces. `context` tokens of each sequence are read.
    """
    found = []
    for tp in tensor_parallel_sizes(shape, hardware_at_batch(batches[0])):
        sizes = {"weight_bits": weight_bits, "kv_bits": kv_bits, "devices": tp}
        for batch in batches:
            hardware = hardware_at_batch(batch)
            if fits(shape, hardware, batch, context, **sizes):
                step = decode_time(shape, hardware, batch, context, **sizes)
                seconds = step.seconds + shape.num_layers * layer_seconds(shape, batch, tp, hardware)
                found.append(OperatingPoint(tp, batch, seconds, batch / seconds / tp))
    return found


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of model or engine, and its effect: seconds of a step, tokens a second of all devices.

    `fits`: whether the memory holds weights and KV.
    """

    name: str
    seconds: float
    tokens_per_s: float
    fits: bool


ACCEPTANCE, DRAFTS = 0.8, 4
"""Speculation of `what_if`: the probability that a draft is accepted, and drafts of a step."""


def what_if(
    shape: ModelShape, hardware: Hardware, batch: int, context: int, *, weight_bits: int = 16, kv_bits: int = 16
) -> list[WhatIf]:
    """Steps as they are, and with one change each: KV heads, bits, speculation, experts, tensor parallelism."""

    def change(
        name: str,
        shape: ModelShape = shape,
        *,
        weights: int = weight_bits,
        kv: int = kv_bits,
        devices: int = 1,
        more: float = 0.0,
    ) -> WhatIf:
        sizes = {"weight_bits": weights, "kv_bits": kv, "devices": devices}
        seconds = decode_time(shape, hardware, batch, context, **sizes).seconds + more
        return WhatIf(name, seconds, batch / seconds, fits(shape, hardware, batch, context, **sizes))

    plain = change("as it is")
    found = [plain]
    grouped = shape.num_kv_heads < shape.num_heads
    heads = shape.num_heads if grouped else max(1, shape.num_heads // 8)
    name = "each query head has its own K and V" if grouped else f"{shape.num_heads // heads} query heads share K and V"
    found.append(change(name, replace(shape, num_kv_heads=heads)))
    found += [change(f"weights have {bits} bits", weights=bits) for bits in (8, 4) if bits < weight_bits]
    if kv_bits > 8:
        found.append(change("KV has 8 bits", kv=8))
    found.append(_speculation(shape, hardware, batch, context, weight_bits, kv_bits, plain.fits))
    if not shape.experts:
        mixture = replace(shape, experts=16, active_experts=2)
        found.append(change("each MLP has 16 experts, and a token uses 2", mixture))
    for tp in tensor_parallel_sizes(shape, hardware)[1:]:
        reduces = shape.num_layers * layer_seconds(shape, batch, tp, hardware)
        found.append(change(f"{tp} devices share each layer", devices=tp, more=reduces))
    return found


def _speculation(
    shape: ModelShape, hardware: Hardware, batch: int, context: int, weight_bits: int, kv_bits: int, room: bool
) -> WhatIf:
    sizes = {"weight_bits": weight_bits, "kv_bits": kv_bits}
    weights = decode_time(shape, hardware, batch * (DRAFTS + 1), context, **sizes).weights
    seconds = speculative_time(decode_time(shape, hardware, batch, context, **sizes), DRAFTS, weights).seconds
    name = f"a step checks {DRAFTS} free drafts, each accepted with a probability of {ACCEPTANCE:.0%}"
    return WhatIf(name, seconds, batch * speculative_tokens(ACCEPTANCE, DRAFTS) / seconds, room)


def _pair_flops(shape: ModelShape) -> int:
    """Operations of one query and one key token in one layer: the score and its share of the weighted sum."""
    return 4 * shape.num_heads * shape.head_dim


def _pairs(tokens: int, past: int, window: int | None) -> int:
    """Number of (query, key) pairs that the causal mask and the window leave, for `tokens` queries after `past`."""
    if window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    # Queries that see fewer keys than the window holds come first.
    growing = min(tokens, max(0, window - past))
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def _each(batch: int, contexts: int | Sequence[int]) -> Sequence[int]:
    if isinstance(contexts, int):
        return [contexts] * batch
    if len(contexts) != batch:
        raise ValueError(f"{len(contexts)} contexts for a batch of {batch}")
    return contexts
