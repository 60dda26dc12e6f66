"""`baton plan roofline`: the least time of prefills and decode steps, and what limits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from baton.cli.options import Counts, ReportFile, extra_installed
from baton.cli.picture import Series, chart
from baton.cli.plan.figures import BOOK, Figure, ShapeParam, number, output_options, show, with_positions
from baton.config.options import usage_errors
from baton.engine.contract import min_overlap_chunk
from baton.planner.hardware import WIDTHS, Hardware, hardware_named
from baton.planner.memory import weights
from baton.planner.roofline import (
    OperatingPoint,
    WhatIf,
    attention_intensity,
    critical_batch,
    decode_time,
    feasible_points,
    fits,
    kv_read_bytes,
    pareto,
    prefill_flops,
    prefill_time,
    rank_bytes,
    weights_read,
    what_if,
)
from baton.planner.shape import ModelShape

HardwareAtBatch = Callable[[int], Hardware]
"""The hardware, with its rates at a number of rows: sequences of a step, or tokens of a prompt."""

_INFERENCE, _ROOFLINE = f"{BOOK}, Inference", f"{BOOK}, Roofline"
_BITS = click.IntRange(1, 32)
_PEAK_ROWS = 2048
"""Rows from which a rate is the peak (`baton.bench.probes`); with fewer it has the wait for the weights in it."""
_PRODUCTS = (
    ("bf16", 16, 16),
    ("int8 weights, bf16 arithmetic", 8, 16),
    ("int4 weights, bf16 arithmetic", 4, 16),
    ("int8", 8, 8),
    ("int4", 4, 4),
)
"""Kinds of products: name, bits of a weight, and the width of WIDTHS whose rate they have."""
_FLOAT32_PRODUCTS = (("float32", 32, 16),)
_FRONT_BATCHES = tuple(1 << power for power in range(11))


@click.command()
@click.argument("model", type=ShapeParam())
@click.option("--hardware", required=True, help="A device, such as h100, or FILE.json; `this`: measured.")
@click.option("--batch", type=Counts(), default="1,8,32,128", show_default=True, help="Sequences of a step.")
@click.option("--context", type=Counts(), default="8192", show_default=True, help="Tokens of each sequence.")
@click.option("--weight-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of the weights.")
@click.option("--kv-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of KV.")
@click.option("--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Devices of a copy.")
@click.option("--plot", type=ReportFile(), help="Write a picture of latency and throughput, SVG.")
@output_options
def roofline(
    model: ModelShape,
    hardware: str,
    batch: tuple[int, ...],
    context: tuple[int, ...],
    weight_bits: int,
    kv_bits: int,
    tensor_parallel: int,
    plot: Path | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Compute the least time of steps and prefills of MODEL, and what limits them.

    MODEL is a folder, a config.json, or a name such as llama-3.1-8b. Arithmetic is in 16 bits, whatever the bits of
    the weights; with `--hardware this` and weights of more than 16 bits it is in float32. Communication counts only in
    the last two parts; `baton plan parallel` shows it.
    """
    if not batch or not context:
        raise click.UsageError("--batch and --context need a number")
    with usage_errors():
        hardware_at_batch = _hardware_at_batch(model, hardware, weight_bits)
        weights(model, weight_bits, tp=tensor_parallel)
    steps = _Steps(model, hardware_at_batch, weight_bits, kv_bits, tensor_parallel)
    peak = hardware_at_batch(_PEAK_ROWS)
    arithmetic = 32 if hardware == "this" and weight_bits > 16 else 16
    groups = {
        f"hardware: {hardware}": _hardware(peak, arithmetic),
        "batch from which weights take longer to compute with than to read": _critical(model, peak, arithmetic),
        "attention": _attention(model, peak, kv_bits),
    }
    for tokens in context:
        groups[f"decode at a context of {tokens:,}"] = [
            figure for count in batch for figure in steps.decode(count, tokens)
        ]
    groups["prefill in one chunk"] = [steps.prefill(tokens) for tokens in context]
    first = context[0]
    roomy = [count for count in batch if fits(model, peak, count, first, weight_bits=weight_bits, kv_bits=kv_bits)]
    changed = max(roomy, default=min(batch))
    found = feasible_points(
        model, hardware_at_batch, _front(batch, hardware), first, weight_bits=weight_bits, kv_bits=kv_bits
    )
    best = [each for each, keep in zip(found, _on_front(found), strict=True) if keep]
    groups[f"Pareto front at a context of {first:,}, in tokens/s of one device"] = [_point(each) for each in best]
    groups[f"effect of one change at batch {changed}, context {first:,}, on one device"] = [
        _what_if(each) for each in what_if(model, peak, changed, first, weight_bits=weight_bits, kv_bits=kv_bits)
    ]
    show(groups, as_json=as_json, explain=explain)
    if plot is not None:
        if not found:
            raise click.ClickException("there is nothing to draw: no batch fits the memory")
        plot.write_text(_picture(found, best, first, hardware), encoding="utf-8")


