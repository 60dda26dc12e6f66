"""Attention that also tells its log-sum-exp, and the merge of two such results.

Attention over a set of keys equals the mean of attention over any two parts of it, weighted by the softmax
of the parts' log-sum-exps (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021,
arXiv:2112.05682). So keys that all queries see need no mask, and only the rest is computed with one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`q` `[n, heads, rows, head_dim]` over `k` and `v` `[n, heads, S, head_dim]`, any strides but the last.

    `mask` is added to the scaled scores: broadcastable to `[n, 1, rows, S]`, of q's dtype; each row must see
    a key. Returns the result, as `q`, and float32 log-sum-exps `[n, heads, rows]`.
    """
    if q.device.type == "cpu":
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
        return found, lse
    scores = torch.matmul(q, k.transpose(2, 3)).float() * q.shape[3] ** -0.5
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    return torch.matmul((scores - lse[..., None]).exp().to(q.dtype), v), lse


def weight(first: Tensor, second: Tensor) -> Tensor:
    """The share of the first of two results, from their log-sum-exps, both finite.

    exp(a) / (exp(a) + exp(b)) is the sigmoid of a - b, in which nothing overflows.
    """
    return torch.sigmoid(first - second)
