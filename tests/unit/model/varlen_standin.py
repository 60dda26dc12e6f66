"""torch.nn.attention.varlen.varlen_attn as its documentation states it, computed densely: it has no CPU kernels.

tests/gpu runs the real one.
"""

from typing import Any

import torch
from torch import Tensor

from baton.model.attention.torch_backend import attend_segment
from baton.model.attention.varlen_backend import VarlenAttention


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """`query` `[tokens, heads, head_dim]`, `key` and `value` `[keys, kv_heads, head_dim]`, sequence by sequence.

    With limits the last query and the last key of a sequence are at one position. The log-sum-exp is `[heads, tokens]`.
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys))
    assert query.dtype == key.dtype == value.dtype
    left, right = window_size
    assert right == 0 or window_size == (-1, -1)
    found = [
        attend_segment(q, k, v, len(k) - len(q) if right == 0 else len(k), None if left == -1 else left + 1)
        for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    ]
    out, lse = (torch.cat(each) for each in zip(*found, strict=True))
    return (out.to(query.dtype), lse.transpose(0, 1)) if return_aux else out.to(query.dtype)


VARLEN = VarlenAttention(varlen_attn, lse=True)