def _hardware_at_batch(model: ModelShape, hardware: str, weight_bits: int) -> HardwareAtBatch:
    if hardware != "this":
        row = hardware_named(hardware)
        return lambda rows: row
    from baton.engine.process import prepare

    # As in a worker's process, before torch is loaded.
    prepare()
    with extra_installed("worker"):
        import torch

        from baton.bench.probes import this_machine

        measured = this_machine(model, torch.float32 if weight_bits > 16 else torch.bfloat16)
    # The rate of few rows has the wait for weights of 16 bits in it, which weights of fewer bits do not have.
    return measured if weight_bits >= 16 else lambda rows: measured(max(rows, _PEAK_ROWS))


def _front(batch: Sequence[int], hardware: str) -> Sequence[int]:
    """Batches of the Pareto front; on this machine each would be measured, so there are only those asked for."""
    return batch if hardware == "this" else _FRONT_BATCHES


def _on_front(found: Sequence[OperatingPoint]) -> list[bool]:
    return pareto([(each.seconds, each.tokens_per_s) for each in found])


def _hardware(device: Hardware, arithmetic: int) -> list[Figure]:
    ratio = f"{device.peak_flops_per_s[0]:.5g} FLOP/s / {device.bytes_per_s:.5g} B/s"
    rates = [
        Figure(f"FLOP/s in {bits} bits", rate, "FLOP/s", "", device.source)
        for bits, rate in zip((arithmetic, *WIDTHS[1:]), device.peak_flops_per_s, strict=True)
        if rate is not None
    ]
    return [
        *rates,
        Figure("memory bandwidth", device.bytes_per_s, "B/s", "", device.source),
        Figure("memory", device.memory, "B", "", device.source),
        Figure(f"FLOP:byte in {arithmetic} bits", device.flops_per_byte, "", ratio, _ROOFLINE),
    ]


def _critical(model: ModelShape, device: Hardware, arithmetic: int) -> list[Figure]:
    figures = []
    for name, bits, width in _PRODUCTS if arithmetic == 16 else _FLOAT32_PRODUCTS:
        # Without instructions of its own, a width is multiplied as the next wider one, which another row has.
        if device.peak_flops_per_s[WIDTHS.index(width)] is None:
            continue
        flops = device.flops_per_s(width)
        for part, read, used in _read_and_used(model):
            value = critical_batch(flops, device.bytes_per_s, bits, read / used)
            formula = f"{flops:.5g} FLOP/s / {device.bytes_per_s:.5g} B/s * {bits} / 16"
            formula += f" * {read:,} / {used:,}" if part else ""
            figures.append(Figure(f"{name}{part}", value, "sequences", formula, f"{_INFERENCE}, Linear operations"))
    return figures


def _read_and_used(model: ModelShape) -> list[tuple[str, int, int]]:
    """Parts of a model, with what a large batch reads over what a token uses: experts, or weights."""
    if not model.experts:
        return [("", 1, 1)]
    others = model.experts - model.active_experts
    read = model.step_weights + model.num_layers * others * model.mlp_weights
    return [(", MLPs", model.experts, model.active_experts), (", whole step", read, model.step_weights)]


def _attention(model: ModelShape, device: Hardware, kv_bits: int) -> list[Figure]:
    intensity = attention_intensity(model, kv_bits)
    formula = f"2 * {model.num_heads} heads / ({model.num_kv_heads} KV heads * {kv_bits} / 8)"
    limit = "memory at any batch" if intensity < device.flops_per_byte else "arithmetic"
    source = f"{BOOK}, Transformers, question 4"
    figures = [
        Figure("FLOP for each byte of KV in decode", intensity, "", formula, source),
        Figure("limit of decode attention", limit, "", f"{intensity:.4g} against {device.flops_per_byte:.4g}", source),
    ]
    if device.host_link:
        group = model.num_heads // model.num_kv_heads
        chunk = min_overlap_chunk(device.peak_flops_per_s[0], device.host_link, group, kv_bits)
        formula = (
            f"{device.peak_flops_per_s[0]:.5g} FLOP/s / {device.host_link:.4g} B/s * {kv_bits} / 8 / (2 * {group})"
        )
        figures.append(
            Figure("chunk that hides copies of KV from the host", chunk, "tokens", formula, "docs/long-prompts.md")
        )
    return figures


