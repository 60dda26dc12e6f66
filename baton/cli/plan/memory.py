"""`baton plan memory`: bytes of weights, KV and workspace, and the tokens and sequences that fit beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from baton.cli.plan.figures import (
    BATCH,
    BOOK,
    Figure,
    MemorySize,
    ShapeParam,
    output_options,
    show,
    size_text,
    with_positions,
)
from baton.config.options import Size, usage_errors
from baton.engine.config import default_page_size, default_segment_tokens
from baton.errors import ConfigError
from baton.native.library import ISAS
from baton.planner.memory import (
    BUFFERS,
    CPU_RUNTIME,
    PipelineStage,
    PoolSize,
    Workspace,
    heads_per_rank,
    kv_token_bytes,
    mlp_token_bytes,
    native_workspace,
    pipeline_stages,
    streaming,
    torch_workspace,
    weights,
)
from baton.planner.shape import ModelShape

_COUNT = click.IntRange(min=1)
_BITS = click.IntRange(1, 32)
_ENGINE, _STREAMING = "baton/engine/factory.py", "docs/long-prompts.md"


@dataclass(frozen=True, slots=True)
class _Options:
    """Values of the options."""

    shape: ModelShape
    memory: tuple[int, ...]
    weight_bits: int
    kv_bits: int
    tensor_parallel: int
    pipeline_parallel: int
    kv_home: str
    host_memory: int | None
    context: int | None
    batch: int
    chunk_size: int
    device: str
    isa: str
    threads: int
    page_size: int
    runtime: int | None

    def __post_init__(self) -> None:
        if self.host_memory is not None and not self.streams:
            raise ConfigError("host_memory: is for --device cuda with --kv-home host")

    @property
    def streams(self) -> bool:
        """Whether KV comes to the device segment by segment."""
        return self.kv_home == "host" and self.device == "cuda"

    @property
    def page_tokens(self) -> int:
        return self.page_size or default_page_size(self.device, self.context or self.shape.max_positions or 1)

    @property
    def pages(self) -> int:
        """Pages of all sequences; none without a context."""
        return self.batch * -(-(self.context or 0) // self.page_tokens)

    @property
    def host_token(self) -> int:
        """Bytes of a token's KV of all ranks."""
        return self.tensor_parallel * kv_token_bytes(self.shape, self.kv_bits, tp=self.tensor_parallel)

    @property
    def element(self) -> int:
        """Bytes of an element of activations: quantized weights are multiplied by elements of 16 bits."""
        return 4 if self.weight_bits > 16 else 2


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a stage: figures that do not depend on the number of tokens, their sum, and bytes of a token's KV."""

    figures: list[Figure]
    fixed: int
    token: int

    def needed(self, given: _Options) -> int:
        """Bytes with the KV that is asked for, where it is on the device."""
        return self.fixed + (0 if given.streams else given.pages * given.page_tokens * self.token)


