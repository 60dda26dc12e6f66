"""`baton plan parallel`: how devices share a model, and what their communication costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from baton.cli.plan.figures import BATCH, BOOK, Figure, ShapeParam, output_options, show, with_positions
from baton.config.options import usage_errors
from baton.planner import communication, memory
from baton.planner.communication import Parallelism, Workload
from baton.planner.hardware import Hardware, hardware_named
from baton.planner.roofline import decode_time
from baton.planner.shape import ModelShape

_COUNT = click.IntRange(min=1)
_BITS = click.IntRange(1, 32)
_SHARDING, _LATENCY = f"{BOOK}, Inference, Sharding", f"{BOOK}, Inference, appendix C"
_MEGATRON, _GPIPE = "Shoeybi et al. 2019, arXiv:1909.08053", "Huang et al. 2018, arXiv:1811.06965"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values of the options."""

    model: ModelShape
    hardware: Hardware
    parallelism: Parallelism
    batch: int
    context: int
    weight_bits: int
    kv_bits: int

    @property
    def workload(self) -> Workload:
        """Tokens and bits that a copy of the model holds."""
        return Workload(self.batch, self.batch * self.context, self.weight_bits, self.kv_bits)

    @property
    def array(self) -> int:
        """Bytes of the activations of one step."""
        return communication.activation_bytes(self.model, self.batch)


@click.command()
@click.argument("model", type=ShapeParam())
@click.option("--hardware", required=True, help="A device, such as h100, or FILE.json.")
@click.option("--tensor-parallel", type=_COUNT, default=1, show_default=True, help="Devices that share each layer.")
@click.option("--pipeline-parallel", type=_COUNT, default=1, show_default=True, help="Stages that share the layers.")
@click.option("--batch", type=BATCH, default=32, show_default=True, help="Sequences of a step.")
@click.option("--context", type=_COUNT, default=8192, show_default=True, help="Tokens of each sequence.")
@click.option("--weight-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of the weights.")
@click.option("--kv-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of KV.")
@output_options
def parallel(
    model: ModelShape,
    hardware: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    batch: int,
    context: int,
    weight_bits: int,
    kv_bits: int,
    as_json: bool,
    explain: bool,
) -> None:
    """Compute how devices share MODEL, and what their communication costs in a decode step.

    MODEL is a folder, a config.json, or a name such as llama-3.1-8b. Activations have 16 bits.
    """
    parallelism = Parallelism(tensor_parallel, pipeline_parallel)
    with usage_errors():
        row = hardware_named(hardware)
        memory.heads_per_rank(model, tensor_parallel)
        memory.pipeline_stages(model, pipeline_parallel)
    plan = _Plan(model, row, parallelism, batch, context, weight_bits, kv_bits)
    groups = {"pairs of matrices on each device": _pairs(plan), "a layer": _layer(plan), "a step": _step(plan)}
    if pipeline_parallel > 1:
        groups["share of the time in which a stage works"] = _utilisation(pipeline_parallel)
    groups |= {"limits": _limits(plan), "advice": _advice(plan)}
    show(groups, as_json=as_json, explain=explain)


def _pairs(plan: _Plan) -> list[Figure]:
    model, tp = plan.model, plan.parallelism.tp
    heads, kv_heads = memory.heads_per_rank(model, tp)
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    largest = communication.rank_bytes(model, plan.parallelism, replace(plan.workload, tokens=0))
    layers = memory.pipeline_stages(model, plan.parallelism.pp)[0].layers
    token = memory.kv_token_bytes(model, plan.kv_bits, tp=tp, layers=layers)
    experts = f" of each of {model.experts} experts" if model.experts else ""
    share = f"/ {tp} devices"
    return [
        _matrix("q, k, v, by columns", hidden, (heads + 2 * kv_heads) * model.head_dim, f"heads {share}"),
        _matrix("o, by rows", heads * model.head_dim, hidden, f"heads {share}, then an all-reduce"),
        _matrix(f"gate and up, by columns{experts}", hidden, 2 * inner, f"MLP {share}"),
        _matrix(f"down, by rows{experts}", inner, hidden, f"MLP {share}, then an all-reduce"),
        Figure("weights of the largest rank", largest, "B", "as in `baton plan memory`", "baton/planner/memory.py"),
        Figure("KV of a token", token, "B", f"2 * {layers} layers * {kv_heads} KV heads * {model.head_dim}", _MEGATRON),
    ]


def _matrix(name: str, inputs: int, outputs: int, formula: str) -> Figure:
    return Figure(name, f"{inputs:,} x {outputs:,}", "", formula, _MEGATRON)


