"""`baton plan roofline`: the least time of prefills and decode steps, and what limits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from baton.cli.options import Counts, ReportFile, extra_installed
from baton.cli.picture import Series, chart
from baton.cli.plan.figures import BOOK, Figure, Model, output_options, show
from baton.config.options import usage_errors
from baton.engine.contract import min_overlap_chunk
from baton.planner import roofline as limits
from baton.planner.hardware import WIDTHS, Hardware, hardware_named
from baton.planner.memory import weights
from baton.planner.shape import ModelShape

Rates = Callable[[int], Hardware]
"""The hardware, with its rates at a number of rows."""

_INFERENCE, _ROOFLINE = f"{BOOK}, Inference", f"{BOOK}, Roofline"
_BITS = click.IntRange(1, 32)
_FRONT_BATCHES = tuple(1 << power for power in range(11))


@click.command()
@click.argument("model", type=Model())
@click.option("--hardware", required=True, help="A name such as h100; or this, to measure this machine.")
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
    the weights. Communication counts only in the last two parts; `baton plan parallel` shows it.
    """
    if not batch or not context:
        raise click.UsageError("--batch and --context need a number")
    with usage_errors():
        rates = _rates(model, hardware, weight_bits)
        weights(model, weight_bits, tensor=tensor_parallel)
    steps = _Steps(model, rates, weight_bits, kv_bits, tensor_parallel)
    device = rates(max(batch))
    groups = {
        f"hardware: {hardware}": _hardware(device),
        "batch from which a step computes longer than it reads weights": _critical(model, device),
        "attention": _attention(model, device, kv_bits),
    }
    for tokens in context:
        groups[f"decode at a context of {tokens:,}"] = [
            figure for count in batch for figure in steps.decode(count, tokens)
        ]
    groups["prefill in one chunk"] = [steps.prefill(tokens) for tokens in context]
    largest, first = max(batch), context[0]
    found = limits.choices(model, rates, _front(batch, hardware), first, weight_bits=weight_bits, kv_bits=kv_bits)
    best = [each for each, keep in zip(found, _on_front(found), strict=True) if keep]
    groups[f"Pareto front at a context of {first:,}, in tokens/s of one device"] = [_choice(each) for each in best]
    groups[f"with a batch of {largest} and a context of {first:,}, on one device: if ..., then"] = [
        _change(each)
        for each in limits.changes(model, device, largest, first, weight_bits=weight_bits, kv_bits=kv_bits)
    ]
    show(groups, as_json=as_json, explain=explain)
    if plot is not None:
        if not found:
            raise click.ClickException("there is nothing to draw: no batch fits the memory")
        plot.write_text(_picture(found, best, first, hardware), encoding="utf-8")


def _rates(model: ModelShape, hardware: str, weight_bits: int) -> Rates:
    if hardware != "this":
        row = hardware_named(hardware)
        return lambda rows: row
    with extra_installed("worker"):
        import torch

        from baton.bench.probes import this_machine

        return this_machine(model, torch.float32 if weight_bits > 16 else torch.bfloat16)


def _front(batch: Sequence[int], hardware: str) -> Sequence[int]:
    """Batches of the Pareto front; on this machine each would be measured, so there are only those asked for."""
    return batch if hardware == "this" else _FRONT_BATCHES


def _on_front(found: Sequence[limits.Choice]) -> list[bool]:
    return limits.pareto([(each.seconds, each.tokens_per_s) for each in found])


def _hardware(device: Hardware) -> list[Figure]:
    ratio = f"{device.flops[0]:.5g} FLOP/s / {device.bytes_per_s:.5g} B/s"
    rates = [
        Figure(f"FLOP/s in {bits} bits", rate, "FLOP/s", "", device.source)
        for bits, rate in zip(WIDTHS, device.flops, strict=True)
        if rate is not None
    ]
    return [
        *rates,
        Figure("memory bandwidth", device.bytes_per_s, "B/s", "", device.source),
        Figure("memory", device.memory, "B", "", device.source),
        Figure("FLOP:byte in 16 bits", device.flops_per_byte, "", ratio, _ROOFLINE),
    ]


def _critical(model: ModelShape, device: Hardware) -> list[Figure]:
    sparsity = model.experts / model.active_experts if model.experts else 1
    experts = f" * {model.experts} experts / {model.active_experts}" if model.experts else ""
    figures = []
    for name, bits, width in (
        ("bf16", 16, 16),
        ("int8 weights, bf16 arithmetic", 8, 16),
        ("int4 weights, bf16 arithmetic", 4, 16),
        ("int8", 8, 8),
        ("int4", 4, 4),
    ):
        # Without instructions of its own, a width is multiplied as the next wider one, which another row has.
        if device.flops[WIDTHS.index(width)] is None:
            continue
        flops = device.flops_per_s(width)
        value = limits.critical_batch(flops, device.bytes_per_s, bits, sparsity)
        formula = f"{flops:.5g} FLOP/s / {device.bytes_per_s:.5g} B/s * {bits} / 16{experts}"
        figures.append(Figure(name, value, "sequences", formula, f"{_INFERENCE}, Linear operations"))
    return figures


