"""Bytes that a model needs: weights, KV, workspace; and the tokens and sequences for which a memory has room.

Weights are those that Baton's engine has in memory. Norms are float32, whatever the dtype. For native kernels (CPUs)
matrices are padded to panels, and biases are float32. With `tp` tensor-parallel ranks each has a share of heads, MLP
and vocabulary, and all norms (`baton.model.layers`; Shoeybi et al. 2019, arXiv:1909.08053). If there are more ranks
than KV heads, several ranks have the same head. With pipeline stages each has some layers; the first has the embedding,
and the last the final norm and the output projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.planner.shape import ModelShape

PANEL = 32
"""Rows and columns of weights for native kernels are padded to a multiple of this (kPanel and kInputs, kernels.h)."""

BUFFERS = 3
"""Default number of device buffers for segments (--num-kv-buffers)."""

CPU_RUNTIME = 250 << 20
"""Memory of an engine's process on a CPU without weights, KV and workspace, with libraries: 233 MiB with native kernels
and 249 MiB with torch's were measured (resident, torch 2, Linux on x86)."""

_SPLIT_KEYS, _ROW_TILE = 1024, 16

BFLOAT16_ROWS = ("avx512_bf16", "amx")
"""Instruction sets whose products read rows of bfloat16 if weights are bfloat16."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The layers of a pipeline stage, and whether it is the first and the last one."""

    layers: int
    first: bool = True
    last: bool = True


def pipeline_stages(shape: ModelShape, pipeline: int) -> tuple[PipelineStage, ...]:
    """The stages of a pipeline; the first of them have one layer more if it does not divide the layers."""
    if pipeline > shape.num_layers:
        raise ConfigError(f"pipeline_parallel: {pipeline} stages for {shape.num_layers} layers")
    each, more = divmod(shape.num_layers, pipeline)
    return tuple(PipelineStage(each + (index < more), index == 0, index == pipeline - 1) for index in range(pipeline))


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights of one rank of one stage, by kind."""

    matrices: int
    embeddings: int
    biases: int
    norms: int
    frequencies: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.embeddings + self.biases + self.norms + self.frequencies


def weights(
    shape: ModelShape, bits: int, *, packed: bool = False, tp: int = 1, stage: PipelineStage | None = None
) -> Weights:
    """Weights of a rank, the first one, which also has the biases that are added once.

    `bits` of an element of the matrices. Norms are float32 and rotary frequencies float64. Biases are float32 if
    `packed` for native kernels, else they have `bits`, or 16 if that is more. Scales of quantized weights are not
    counted, because they depend on the method. Raises ConfigError if the ranks do not divide heads and MLP.
    """
    stage = stage or PipelineStage(shape.num_layers)
    heads, kv_heads = heads_per_rank(shape, tp)
    inner, hidden, dim = shape.intermediate_size // tp, shape.hidden_size, shape.head_dim
    experts = shape.experts or 1

    def matrix(rows: int, columns: int) -> int:
        return _padded(rows, PANEL) * _padded(columns, PANEL) if packed else rows * columns

    layer = matrix((heads + 2 * kv_heads) * dim, hidden) + matrix(hidden, heads * dim)
    layer += experts * (2 * matrix(inner, hidden) + matrix(hidden, inner))
    # A tied projection has a copy of its own only if the embedding is on another stage.
    tables = int(stage.first) + int(stage.last and not (shape.tied and stage.first))
    biases = (heads + 2 * kv_heads) * dim * shape.qkv_bias + hidden * shape.o_bias
    biases += experts * (2 * inner + hidden) * shape.mlp_bias
    norms = stage.layers * shape.layer_norms + hidden * stage.last
    return Weights(
        matrices=_bytes(stage.layers * layer, bits),
        embeddings=_bytes(tables * matrix(-(-shape.vocab_size // tp), hidden), bits),
        biases=_bytes(stage.layers * biases, 32 if packed else max(bits, 16)),
        norms=4 * norms,
        frequencies=8 * (dim // 2),
    )


def heads_per_rank(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Heads and KV heads of a rank, which has one at least. Raises ConfigError if the ranks do not divide the model."""
    if problem := _indivisible(shape, tp):
        sizes = (size for size in range(1, shape.num_heads + 1) if not _indivisible(shape, size))
        raise ConfigError(f"tensor_parallel: {problem}; possible: {', '.join(map(str, sizes))}")
    return shape.num_heads // tp, max(1, shape.num_kv_heads // tp)