@click.command()
@click.argument("model", type=ShapeParam())
@click.option("--memory", type=MemorySize(), multiple=True, help="Memory of a device: 80GiB, or h100; may be repeated.")
@click.option("--weight-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of the weights.")
@click.option("--kv-bits", type=_BITS, default=16, show_default=True, help="Bits of an element of KV.")
@click.option("--tensor-parallel", type=_COUNT, default=1, show_default=True, help="Ranks that share each layer.")
@click.option("--pipeline-parallel", type=_COUNT, default=1, show_default=True, help="Stages that share the layers.")
@click.option(
    "--kv-home",
    type=click.Choice(["device", "host"]),
    default="device",
    show_default=True,
    help="Memory that has the KV.",
)
@click.option("--host-memory", type=MemorySize(), help="Host memory for the KV of all ranks, with --kv-home host.")
@click.option("--context", type=_COUNT, help="Tokens of each sequence: prompt and output.")
@click.option("--batch", type=BATCH, default=1, show_default=True, help="Sequences at the same time.")
@click.option("--chunk-size", type=_COUNT, default=2048, show_default=True, help="Tokens of a pass of prefill.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Kind of device.")
@click.option("--isa", type=click.Choice(ISAS), default="amx", show_default=True, help="Instructions of a CPU.")
@click.option("--threads", type=_COUNT, default=1, show_default=True, help="Threads on a CPU.")
@click.option("--page-size", type=_COUNT, help="Tokens in a page.  [default: the engine's]")
@click.option(
    "--runtime", type=Size(), help="Memory of the process without a model.  [default: 250MiB on a CPU, else 0]"
)
@output_options
def memory(model: ModelShape, as_json: bool, explain: bool, page_size: int | None, **options: Any) -> None:
    """Compute the memory that MODEL needs, and what fits into a device.

    MODEL is a folder, a config.json, or a name such as llama-3.1-8b. With 16 or 32 bits and one rank, sizes are those
    that the engine allocates.
    """
    with usage_errors():
        given = _Options(shape=model, page_size=page_size or 0, **options)
        stages = pipeline_stages(model, given.pipeline_parallel)
        ranks = [_rank(given, stage) for stage in stages]
    largest = max(ranks, key=lambda rank: rank.needed(given))
    count = given.tensor_parallel * given.pipeline_parallel
    engine = "engine" if count == 1 else f"engine: the largest of {count} ranks"
    groups = {"model": _model(model), engine: largest.figures + _needed(given, largest)}
    if given.streams and given.context:
        groups["other ways to stream a prompt"] = _streaming(given, given.context)
    for size in given.memory:
        groups[f"memory of {size_text(size)}"] = _left(given, ranks, size)
    if given.host_memory is not None:
        groups[f"host memory of {size_text(given.host_memory)}"] = _pool(given, given.host_memory, given.host_token)
    show(groups, as_json=as_json, explain=explain)


def _model(shape: ModelShape) -> list[Figure]:
    rest = shape.parameters - shape.matrix_weights
    every = f"{shape.matrix_weights:,} of matrices and embeddings + {rest:,} of biases and norms"
    layers = f"{shape.num_layers} layers * {shape.layer_weights + shape.biases(shape.active_experts):,}"
    used = f"{layers} + {shape.lm_head_weights:,} of the output projection; without embedding and norms"
    return [
        Figure("parameters", shape.parameters, "", every, "tensors of the checkpoint"),
        Figure("activated parameters", shape.activated, "", used, "published counts of Qwen1.5"),
    ]


def _rank(given: _Options, stage: PipelineStage) -> _Rank:
    shape, tp = given.shape, given.tensor_parallel
    cpu = given.device == "cpu"
    part = weights(shape, given.weight_bits, packed=cpu, tp=tp, stage=stage)
    kinds = f"matrices {part.matrices:,} + embeddings {part.embeddings:,} + biases {part.biases:,}"
    rest = f"norms (float32) {part.norms:,} + rotary frequencies {part.frequencies:,}"
    token = kv_token_bytes(shape, given.kv_bits, tp=tp, layers=stage.layers)
    heads = f"{heads_per_rank(shape, tp)[1]} KV heads * head dim {shape.head_dim}"
    experts = f" * {shape.active_experts}" if shape.active_experts else ""
    space, passed = _workspace(given, stage)
    fixed = [
        Figure("weights", part.total, "B", f"{kinds} + {rest}", "baton/model/layers.py, arXiv:1909.08053"),
        Figure("workspace", space.total, "B", passed, "baton/planner/memory.py"),
    ]
    if cpu or given.runtime is not None:
        runtime = CPU_RUNTIME if given.runtime is None else given.runtime
        fixed.append(Figure("runtime", runtime, "B", "measured", "docs/planning.md"))
    if not cpu:
        page = given.page_tokens * token
        fixed.append(Figure("spare page", page, "B", f"{given.page_tokens} tokens, of CUDA graphs", _ENGINE))
    if given.streams:
        each, length = token // stage.layers, default_segment_tokens("cuda")
        ring = BUFFERS * length * each
        fixed.append(Figure("ring", ring, "B", f"{BUFFERS} buffers * {length:,} tokens * {each:,}", _STREAMING))
    columns = f"2 * {shape.intermediate_size // tp}{experts} columns of the MLP * {given.element}"
    inner = mlp_token_bytes(shape, given.element) // tp
    each_token = [
        Figure(
            "KV of a token",
            token,
            "B",
            f"2 * {stage.layers} layers * {heads} * {given.kv_bits} / 8",
            f"{BOOK}, Inference",
        ),
        Figure("gate and up of a token", inner, "B", columns, "arXiv:2002.05202"),
    ]
    return _Rank(each_token + fixed, sum(int(each.value) for each in fixed), token)


