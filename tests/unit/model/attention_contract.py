"""Contract of every attention backend, checked against dense float32 attention.

Each case is one forward of mixed sequences: decode steps and chunks, at the start of their context and far
into it, on scattered pages or on pages that follow each other. The pool starts as NaN, so a backend that lets a
foreign or unwritten slot into a result shows it.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from baton.kv.format import attention_parts
from baton.model.attention import AttentionBackend, AttentionBatch, KvCache
from baton.model.tensors import dtype_name

MIXED = ((1, 1), (1, 17), (7, 7), (1, 300), (16, 40), (33, 289), (1, 90), (5, 260), (1, 16))
"""(query length, context length) of each sequence."""

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    """One forward; `str(case)` is its test id."""

    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    lengths: tuple[tuple[int, int], ...] = MIXED
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    sharpness: float = 1  # what queries are multiplied by

    def __str__(self) -> str:
        kind = "mixed" if self.lengths == MIXED else f"{len(self.lengths)}seq"
        dtypes = f"{self.dtype}-{self.kv_dtype}".replace("torch.", "")
        shape = f"page{self.page_size}-heads{self.heads}:{self.kv_heads}x{self.head_dim}"
        longest = max(context for _, context in self.lengths)
        sharp = "" if self.sharpness == 1 else f"-sharp{self.sharpness:g}"
        return f"{kind}{longest}-{shape}-window{self.window}-{dtypes}{sharp}"


def cases(page_sizes: tuple[int, ...] = (16, 256)) -> list[Case]:
    """The suite in float32."""
    grid = [
        Case(page, heads, kv_heads, head_dim)
        for page, (heads, kv_heads), head_dim in product(
            page_sizes, ((4, 4), (4, 2), (8, 2), (6, 1)), (16, 64, 80, 128)
        )
    ]
    windows = [Case(page, window=window) for page, window in product(page_sizes, (1, 7, 16, 40, 257, 1000))]
    decode = tuple((1, context) for context in (1, 2, 3, 15, 16, 17, 31, 64, 65, 200))
    alone = [((1, 33),), ((33, 33),), ((20, 33),), decode, ((16, 16), (300, 300)), ((9, 9), (10, 10))]
    others = [
        Case(page, window=window, lengths=lengths) for page, window, lengths in product(page_sizes, (None, 9), alone)
    ]
    # Longer than a block of queries, from the start and from the middle.
    long = [
        Case(page_sizes[0], heads=2, kv_heads=1, window=window, lengths=((1030, 1030), (1030, 1080)))
        for window in (None, 100)
    ]
    return grid + windows + others + long


def block_cases() -> list[Case]:
    """Chunks around the borders of blocks of queries, with and without a past, and windows around them."""
    chunks = (
        ((127, 127), (128, 128), (129, 129)),
        ((63, 300), (257, 300), (129, 400), (2, 400)),
        ((511, 1030), (512, 1024), (513, 1100)),
        ((600, 700), (1, 700), (130, 642)),
    )
    return [
        Case(heads=heads, kv_heads=kv_heads, window=window, lengths=lengths)
        for heads, kv_heads in ((7, 1), (4, 4))
        for window in (None, 1, 5, 100, 128, 129, 511, 513, 650)
        for lengths in chunks
    ]


def decode_cases() -> list[Case]:
    """Steps of many ragged sequences: more slots than one fused call takes, and lengths around its padding."""
    many = tuple((1, context) for context in (415, 416, 417, 447, 448, 449, 600, 601, 512, 1, 33, 480, 470))
    few = tuple((1, context) for context in (31, 32, 33, 63, 64, 65, 1))
    same = ((1, 480),) * 10
    apart = tuple((1, context) for context in (3000, 2900, 40, 50, 3, 700))
    return [
        Case(heads=heads, kv_heads=2, window=window, lengths=lengths)
        for heads in (2, 14)
        for window in (None, 32, 450)
        for lengths in (many, few, same, apart, (*many, (20, 500)))
    ]


def sharp_cases() -> list[Case]:
    """Scores of hundreds, so that one part of the context outweighs the rest by more than a float can hold."""
    lengths = ((200, 1000), (130, 130), (1, 900), (1, 30), (600, 1200))
    return [Case(window=window, lengths=lengths, sharpness=100) for window in (None, 300)]


def in_dtypes(listed: list[Case], dtype: torch.dtype, kv_dtype: torch.dtype) -> list[Case]:
    """The same cases with other dtypes."""
    return [replace(case, dtype=dtype, kv_dtype=kv_dtype) for case in listed]


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """float32 attention of the last `len(q)` tokens over `k` and `v`, `[tokens, heads, head_dim]` each."""
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def check(backend: AttentionBackend, case: Case, device: torch.device, tolerance: float) -> None:
    """Run one case and compare; also that no page but the sequences' own was written, in one layer only."""
    torch.manual_seed(0)
    needed = [-(-context // case.page_size) for _, context in case.lengths]
    kv = _poisoned(case, sum(needed) + 3, device)
    tables = _tables(needed, kv.num_pages).to(device)
    context = sum(total for _, total in case.lengths)
    keys = torch.randn(context, case.kv_heads, case.head_dim, device=device).to(case.kv_dtype)
    values = torch.randn(context, case.kv_heads, case.head_dim, device=device).to(case.kv_dtype)
    k_of = keys.split([total for _, total in case.lengths])
    v_of = values.split([total for _, total in case.lengths])
    _append_history(backend, kv, case, tables, k_of, v_of)

    queries = [query for query, _ in case.lengths]
    batch = AttentionBatch.build(queries, [total for _, total in case.lengths], tables, case.page_size)
    q = torch.randn(sum(queries), case.heads, case.head_dim, device=device).mul(case.sharpness).to(case.dtype)
    new_k = torch.cat([k[-query:] for k, query in zip(k_of, queries, strict=True)]).to(case.dtype)
    new_v = torch.cat([v[-query:] for v, query in zip(v_of, queries, strict=True)]).to(case.dtype)
    backend.append(kv, LAYER, new_k, new_v, batch)
    found = backend.attend(kv, LAYER, q, batch, case.window)

    expected = torch.cat([dense(*one, case.window) for one in zip(q.split(queries), k_of, v_of, strict=True)])
    assert found.shape == q.shape
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    for part in kv.parts.values():
        written = ~part.isnan().all(dim=-1).all(dim=-1)
        assert written.sum() == context
        assert not written[1 - LAYER].any()


def _poisoned(case: Case, num_pages: int, device: torch.device) -> KvCache:
    parts = attention_parts(dtype_name(case.kv_dtype), case.kv_heads, case.head_dim)
    size = case.page_size
    kv = KvCache.allocate(parts, num_layers=LAYERS, num_pages=num_pages, page_size=size, device=device)
    for part in kv.parts.values():
        part.fill_(float("nan"))
    return kv


def _tables(needed: list[int], num_pages: int) -> Tensor:
    """Pages for each sequence, scattered; unused entries name page 0, whoever owns it."""
    tables = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    order = torch.randperm(num_pages)
    free = order.split([*needed, num_pages - sum(needed)])
    for table, pages in zip(tables, free, strict=False):
        table[: len(pages)] = pages
    return tables


def _append_history(
    backend: AttentionBackend,
    kv: KvCache,
    case: Case,
    tables: Tensor,
    k_of: tuple[Tensor, ...],
    v_of: tuple[Tensor, ...],
) -> None:
    """Write what precedes the new tokens, in one batch of the sequences that have any."""
    past = [(index, total - query) for index, (query, total) in enumerate(case.lengths) if total > query]
    if not past:
        return
    lengths = [length for _, length in past]
    batch = AttentionBatch.build(lengths, lengths, tables[[index for index, _ in past]], case.page_size)
    k = torch.cat([k_of[index][:length] for index, length in past]).to(case.dtype)
    v = torch.cat([v_of[index][:length] for index, length in past]).to(case.dtype)
    backend.append(kv, LAYER, k, v, batch)