def _attention(model: ModelShape, device: Hardware, kv_bits: int) -> list[Figure]:
    intensity = limits.attention_intensity(model, kv_bits)
    formula = f"2 * {model.num_heads} heads / ({model.num_kv_heads} KV heads * {kv_bits} / 8)"
    limit = "memory at any batch" if intensity < device.flops_per_byte else "arithmetic"
    source = f"{BOOK}, Transformers, question 4"
    figures = [
        Figure("FLOP for each byte of KV in decode", intensity, "", formula, source),
        Figure("limit of decode attention", limit, "", f"{intensity:.4g} against {device.flops_per_byte:.4g}", source),
    ]
    if device.host_link:
        group = model.num_heads // model.num_kv_heads
        chunk = min_overlap_chunk(device.flops[0], device.host_link, group, kv_bits)
        formula = f"{device.flops[0]:.5g} FLOP/s / {device.host_link:.4g} B/s * {kv_bits} / 8 / (2 * {group})"
        figures.append(
            Figure("chunk that hides copies of KV from the host", chunk, "tokens", formula, "docs/long-prompts.md")
        )
    return figures


class _Steps:
    """Figures of steps and prefills with the options of the command."""

    def __init__(self, model: ModelShape, rates: Rates, weight_bits: int, kv_bits: int, devices: int) -> None:
        self._model, self._rates, self._devices = model, rates, devices
        self._weight_bits, self._kv_bits = weight_bits, kv_bits

    def decode(self, batch: int, context: int) -> list[Figure]:
        model, device = self._model, self._rates(batch)
        bits = {"weight_bits": self._weight_bits, "kv_bits": self._kv_bits}
        step = limits.decode_time(model, device, batch, context, devices=self._devices, **bits)
        kv = limits.kv_read_bytes(model, context, self._kv_bits)
        read = limits.weights_read(model, batch) * self._weight_bits / 8
        rate, flops = self._devices * device.bytes_per_s, self._devices * device.flops_per_s(16)
        formula = (
            f"{batch} * {kv:.5g} B / {rate:.5g} B/s + "
            f"max(2 * {batch} * {model.step_weights:,} / {flops:.5g} FLOP/s, {read:.5g} B / {rate:.5g} B/s)"
        )
        source = f"{_INFERENCE}, Theoretical estimates; {device.source}"
        resident = weights(model, self._weight_bits, tensor=self._devices).total
        needed = resident + batch * context * model.kv_token_elements * self._kv_bits / 8 / self._devices
        fits = "" if needed <= device.memory else ", more than fits the memory"
        name = f"batch {batch}{fits}"
        return [
            Figure(f"{name}: step, limited by {step.bound}", 1e3 * step.seconds, "ms", formula, source),
            Figure(f"{name}: throughput", batch / step.seconds, "tokens/s", f"{batch} / step", _INFERENCE),
        ]

    def prefill(self, tokens: int) -> Figure:
        device = self._rates(tokens)
        seconds = limits.prefill_time(self._model, device, tokens, weight_bits=self._weight_bits, devices=self._devices)
        flops = limits.prefill_flops(self._model, tokens)
        read = limits.weights_read(self._model, tokens) * self._weight_bits / 8
        formula = (
            f"max({flops:.5g} FLOP / {self._devices * device.flops[0]:.5g} FLOP/s, "
            f"{read:.5g} B / {self._devices * device.bytes_per_s:.5g} B/s)"
        )
        return Figure(f"prompt of {tokens:,}", 1e3 * seconds, "ms", formula, f"{_ROOFLINE}; {device.source}")


def _choice(choice: limits.Choice) -> Figure:
    name = f"tensor parallel {choice.tensor}, batch {choice.batch}: {1e3 * choice.seconds:.4g} ms a step"
    formula = f"{choice.batch} / {choice.seconds:.5g} s / {choice.tensor}; the step with its all-reduces"
    return Figure(name, choice.tokens_per_s, "tokens/s", formula, f"{_INFERENCE}; no other choice is better in both")


def _change(change: limits.Change) -> Figure:
    value = f"{1e3 * change.seconds:.4g} ms a step, {change.tokens_per_s:,.4g} tokens/s"
    formula = "B * KV / W + max(2 * B * P / C, bytes / W), as above, with this change"
    return Figure(change.name, value, "", formula, f"{_INFERENCE}, Tricks and appendix D")


def _picture(found: Sequence[limits.Choice], best: Sequence[limits.Choice], context: int, hardware: str) -> str:
    def points(chosen: Sequence[limits.Choice]) -> list[tuple[float, float]]:
        return [(1e3 * each.seconds, each.tokens_per_s) for each in chosen]

    front = sorted(best, key=lambda each: each.seconds)
    labels = [f"{each.batch} on {each.tensor}" for each in front]
    series = [
        Series("Pareto front, batch on devices", points(front), labels, line=True),
        Series("other choices", points([each for each in found if each not in best]), filled=False),
    ]
    title = f"Decode on {hardware} at a context of {context:,}"
    return chart(title, "latency of a step, ms", "tokens/s of one device", series)
