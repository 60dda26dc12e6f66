"""Attention on torch's kernels for sequences of several lengths (torch.nn.attention.varlen), for CUDA.

They serve where flash-attn is not installed, and are a build of the same FlashAttention-2: they keep no matrix of
scores, and return the log-sum-exp. In torch 2.11 they follow no page tables, so the contexts are first copied out of
their pages, exactly the tokens of each sequence. For a chunk of thousands of tokens that takes little beside its
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention.batch import AttentionBatch
from baton.model.attention.flash_backend import causal_window, segment_lengths, segment_window
from baton.model.attention.kv_cache import KvCache
from baton.model.attention.torch_backend import attend_segment


def runs_on(device: torch.device) -> bool:
    """Whether torch has the kernels, and `device` is a GPU that they are built for: Ampere or newer."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return torch.backends.cuda.is_flash_attention_available()


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels take such queries; keys and values of another dtype are converted."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256


class VarlenAttention:
    """Attention by torch's varlen kernel. Lengths are read on the host, so a step can't be captured in a CUDA graph."""

    name = "varlen"

    def __init__(self, kernel: Callable[..., Any], lse: object) -> None:
        """`kernel` is `varlen_attn`, for queries with more heads than keys; `lse` asks it for the log-sum-exp."""
        self._kernel = kernel
        self._lse = lse

    @classmethod
    def load(cls) -> VarlenAttention:
        """Import the kernels."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        # torch 2.11 takes any number of KV heads; later ones must be told.
        told = "enable_gqa" in signature(varlen_attn).parameters
        return cls(partial(varlen_attn, enable_gqa=True) if told else varlen_attn, AuxRequest(lse=True))

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        kv.write(KEYS, layer, batch.slots, k)
        kv.write(VALUES, layer, batch.slots, v)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        k, v = (kv.read(part, layer, batch.context_slots).to(q.dtype) for part in (KEYS, VALUES))
        lengths = batch.cu_query_lens, batch.cu_context_lens, max(batch.query_lens), max(batch.context_lens)
        limits = causal_window(window, step=batch.is_step)
        attended: Tensor = self._kernel(q, k, v, *lengths, window_size=limits)
        return attended

    def attend_segment(
        self, q: Tensor, k: Tensor, v: Tensor, distance: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        limits = segment_window(len(q), len(k), distance, window)
        if limits is None:
            return attend_segment(q, k, v, distance, window)
        lengths = *segment_lengths(len(q), len(k), q.device), len(q), len(k)
        out, lse = self._kernel(q, k.to(q.dtype), v.to(q.dtype), *lengths, window_size=limits, return_aux=self._lse)
        return out.float(), lse.transpose(0, 1)
