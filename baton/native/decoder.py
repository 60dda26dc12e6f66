"""The decoder on native kernels, with the interface of `baton.model.decoder.Decoder`.

Hidden states are float32, whatever the dtype of the weights. A forward pass, with its head, is one call of the library.
If the caller wants to be told of each layer, each layer is one call, and the caller may end the pass after it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.errors import EngineError
from baton.kv.format import KEYS, VALUES
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.model.families import AttentionKind, MlpKind
from baton.native import abi
from baton.native.collective import Collective
from baton.native.packed import PACKED_DTYPES, TYPES, PackedWeights

_MAX_HEAD_DIM = 256
_KINDS = frozenset((AttentionKind.GROUPED, MlpKind.GATED))
"""Kinds of attention and MLP that have kernels."""


def unsupported(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Reason for which a model has no kernels, or "" if it has them."""
    for name, seen in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if seen not in PACKED_DTYPES:
            return f"{name} is {str(seen).removeprefix('torch.')}, native kernels have float32 and bfloat16"
    for index, layer in enumerate(config.layers):
        for name, kind in (("attention", layer.attention), ("MLP", layer.mlp)):
            if kind not in _KINDS:
                return f"layer {index} has {kind} {name}, native kernels have {', '.join(sorted(_KINDS))}"
    if config.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, native kernels have up to {_MAX_HEAD_DIM}"
    return ""


@dataclass(frozen=True, slots=True)
class NativeOutput:
    """Results of the head of a pass.

    `argmax`, int64 `[n]`, is the token with the largest logit of each row, or -1 if a logit of the row is not finite.
    `logits` is float32 `[n, vocab]`, or None if logits were not asked for.
    """

    argmax: Tensor
    logits: Tensor | None