def _workspace(given: _Options, stage: PipelineStage) -> tuple[Workspace, str]:
    """Workspace of the larger pass: a chunk of prefill, or a step of all sequences."""
    chunk = min(given.chunk_size, given.context or given.chunk_size)
    length = max(given.context or 1, chunk)
    found = []
    for queries in ([chunk], [1] * given.batch):
        tokens, samples = sum(queries), len(queries)
        if given.device == "cpu":
            contexts = [(query, length) for query in queries]
            size = native_workspace(
                given.shape,
                contexts,
                threads=given.threads,
                bits=given.weight_bits,
                isa=given.isa,
                logits=stage.last,
                tp=given.tensor_parallel,
            )
        else:
            size = torch_workspace(
                given.shape, tokens, given.element, samples=samples, tp=given.tensor_parallel, lm_head=stage.last
            )
        found.append((size, f"a pass of {tokens:,} tokens, {samples:,} of them sampled; most for {size.largest_part}"))
    return max(found, key=lambda each: each[0].total)


def _needed(given: _Options, rank: _Rank) -> list[Figure]:
    """Bytes of a rank for the sequences that are asked for."""
    if given.context is None:
        return []
    need = rank.needed(given)
    text = f"{given.pages:,} pages of {given.page_tokens} tokens * KV of a token"
    if given.streams:
        kv = given.pages * given.page_tokens * given.host_token
        home = "host memory needed"
        total = "of the device: weights, workspace and what follows"
    else:
        kv = need - rank.fixed
        home, total = f"KV of {given.batch} * {given.context:,} tokens", f"{rank.fixed:,} + {kv:,}"
    return [Figure(home, kv, "B", text, _ENGINE), Figure("memory needed", need, "B", total, "")]


def _streaming(given: _Options, length: int) -> list[Figure]:
    chunk, layers = given.chunk_size, given.shape.num_layers
    found = streaming(given.shape, length, chunk, given.kv_bits, tp=given.tensor_parallel)
    token, chunks = found.layer // length, -(-length // chunk)
    copied = f"{layers} layers * {chunks} * {chunks - 1} / 2 * {chunk:,} tokens * {token:,}"
    return [
        Figure("with one layer's KV whole", found.layer, "B", f"{length:,} tokens * {token:,}", _STREAMING),
        Figure("and new KV joined by cat", found.joined, "B", "the old and the new tensor", _STREAMING),
        Figure("copies to the device, any way", found.copied, "B", copied, _STREAMING),
    ]


def _left(given: _Options, ranks: Sequence[_Rank], size: int) -> list[Figure]:
    """Figures of a memory, at the rank that has room for the fewest tokens."""
    rank = min(ranks, key=lambda each: (size - each.fixed) // each.token)
    room = size - rank.fixed
    if room < 0:
        return [Figure("fits", "no", "", f"{rank.fixed:,} bytes are needed before any KV, {-room:,} too many", "")]
    left = Figure("left for KV", room, "B", f"{size:,} - {rank.fixed:,}", "")
    return [left] if given.streams else [left, *_pool(given, room, rank.token)]


def _pool(given: _Options, room: int, token: int) -> list[Figure]:
    pool, most = PoolSize.within(room, given.page_tokens, token), given.shape.max_positions
    text = f"floor({room:,} / {pool.page_bytes:,} of a page) = {pool.pages:,} pages"
    longest = min(pool.tokens, most or pool.tokens)
    found = [
        Figure("KV pool (--kv-memory)", pool.bytes, "B", text, _ENGINE),
        Figure("tokens", pool.tokens, "", f"{pool.pages:,} pages * {pool.page_size}", _ENGINE),
        Figure(
            "longest prompt", longest, "", f"the lower of {pool.tokens:,} and the model's {most or 'unknown limit'}", ""
        ),
    ]
    if given.context is not None:
        count, each = pool.sequences(given.context), -(-given.context // pool.page_size)
        name = f"sequences of {given.context:,} tokens"
        found.append(Figure(name, count, "", f"floor({pool.pages:,} / {each:,} pages)", _ENGINE))
        text = f"{given.batch} sequences, room for {count}"
        fits = with_positions("yes" if count >= given.batch else "no", given.context, given.shape)
        found.append(Figure("fits", fits, "", text, ""))
    return found
