"""A decoder-only transformer over paged KV: token ids in, hidden states out, and logits on request.

One forward pass takes the new tokens of any mixture of sequences (AttentionBatch) through every layer. A
layer first appends its K and V to the pages and then attends. After each layer the caller is told that the layer's K
and V are final: it may send them to another worker, and it may raise to stop the pass. A pass writes only to the pages
of its own sequences, so a stopped pass leaves nothing to undo.

A layer's config names its kind of attention and of MLP. A new kind is a class with the methods of `Attention` or `Mlp`
and an entry in `ATTENTIONS` or `MLPS`. `embed`, `run_layers` and `logits` are separate methods, because a pipeline
stage calls only some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.errors import EngineError
from baton.model.attention import AttentionBackend, AttentionBatch, KvCache, SegmentedAttention, select
from baton.model.config import LayerConfig, ModelConfig
from baton.model.families import AttentionKind, MlpKind
from baton.model.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    Rotary,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from baton.model.linear import TensorOptions
from baton.model.tensors import upload


class Loadable(Protocol):
    """A module that loads tensors of a checkpoint, part by part."""

    def parts(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor to load, as in the checkpoint, by part, such as "weight" or "q.weight"."""

    def load_shard(self, part: str, tensor: Tensor) -> None:
        """Keep this rank's share of a part's tensor, which has the shape that `parts` says."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of the checkpoint: its name, its full shape, and the function that loads it into the decoder."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], None]


def _tensors(module: Loadable, name: str = "", **merged: str) -> Iterator[CheckpointTensor]:
    """Tensors that a module loads. Their names begin with `name`.

    If the module merges several of the checkpoint's linears, `merged` has the full name of each of them.
    """
    for part, shape in module.parts().items():
        linear, _, tensor = part.rpartition(".")
        full_name = f"{merged[linear] if linear else name}.{tensor}"
        yield CheckpointTensor(full_name, shape, partial(module.load_shard, part))


@dataclass(frozen=True)
class ForwardContext:
    """Inputs that all layers of one forward pass share: rotary angles, sequences, pages and kernels."""

    angles: tuple[Tensor, Tensor]
    batch: AttentionBatch
    kv: KvCache
    attention: AttentionBackend | SegmentedAttention


class Attention(Protocol):
    """Attention of one layer; `GroupedAttention` explains the methods."""

    def append(self, x: Tensor, context: ForwardContext) -> Tensor: ...
    def attend(self, q: Tensor, context: ForwardContext) -> Tensor: ...
    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]: ...


class Mlp(Protocol):
    """MLP of one layer; `GatedMlp` explains the methods."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]: ...