def _layer(plan: _Plan) -> list[Figure]:
    tp, array = plan.parallelism.tp, plan.array
    if tp == 1:
        return [Figure("communication", 0.0, "us", "one device", _MEGATRON)]
    seconds = communication.layer_seconds(plan.model, plan.batch, tp, plan.hardware)
    sent = int(communication.ALL_REDUCES * communication.all_reduce_bytes(array, tp))
    bound = "yes" if communication.is_latency_bound(array, tp, plan.hardware) else "no"
    half = communication.hops(array, tp, plan.hardware)
    hops = f"2 all-reduces * 2 * {half.count} hop{'s' * (half.count > 1)}"
    hop = f"{half.sent:,.0f} B / {half.bytes_per_s:.4g} B/s"
    return [
        Figure("array of an all-reduce", array, "B", f"{plan.batch} * {plan.model.hidden_size} * 2 B", _MEGATRON),
        Figure("sent by each device", sent, "B", f"2 * 2 * {array:,} B * {tp - 1} / {tp}", _MEGATRON),
        Figure("time", 1e6 * seconds, "us", f"{hops} * max(1 us, {hop})", _LATENCY),
        Figure("bound by latency", bound, "", f"{hop} = {1e6 * half.transfer_seconds:.3g} us, against 1 us", _LATENCY),
    ]


def _step(plan: _Plan) -> list[Figure]:
    model, parallelism, row = plan.model, plan.parallelism, plan.hardware
    bits = {"weight_bits": plan.weight_bits, "kv_bits": plan.kv_bits}
    work = decode_time(model, row, plan.batch, plan.context, devices=parallelism.tp, **bits).seconds
    talk = communication.step_seconds(model, plan.batch, parallelism, row)
    layer = communication.layer_seconds(model, plan.batch, parallelism.tp, row)
    reduces = f"{model.num_layers} layers * {1e6 * layer:.4g} us"
    link = communication.link_bandwidth(parallelism.devices, row)
    transfers = f" + {parallelism.pp - 1} * (1 us + {plan.array:,} B / {link:.4g} B/s)"
    formula = reduces + (transfers if parallelism.pp > 1 else "")
    needed = communication.rank_bytes(model, parallelism, plan.workload)
    fits = with_positions("yes" if needed <= row.memory else "no", plan.context, model)
    sizes = f"weights and KV of the largest rank: {needed:,} of {row.memory:,} B"
    figures = [
        Figure("fits the memory", fits, "", sizes, "baton/planner/memory.py"),
        Figure("reading and computing", 1e3 * work, "ms", "as in `baton plan roofline`", f"{BOOK}, Inference"),
        Figure("communication", 1e3 * talk, "ms", formula, _LATENCY),
        Figure("step", 1e3 * (work + talk), "ms", "the sum: nothing overlaps", ""),
    ]
    if parallelism.pp > 1:
        figures.append(Figure("sent between two stages", plan.array, "B", "the array of an all-reduce", _GPIPE))
    return figures


def _utilisation(stages: int) -> list[Figure]:
    return [
        Figure(
            f"{count} micro-batch{'es' * (count > 1)}",
            communication.pipeline_utilisation(count, stages),
            "",
            f"{count} / ({count} + {stages} - 1)",
            _GPIPE,
        )
        for count in (1, stages, 4 * stages)
    ]


def _limits(plan: _Plan) -> list[Figure]:
    model, row = plan.model, plan.hardware
    hidden, inner = model.hidden_size, model.intermediate_size
    joined = row.fast_link_devices
    fast, slow = communication.bandwidth_ratio(joined, row), communication.bandwidth_ratio(joined + 1, row)
    bound = communication.sharding_limit(model, plan.batch, plan.weight_bits, row)
    formula = f"{inner} * {plan.weight_bits} / 16 / ({plan.batch} * {fast:.4g})"
    if bound >= joined:
        formula = f"max({joined}, the same with {slow:.4g} beyond {joined} devices), because {formula} is more"
    axes, total = communication.torus_axes(row)
    crossing = communication.weight_stationary_crossing(hidden, inner, axes, total)
    derived = f"4 * {total}^2 * {inner} / ({axes[0]} * {axes[1]} * {hidden})"
    return [
        Figure("memory over link bandwidth", fast, "", f"{row.bytes_per_s:.4g} / {row.device_link:.4g} B/s", _SHARDING),
        Figure(
            "tensor parallel until communication is longer",
            bound,
            "devices",
            formula,
            _SHARDING,
        ),
        Figure(
            "2D weight-stationary is better from",
            crossing,
            "devices",
            derived,
            "derived in baton/planner/communication.py",
        ),
    ]


def _advice(plan: _Plan) -> list[Figure]:
    whole = memory.weights(plan.model, plan.weight_bits).total
    kv = plan.batch * plan.context * memory.kv_token_bytes(plan.model, plan.kv_bits)
    said = communication.recommend_parallelism(plan.model, plan.workload, plan.hardware)
    formula = f"weights {whole:,} B + KV {kv:,} B, on devices of {plan.hardware.memory:,} B"
    return [
        Figure(
            f"batch {plan.batch} at a context of {plan.context:,}", said, "", formula, "baton/planner/communication.py"
        )
    ]