class _Steps:
    """Figures of steps and prefills with the options of the command."""

    def __init__(
        self, model: ModelShape, hardware_at_batch: HardwareAtBatch, weight_bits: int, kv_bits: int, devices: int
    ) -> None:
        self._model, self._hardware_at_batch, self._devices = model, hardware_at_batch, devices
        self._weight_bits, self._kv_bits = weight_bits, kv_bits

    def decode(self, batch: int, context: int) -> list[Figure]:
        model, device = self._model, self._hardware_at_batch(batch)
        bits = {"weight_bits": self._weight_bits, "kv_bits": self._kv_bits}
        step = decode_time(model, device, batch, context, devices=self._devices, **bits)
        kv = kv_read_bytes(model, context, self._kv_bits)
        read = weights_read(model, batch) * self._weight_bits / 8
        rate, flops = self._devices * device.bytes_per_s, self._devices * device.flops_per_s(16)
        formula = (
            f"{batch} * {kv:.5g} B / {rate:.5g} B/s + "
            f"max(2 * {batch} * {model.step_weights:,} / {flops:.5g} FLOP/s, {read:.5g} B / {rate:.5g} B/s)"
        )
        source = f"{_INFERENCE}, Theoretical estimates; {device.source}"
        needed = rank_bytes(model, batch, context, devices=self._devices, **bits)
        answer = with_positions("yes" if needed <= device.memory else "no", context, model)
        # At its peak, because the rate of few rows has the wait for the weights in it.
        peak = self._hardware_at_batch(max(batch, _PEAK_ROWS))
        bound = decode_time(model, peak, batch, context, devices=self._devices, **bits).bound
        return [
            Figure(f"batch {batch}: step", 1e3 * step.seconds, "ms", formula, source),
            Figure(f"batch {batch}: limited by", bound, "", "the longest of the three times, at the peak rate", source),
            Figure(f"batch {batch}: throughput", batch / step.seconds, "tokens/s", f"{batch} / step", _INFERENCE),
            Figure(f"batch {batch}: fits the memory", answer, "", f"{needed:,} of {device.memory:,} B", ""),
        ]

    def prefill(self, tokens: int) -> Figure:
        device = self._hardware_at_batch(tokens)
        seconds = prefill_time(self._model, device, tokens, weight_bits=self._weight_bits, devices=self._devices)
        flops = prefill_flops(self._model, tokens)
        read = weights_read(self._model, tokens) * self._weight_bits / 8
        formula = (
            f"max({flops:.5g} FLOP / {self._devices * device.peak_flops_per_s[0]:.5g} FLOP/s, "
            f"{read:.5g} B / {self._devices * device.bytes_per_s:.5g} B/s)"
        )
        room = fits(
            self._model,
            device,
            1,
            tokens,
            weight_bits=self._weight_bits,
            kv_bits=self._kv_bits,
            devices=self._devices,
        )
        name = f"prompt of {tokens:,}{_mark(room)}"
        return Figure(name, 1e3 * seconds, "ms", formula, f"{_ROOFLINE}; {device.source}")


def _mark(room: bool) -> str:
    """A mark behind figures of what the memory does not hold."""
    return "" if room else " (does not fit)"


def _point(point: OperatingPoint) -> Figure:
    name = f"tensor parallel {point.tp}, batch {point.batch}: {1e3 * point.seconds:.4g} ms a step"
    formula = f"{point.batch} / {point.seconds:.5g} s / {point.tp}; the step with its all-reduces"
    return Figure(name, point.tokens_per_s, "tokens/s", formula, f"{_INFERENCE}; no other point is better in both")


def _what_if(change: WhatIf) -> Figure:
    value = f"{number(1e3 * change.seconds)} ms a step, {number(change.tokens_per_s)} tokens/s{_mark(change.fits)}"
    formula = "B * KV / W + max(2 * B * P / C, bytes / W), as above, with this change"
    return Figure(change.name, value, "", formula, f"{_INFERENCE}, Tricks and appendix D")


def _picture(found: Sequence[OperatingPoint], best: Sequence[OperatingPoint], context: int, hardware: str) -> str:
    def points(chosen: Sequence[OperatingPoint]) -> list[tuple[float, float]]:
        return [(1e3 * each.seconds, each.tokens_per_s) for each in chosen]

    front = sorted(best, key=lambda each: each.seconds)
    labels = [f"{each.batch} on {each.tp}" for each in front]
    series = [
        Series("Pareto front, batch on devices", points(front), labels, line=True),
        Series("other points", points([each for each in found if each not in best]), filled=False),
    ]
    title = f"Decode on {hardware} at a context of {context:,}"
    return chart(title, "latency of a step, ms", "tokens/s of one device", series)