class GroupedAttention(nn.Module):
    """Self-attention of one layer: projections, optional QK norm, rotary embedding, paged attention.

    Each group of query heads shares one KV head (Ainslie et al. 2023, arXiv:2305.13245).
    """

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, place: int, options: TensorOptions, parallel: TensorParallel
    ) -> None:
        """`place` is that of the layer in the KvCache."""
        super().__init__()
        self._place = place
        self._window = layer.window
        self._head_dim = config.head_dim
        self._heads = parallel.divide("num_attention_heads", config.num_heads)
        self._kv_heads = len(parallel.kv_heads(config.num_kv_heads))
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            options,
            parallel,
        )
        self.o = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.o_bias, options, parallel
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, options) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, options) if config.qk_norm else None
        self._names = config.family.names

    def append(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Put K and V of `x` `[T, hidden]` into their pages; returns the queries `[T, heads, head_dim]`."""
        heads = self.qkv(x).view(len(x), -1, self._head_dim)
        qk, v = heads.split_with_sizes((self._heads + self._kv_heads, self._kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self._heads]), self.k_norm(qk[:, self._heads :])), dim=1)
        q, k = Rotary.rotate(qk, context.angles).split_with_sizes((self._heads, self._kv_heads), 1)
        context.attention.append(context.kv, self._place, k, v, context.batch)
        return q

    def attend(self, q: Tensor, context: ForwardContext) -> Tensor:
        """Attend with the queries `[T, heads, head_dim]`, and project to `[T, hidden]`."""
        attended = context.attention.attend(context.kv, self._place, q, context.batch, self._window)
        output: Tensor = self.o(attended.flatten(1))
        return output

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """The tensors to load; `prefix` begins the layer's names."""
        names = self._names
        yield from _tensors(self.qkv, q=prefix + names.q, k=prefix + names.k, v=prefix + names.v)
        if self.q_norm is not None and self.k_norm is not None:
            yield from _tensors(self.q_norm, prefix + names.q_norm)
            yield from _tensors(self.k_norm, prefix + names.k_norm)
        yield from _tensors(self.o, prefix + names.o)


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, options: TensorOptions, parallel: TensorParallel) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        # Two weights and not one, because native kernels take each as the checkpoint has it, without a copy.
        self.gate = MergedColumnParallelLinear(hidden, {"gate": inner}, bias, options, parallel)
        self.up = MergedColumnParallelLinear(hidden, {"up": inner}, bias, options, parallel)
        self.down = RowParallelLinear(inner, hidden, bias, options, parallel)
        self._names = config.family.names

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states `[T, hidden]` to hidden states of the same shape."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """The tensors to load; `prefix` begins the layer's names."""
        yield from _tensors(self.gate, gate=prefix + self._names.gate)
        yield from _tensors(self.up, up=prefix + self._names.up)
        yield from _tensors(self.down, prefix + self._names.down)


NewAttention = Callable[[ModelConfig, LayerConfig, int, TensorOptions, TensorParallel], Attention]
ATTENTIONS: Mapping[AttentionKind, NewAttention] = {AttentionKind.GROUPED: GroupedAttention}
MLPS: Mapping[MlpKind, Callable[[ModelConfig, TensorOptions, TensorParallel], Mlp]] = {MlpKind.GATED: GatedMlp}