class NativeDecoder:
    """A decoder that computes with native kernels, on a CPU; used by one thread at a time.

    With a collective, each rank makes the same calls in the same order, and has the same results, except for its own
    heads in its KvCache. After an error, `abort` of the collective ends the calls of the others.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        weights: PackedWeights,
        library: ctypes.CDLL,
        threads: int,
        collective: Collective | None = None,
        stage: range | None = None,
    ) -> None:
        """Start `threads` - 1 threads beside the caller's; `dtype` is that of the weights. Raises EngineError.

        `config` is that of the whole model; `weights` are this rank's. `stage` has the layers of a pipeline stage, by
        their indices in the whole model; all by default. `collective` stays open as long as the decoder.
        """
        self.config = config
        self.stage = range(config.num_layers) if stage is None else stage
        self._collective = collective
        self._library = library
        self._threads = threads
        self._weights = weights
        self._model, self._layers = _describe(config, self.stage, dtype, weights.addresses, collective)
        self._kv: tuple[weakref.ref[KvCache], abi.BatonKv, object] | None = None
        self._workspace = library.baton_native_workspace_new()
        if not self._workspace:
            raise EngineError("native kernels: no memory for the workspace of a decoder")
        # At the exit of the process another thread may still compute with it.
        weakref.finalize(self, library.baton_native_workspace_free, self._workspace).atexit = False
        self._check(library.baton_native_start(threads))

    def forward(
        self,
        token_ids: Tensor | None,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None = None,
        sampled: Sequence[int] | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute as `Decoder.forward` does; returns float32. `positions` must be those of `batch`.

        A pipeline stage computes its layers: from token ids if it is the first, and from hidden states, contiguous
        float32 `[tokens, hidden]`, without token ids if it is not. `hidden` is overwritten, and the result is a view of
        it. `kv` has the layers of the stage, and `on_layer` is called with indices into `kv`. Raises EngineError.
        """
        return self._run(token_ids, hidden, batch, kv, on_layer, sampled, abi.BatonCall())

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the output projection: float32 `[n, hidden]` to float32 `[n, vocab_size]`.

        Raises EngineError if this is not the last stage.
        """
        hidden = hidden.float().contiguous()
        logits = _empty(len(hidden), self.config.vocab_size)
        self._head(len(hidden), abi.BatonCall(self._threads, hidden=hidden.data_ptr(), logits=logits.data_ptr()))
        return logits

    def forward_head(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None,
        sampled: Sequence[int] | None,
        logits: bool,
    ) -> NativeOutput:
        """Compute as `forward` does, and apply the head to the result. The output has logits only if `logits`."""
        output, call = self._new_output(batch.num_tokens if sampled is None else len(sampled), logits)
        self._run(token_ids, None, batch, kv, on_layer, sampled, call)
        return output

    def head(self, hidden: Tensor, logits: bool) -> NativeOutput:
        """Apply the head to hidden states, float32 `[n, hidden]`. The output has logits only if `logits`.

        Raises EngineError if this is not the last stage.
        """
        hidden = hidden.float().contiguous()
        output, call = self._new_output(len(hidden), logits)
        call.threads, call.hidden = self._threads, hidden.data_ptr()
        self._head(len(hidden), call)
        return output

    def _new_output(self, rows: int, logits: bool) -> tuple[NativeOutput, abi.BatonCall]:
        """Uninitialised results of the head, and a call that writes them."""
        argmax = torch.empty(rows, dtype=torch.int64, device="cpu")
        found = _empty(rows, self.config.vocab_size) if logits else None
        call = abi.BatonCall(logits=None if found is None else found.data_ptr(), argmax=argmax.data_ptr())
        return NativeOutput(argmax, found), call

    def _run(
        self,
        token_ids: Tensor | None,
        hidden: Tensor | None,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None,
        sampled: Sequence[int] | None,
        call: abi.BatonCall,
    ) -> Tensor:
        """Compute hidden states; the head, if any, writes to the addresses in `call`."""
        layers, tokens = len(self.stage), batch.num_tokens
        if (token_ids is None) == (hidden is None):
            raise EngineError("a forward pass takes either token ids or hidden states")
        if token_ids is not None:
            call.token_ids = _ids(token_ids, tokens)
        if hidden is None:
            hidden = _empty(tokens, self.config.hidden_size)
        else:
            self._check_hidden(hidden, tokens)
        call.threads, call.hidden = self._threads, hidden.data_ptr()
        if sampled is not None:
            call.sampled, call.samples = (ctypes.c_int32 * len(sampled))(*sampled), len(sampled)
        seen, head = self._batch(batch), (call.logits, call.argmax)
        if on_layer is None:
            call.last = layers
            self._forward(kv, seen, call)
        else:
            call.logits = call.argmax = None
            for layer in range(layers):
                call.first, call.last = layer, layer + 1
                self._forward(kv, seen, call)
                call.token_ids = None
                on_layer(layer)
            call.logits, call.argmax = head
            self._head(tokens if sampled is None else len(sampled), call)
        return hidden if sampled is None else hidden[: len(sampled)]

    def _check_hidden(self, hidden: Tensor, tokens: int) -> None:
        shape = [tokens, self.config.hidden_size]
        if hidden.dtype != torch.float32 or list(hidden.shape) != shape or not hidden.is_contiguous():
            seen = f"{hidden.dtype} {list(hidden.shape)}"
            raise EngineError(f"hidden states must be contiguous float32 {shape}, got {seen}")

    def _forward(self, kv: KvCache, batch: abi.BatonBatch, call: abi.BatonCall) -> None:
        model, cache = byref(self._model), byref(self._cache(kv))
        self._check(self._library.baton_native_forward(model, cache, byref(batch), byref(call), self._workspace))

    def _head(self, rows: int, call: abi.BatonCall) -> None:
        if rows and (call.logits or call.argmax):
            call.sampled = None
            self._check(self._library.baton_native_head(byref(self._model), rows, byref(call), self._workspace))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, packed, which workers of this host may share."""
        return self._weights.nbytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the memory for intermediate results, which grows with the largest call."""
        return int(self._library.baton_native_workspace_size(self._workspace))

    def work_counter(self) -> int:
        """Number of tasks that the compute threads of this process have taken."""
        return int(self._library.baton_native_tasks())

    def lowest_noise(self, first: Tensor, keys: Tensor, width: int) -> Tensor:
        """Compute as `baton.model.gumbel.lowest_noise` does, on all compute threads."""
        first, keys, lowest = first.contiguous(), keys.contiguous(), torch.empty_like(first)
        self._check(
            self._library.baton_native_lowest_noise(
                first.data_ptr(), keys.data_ptr(), len(first), width, lowest.data_ptr(), self._threads
            )
        )
        return lowest

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(f"native kernels: {self._library.baton_native_error().decode()}")

    @staticmethod
    def _batch(batch: AttentionBatch) -> abi.BatonBatch:
        count, tables = len(batch.query_lens), batch.page_tables
        if tables.dtype != torch.int32 or (tables.shape[1] > 1 and tables.stride(1) != 1):
            shape = f"{tables.dtype} {list(tables.shape)} with strides {tables.stride()}"
            raise EngineError(f"page tables must be int32 [{count}, pages], each row contiguous, got {shape}")
        array = ctypes.c_int32 * count
        return abi.BatonBatch(
            count,
            array(*batch.query_lens),
            array(*batch.context_lens),
            tables.data_ptr(),
            tables.shape[1],
            tables.stride(0),
        )

    def _cache(self, kv: KvCache) -> abi.BatonKv:
        """The struct that describes `kv`, which is made once for each KvCache."""
        if self._kv is None or self._kv[0]() is not kv:
            layers, array = kv.num_layers, ctypes.c_void_p * kv.num_layers
            if layers != len(self.stage):
                raise EngineError(f"the KV cache has {layers} layers, the decoder has {len(self.stage)}")
            pages = [array(*(kv.pages(part, layer).data_ptr() for layer in range(layers))) for part in (KEYS, VALUES)]
            keys, values = (ctypes.cast(each, ctypes.c_void_p) for each in pages)
            self._kv = (weakref.ref(kv), abi.BatonKv(keys, values, kv.num_pages, kv.page_size, TYPES[kv.dtype]), pages)
        return self._kv[1]


def _describe(
    config: ModelConfig,
    stage: range,
    dtype: torch.dtype,
    addresses: Mapping[str, int],
    collective: Collective | None,
) -> tuple[abi.BatonModel, object]:
    """The struct of a rank's share of a stage of the model, and the array of layers to which it points."""
    size = collective.size if collective else 1
    layers = (abi.BatonLayer * len(stage))()
    for index, layer in enumerate(config.layers[stage.start : stage.stop]):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): where for name, where in addresses.items() if name.startswith(prefix)}
        layers[index] = abi.BatonLayer(window=layer.window or 0, **own)
    model = abi.BatonModel(
        len(stage),
        config.hidden_size,
        config.intermediate_size // size,
        config.vocab_size,
        config.num_heads // size,
        # More ranks than KV heads have copies of them.
        max(config.num_kv_heads // size, 1),
        config.head_dim,
        TYPES[dtype],
        config.rms_norm_eps,
        ctypes.cast(layers, ctypes.c_void_p),
        addresses.get("embedding", addresses.get("head")) if stage.start == 0 else None,
        addresses.get("head"),
        addresses.get("norm"),
        addresses["frequencies"],
        config.rope.attention_factor,
        collective.address if collective else None,
    )
    return model, layers


def _empty(*shape: int) -> Tensor:
    """An uninitialised float32 tensor on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _ids(token_ids: Tensor, count: int) -> int:
    """The address of at least `count` token ids. Raises EngineError unless they are contiguous int64."""
    if token_ids.dtype != torch.int64 or len(token_ids) < count or not token_ids.is_contiguous():
        shape = f"{token_ids.dtype} {list(token_ids.shape)}"
        raise EngineError(f"token ids must be contiguous int64 [{count}], got {shape}")
    return token_ids.data_ptr()