def divides(shape: ModelShape, tp: int) -> bool:
    """Whether so many ranks divide heads and MLP, and divide the KV heads or are a multiple of them."""
    return not _indivisible(shape, tp)


def _indivisible(shape: ModelShape, tp: int) -> str:
    """The reason why so many ranks do not divide the model; empty if they do."""
    for what, total in (("heads", shape.num_heads), ("columns of the MLP", shape.intermediate_size)):
        if total % tp:
            return f"{tp} ranks do not divide {total} {what}"
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        return f"{tp} ranks neither divide {shape.num_kv_heads} KV heads nor are a multiple of them"
    return ""


def kv_token_bytes(shape: ModelShape, bits: int, *, tp: int = 1, layers: int | None = None) -> int:
    """Bytes of one token's K and V on a rank: 2 * layers * KV heads * head dim * bits / 8, with one KV head at least.

    Source: "How to Scale Your Model", chapter Inference.
    Layers with a sliding window count whole, because the pool has pages for every token in all layers.
    """
    layers = shape.num_layers if layers is None else layers
    return _bytes(2 * layers * max(1, shape.num_kv_heads // tp) * shape.head_dim, bits)


def mlp_token_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Bytes of one token's gate and up of one layer: 2 * MLP * bytes of an element."""
    return 2 * shape.intermediate_size * (shape.active_experts or 1) * element_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A KV pool: number of pages, tokens in a page, bytes of a page."""

    pages: int
    page_size: int
    page_bytes: int

    @classmethod
    def within(cls, room: int, page_size: int, token_bytes: int) -> PoolSize:
        """The most pages that `room` bytes hold."""
        return cls(max(0, room) // (page_size * token_bytes), page_size, page_size * token_bytes)

    @property
    def tokens(self) -> int:
        """Tokens for which there are pages: the longest prompt, if it is alone."""
        return self.pages * self.page_size

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    def sequences(self, length: int) -> int:
        """Number of sequences of `length` tokens that fit at once; each has whole pages."""
        return self.pages // -(-length // self.page_size)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Tensors of a pass beside weights and KV: `total` bytes, and the name of the phase, or buffer, that has most."""

    total: int
    largest_part: str


def torch_workspace(
    shape: ModelShape,
    tokens: int,
    element_bytes: int,
    *,
    samples: int = 1,
    tp: int = 1,
    lm_head: bool = True,
) -> Workspace:
    """Tensors of a pass of `tokens` tokens with torch's operators, in the order of a layer (`baton.model.decoder`).

    Each phase has the embedded tokens and the layer's input, `[tokens, hidden]`, and the angles, float32, two of
    `[tokens, head dim]`. Beside these:
    rotation    normalised input; Q, K and V; Q and K in float32, times cosines, rolled, and the sum of both
    attention   Q and K; the result with its copy. Masks, which kernels such as flash-attn do not have, are not counted
    MLP         Q and K; the MLP's input, normalised; gate, up and their product
    head        logits of `samples` tokens, also in float32, on a stage that has the `lm_head`
    """
    heads, kv_heads = heads_per_rank(shape, tp)
    hidden, dim = shape.hidden_size * element_bytes, shape.head_dim
    inner = shape.intermediate_size // tp * (shape.active_experts or 1) * element_bytes
    qk, wide = (heads + kv_heads) * dim * element_bytes, (heads + kv_heads) * dim * 4
    kv = kv_heads * dim * element_bytes
    phases = {
        "rotation": tokens * (hidden + qk + kv + qk * shape.qk_norm + wide * (element_bytes < 4) + 3 * wide),
        "attention": tokens * (qk + 2 * (qk - kv)),
        "MLP": tokens * (2 * hidden + qk + 3 * inner),
        "head": samples * shape.vocab_size * (element_bytes + 4) if lm_head else 0,
    }
    largest = max(phases, key=phases.__getitem__)
    return Workspace(tokens * (2 * hidden + 2 * dim * 4) + phases[largest], largest)


def native_workspace(
    shape: ModelShape,
    contexts: Sequence[tuple[int, int]],
    *,
    threads: int,
    bits: int,
    isa: str = "amx",
    logits: bool = False,
    tp: int = 1,
) -> Workspace:
    """Tensors of a pass with native kernels (`Forward::reserve` of baton/native/src/forward.h), within 5%.

    `contexts` has the new tokens and the length of each sequence; one token of each is sampled. `bits` of an element
    of the weights and `isa`, the instruction set, decide whether products read rows of bfloat16 or float32. `logits`
    are those of the sampled tokens. A context of more than 1,024 tokens has a partial result for each 1,024.
    """
    element = 2 if bits <= 16 and isa in BFLOAT16_ROWS else 4
    tokens, dim = sum(new for new, _ in contexts), shape.head_dim
    heads, kv_heads = heads_per_rank(shape, tp)
    inner = shape.intermediate_size // tp
    splits = sum(-(-length // _SPLIT_KEYS) for _, length in contexts if length > _SPLIT_KEYS)
    buffers = {
        "hidden states": tokens * shape.hidden_size * 4,
        "inputs of products": tokens * element * sum(_padded(each, PANEL) for each in (shape.hidden_size, heads * dim)),
        "inner": tokens * _padded(inner, PANEL) * element,
        "qkv and angles": tokens * (heads + 2 * kv_heads + 1) * dim * 4,
        "partial results": splits * kv_heads * _padded(heads // kv_heads, _ROW_TILE) * dim * 4,
        "logits": len(contexts) * shape.vocab_size * 4 * logits,
        # AMX has a fifth more, others have a fifth less.
        "threads": threads * 4 * (26_000 + 560 * _padded(dim, PANEL)),
    }
    return Workspace(sum(buffers.values()), max(buffers, key=buffers.__getitem__))


@dataclass(frozen=True, slots=True)
class Streaming:
    """Bytes on the device beside weights and workspace for a prompt whose KV is in host memory, one layer at a time.

    `layer`: the KV of one whole layer. `joined`: the same after the KV of a new chunk was appended with `cat`, which
    has old and new tensors at once. `ring`: Baton's buffers for segments. `copied`: bytes that go to the device for the
    whole prompt.
    """

    layer: int
    joined: int
    ring: int
    copied: int


def streaming(
    shape: ModelShape,
    tokens: int,
    chunk: int,
    bits: int,
    *,
    segment: int = 16384,
    buffers: int = BUFFERS,
    tp: int = 1,
) -> Streaming:
    """Sizes of a streaming prefill of `tokens` tokens in chunks of `chunk` (docs/long-prompts.md).

    A layer has `tokens` times its bytes of a token; ring: `buffers` times `segment` such tokens. Chunk i of n reads the
    KV of the i chunks before it in each layer, so `copied` = layers * n * (n - 1) / 2 * chunk * bytes of a token.
    """
    token = kv_token_bytes(shape, bits, tp=tp, layers=1)
    chunks = -(-tokens // chunk)
    copied = shape.num_layers * chunks * (chunks - 1) // 2 * chunk * token
    return Streaming(tokens * token, 2 * tokens * token, buffers * segment * token, copied)


def _bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