class DecoderLayer(nn.Module):
    """One block: attention, then an MLP. Each takes the normalised hidden states, and its result is added to them."""

    def __init__(
        self, config: ModelConfig, index: int, place: int, options: TensorOptions, parallel: TensorParallel
    ) -> None:
        """`index` is that of the layer in the whole model, `place` that among the layers of the stage and their KV."""
        super().__init__()
        self._parallel = parallel
        self._names = config.family.names
        self._prefix = self._names.layer.format(index=index)
        layer = config.layers[index]
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.attention = ATTENTIONS[layer.attention](config, layer, place, options, parallel)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options)
        self.mlp = MLPS[layer.mlp](config, options, parallel)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states `[T, hidden]` to hidden states of the same shape."""
        return self._attend(x, self.attention.append(self.attention_norm(x), context), context)

    def forward_sampled(self, x: Tensor, context: ForwardContext, sampled: Sequence[int]) -> Tensor:
        """Compute K and V of all tokens, and hidden states `[n, hidden]` of the n tokens at indices `sampled`."""
        q = self.attention.append(self.attention_norm(x), context)
        if not sampled:
            # Without a sum over the ranks, K and V of others would not be final yet.
            self._parallel.barrier()
            return x[:0]
        places = upload(sampled, torch.int64, x.device)
        if context.batch.host is None:
            return self._attend(x[places], q[places], replace(context, batch=context.batch.select(sampled)))
        # Segments of host memory are fetched for whole sequences.
        return self._add_mlp((x + self.attention.attend(q, context))[places])

    def _attend(self, x: Tensor, q: Tensor, context: ForwardContext) -> Tensor:
        return self._add_mlp(x + self.attention.attend(q, context))

    def _add_mlp(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """The tensors that this layer loads."""
        yield from _tensors(self.attention_norm, self._prefix + self._names.attention_norm)
        yield from self.attention.checkpoint_tensors(self._prefix)
        yield from _tensors(self.mlp_norm, self._prefix + self._names.mlp_norm)
        yield from self.mlp.checkpoint_tensors(self._prefix)


def stages_of(layers: int, count: int) -> list[range]:
    """The layers of each of `count` pipeline stages, as even as can be; the first ones have one more."""
    each, more = divmod(layers, count)
    ends = [each * stage + min(stage, more) for stage in range(count + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


class Decoder(nn.Module):
    """The whole model, or a pipeline stage of it. Its weights are uninitialised until `baton.model.weights` fills them.

    Only the first stage has the embedding, and only the last one the final norm and the output projection. The last
    stage of a model whose projection may be the embedding has both.
    """

    def __init__(
        self, config: ModelConfig, options: TensorOptions, parallel: TensorParallel, stage: range | None = None
    ) -> None:
        """`stage` has the layers, by their indices in the whole model; all by default."""
        super().__init__()
        self.config = config
        self.options = options
        self.stage = range(config.num_layers) if stage is None else stage
        first, last = self.stage.start == 0, self.stage.stop == config.num_layers
        self._names = config.family.names
        self.embedding = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, options, parallel)
            if first or (last and config.tie_word_embeddings)
            else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, place, options, parallel) for place, index in enumerate(self.stage)
        )
        self.rotary = Rotary(config.rope, config.head_dim, options.device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options) if last else None
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, options, parallel) if last else None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None = None,
        sampled: Sequence[int] | None = None,
    ) -> Tensor:
        """Take `token_ids` and `positions` (int64 `[T]`, sequence by sequence) through all layers of the whole model.

        Returns hidden states `[T, hidden]` in the compute dtype, before the final norm (`logits` applies it). With
        `sampled`, ascending indices into `token_ids`, it returns only the hidden states of these tokens,
        `[len(sampled), hidden]`, and the last layer computes no others. `positions` are usually `batch.positions`.
        `on_layer` is called with the index of a layer when its K and V are in the pages; its exceptions end the pass.
        The result is an inference tensor, which can't be changed in place outside inference mode.
        """
        return self.run_layers(self.embed(token_ids), positions, batch, kv, on_layer, sampled)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids, int64 `[T]`; returns hidden states `[T, hidden]`."""
        if self.embedding is None:
            raise EngineError("only the first stage of a pipeline embeds tokens")
        hidden: Tensor = self.embedding(token_ids)
        return hidden

    @torch.inference_mode()
    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None = None,
        sampled: Sequence[int] | None = None,
    ) -> Tensor:
        """Take hidden states `[T, hidden]` through the layers; other arguments and the result as in `forward`.

        The indices for `on_layer` are those in the KvCache.
        """
        backend = select(hidden.device, hidden.dtype, kv.dtype, kv.page_size, kv.head_dim)
        windows = [self.config.layers[index].window for index in self.stage]
        attention = backend if batch.host is None else SegmentedAttention(backend, batch.host, windows)
        context = ForwardContext(self.rotary.angles(positions), batch, kv, attention)
        for index, layer in enumerate(self.layers):
            if sampled is not None and index == len(self.layers) - 1:
                hidden = cast(DecoderLayer, layer).forward_sampled(hidden, context, sampled)
            else:
                hidden = layer(hidden, context)
            if on_layer is not None:
                on_layer(index)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the output projection to `[n, hidden]`; returns float32 `[n, vocab_size]`."""
        if self.head is None or self.norm is None:
            raise EngineError("only the last stage of a pipeline has logits")
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of this rank, and of the rotary frequencies; a tied projection counts once."""
        return sum(weight.nbytes for weight in self.parameters()) + self.rotary.frequencies.nbytes

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """All tensors to load, in the order of computation, except the output projection (`head_tensor`)."""
        if self.embedding is not None:
            yield from _tensors(self.embedding, self._names.embed)
        for layer in self.layers:
            yield from cast(DecoderLayer, layer).checkpoint_tensors()
        if self.norm is not None:
            yield from _tensors(self.norm, self._names.norm)

    def head_tensor(self) -> CheckpointTensor:
        """The tensor of the output projection, which only the last stage has; most tied checkpoints do not have it."""
        if self.head is None:
            raise EngineError("only the last stage of a pipeline has an output projection")
        return next(_tensors(self.head, self._names.head))
