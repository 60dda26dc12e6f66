"""The decoder over native kernels: the face of `baton.model.decoder.Decoder`, one call for a forward pass.

The residual stream is float32, whatever the dtype of weights, and so are the hidden states that go in and out. A step
of a batch is one call, with its head; a chunk is a call a layer, so that the caller is told of each layer and may end
the pass there.
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
from baton.native.packed import PACKED_DTYPES, TYPES, PackedWeights

_LARGEST_HEAD = 256
_KINDS = frozenset((AttentionKind.GROUPED, MlpKind.GATED))
"""Kinds of attention and MLP that have kernels."""


def unsupported(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Why there are no kernels for a model, or "" if there are."""
    for name, seen in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if seen not in PACKED_DTYPES:
            return f"{name} is {str(seen).removeprefix('torch.')}, native kernels have float32 and bfloat16"
    for name, kind in (("attention", config.family.attention), ("MLP", config.family.mlp)):
        if kind not in _KINDS:
            return f"its kind of {name} is {kind}, native kernels have {', '.join(sorted(_KINDS))}"
    if config.head_dim > _LARGEST_HEAD:
        return f"head_dim is {config.head_dim}, native kernels have up to {_LARGEST_HEAD}"
    return ""


@dataclass(frozen=True, slots=True)
class NativeStepOutput:
    """A step's results. `best`: int64 `[n]`, the first of each row's largest logits, -1 where one is not finite.

    `logits`: float32 `[n, vocab]`, if they were asked for.
    """

    best: Tensor
    logits: Tensor | None


class NativeDecoder:
    """See the module's text."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, weights: PackedWeights, library: ctypes.CDLL, threads: int
    ) -> None:
        """`dtype`: that of packed weights. `threads`: those that compute, the caller's included; started now."""
        self.config = config
        self._library = library
        self._threads = threads
        self._weights = weights
        self._model, self._layers = _describe(config, dtype, weights.addresses)
        self._kv: tuple[weakref.ref[KvCache], abi.BatonKv, object] | None = None
        self._room = library.baton_native_room_new()
        if not self._room:
            raise EngineError("native kernels: no memory")
        # Not at exit, when another thread may still compute with it.
        weakref.finalize(self, library.baton_native_room_free, self._room).atexit = False
        self._check(library.baton_native_start(threads))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KvCache,
        on_layer: Callable[[int], None] | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; `positions` are those of the batch. The result is float32."""
        layers, tokens = self.config.num_layers, batch.num_tokens
        hidden = _empty(tokens, self.config.hidden_size)
        call = abi.BatonCall(self._threads, _ids(token_ids, tokens), 0, layers, tokens, hidden.data_ptr())
        call.tail = tokens if rows is None else rows
        seen = self._batch(batch.query_lens, batch.context_lens, batch.page_tables)
        for first, last in [(0, layers)] if on_layer is None else [(index, index + 1) for index in range(layers)]:
            call.first, call.last = first, last
            self._check(
                self._library.baton_native_forward(
                    byref(self._model), byref(self._cache(kv)), byref(seen), byref(call), self._room
                )
            )
            call.token_ids = None
            if on_layer is not None:
                on_layer(first)
        return hidden if rows is None else hidden[tokens - rows :]

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: float32 `[n, hidden]` to float32 `[n, vocab_size]`."""
        hidden = hidden.float().contiguous()
        logits = _empty(len(hidden), self.config.vocab_size)
        if len(hidden):
            call = abi.BatonCall(self._threads, hidden=hidden.data_ptr(), logits=logits.data_ptr())
            self._check(self._library.baton_native_head(byref(self._model), len(hidden), byref(call), self._room))
        return logits

    def step(
        self, token_ids: Tensor, context_lens: Sequence[int], page_tables: Tensor, kv: KvCache, logits: bool
    ) -> NativeStepOutput:
        """One new token for each sequence: `token_ids` int64 `[n]`, `page_tables` int32 `[n, width]`, or longer."""
        count = len(context_lens)
        hidden = _empty(count, self.config.hidden_size)
        best = torch.empty(count, dtype=torch.int64, device="cpu")
        found = _empty(count, self.config.vocab_size) if logits else None
        call = abi.BatonCall(self._threads, _ids(token_ids, count), 0, self.config.num_layers, count, hidden.data_ptr())
        call.logits, call.best = None if found is None else found.data_ptr(), best.data_ptr()
        seen = self._batch([1] * count, context_lens, page_tables)
        self._check(
            self._library.baton_native_forward(
                byref(self._model), byref(self._cache(kv)), byref(seen), byref(call), self._room
            )
        )
        return NativeStepOutput(best, found)

    def heartbeat(self) -> int:
        """See `Engine.heartbeat`: units of work that the threads of this process have taken."""
        return int(self._library.baton_native_units())

    def lowest_noise(self, first: Tensor, keys: Tensor, width: int) -> Tensor:
        """See `baton.model.gumbel.lowest_noise`."""
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
    def _batch(query_lens: Sequence[int], context_lens: Sequence[int], tables: Tensor) -> abi.BatonBatch:
        count = len(query_lens)
        if tables.dtype != torch.int32 or len(tables) < count or (tables.shape[1] > 1 and tables.stride(1) != 1):
            shape = f"{tables.dtype} {list(tables.shape)} with strides {tables.stride()}"
            raise EngineError(f"page tables must be int32 [{count}, pages], each row contiguous, got {shape}")
        array = ctypes.c_int32 * count
        return abi.BatonBatch(
            count,
            array(*query_lens),
            array(*context_lens),
            tables.data_ptr(),
            tables.shape[1],
            tables.stride(0),
        )

    def _cache(self, kv: KvCache) -> abi.BatonKv:
        """The description of `kv`, made once."""
        if self._kv is None or self._kv[0]() is not kv:
            layers, array = kv.num_layers, ctypes.c_void_p * kv.num_layers
            pages = [array(*(kv.pages(part, layer).data_ptr() for layer in range(layers))) for part in (KEYS, VALUES)]
            keys, values = (ctypes.cast(each, ctypes.c_void_p) for each in pages)
            self._kv = (weakref.ref(kv), abi.BatonKv(keys, values, kv.num_pages, kv.page_size, TYPES[kv.dtype]), pages)
        return self._kv[1]


def _describe(config: ModelConfig, dtype: torch.dtype, addresses: Mapping[str, int]) -> tuple[abi.BatonModel, object]:
    """The model for kernels, and its layers, to which it points."""
    layers = (abi.BatonLayer * config.num_layers)()
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): where for name, where in addresses.items() if name.startswith(prefix)}
        layers[index] = abi.BatonLayer(window=layer.window or 0, **own)
    model = abi.BatonModel(
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        TYPES[dtype],
        config.rms_norm_eps,
        ctypes.cast(layers, ctypes.c_void_p),
        addresses.get("embedding", addresses["head"]),
        addresses["head"],
        addresses["norm"],
        addresses["frequencies"],
        config.rope.attention_factor,
    )
    return model, layers


def _empty(*shape: int) -> Tensor:
    """Float32 memory on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _ids(token_ids: Tensor, count: int) -> int:
    """The address of `count` token ids."""
    if token_ids.dtype != torch.int64 or len(token_ids) < count or not token_ids.is_contiguous():
        shape = f"{token_ids.dtype} {list(token_ids.shape)}"
        raise EngineError(f"token ids must be contiguous int64 [{count}], got {shape}")
    return token_ids.data_ptr()
