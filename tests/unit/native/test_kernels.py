"""Native products against float64 and attention under its contract, for each instruction set of this machine."""

import ctypes
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention import AttentionBatch, KvCache
from baton.model.gumbel import lowest_noise
from baton.native import abi
from baton.native.library import isa, multiplies_exactly
from baton.native.packed import TYPES, PackedWeight
from baton.process import allocator
from tests.kernels import needs_native
from tests.unit.model.attention_contract import Case, block_cases, cases, check, decode_cases, in_dtypes, sharp_cases

CPU = torch.device("cpu")
ANY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DOTS = ("avx512_bf16", "amx")
"""Instruction sets whose products round rows to bfloat16."""


class NativeAttention:
    """The append and attention of a native forward pass, alone, as a backend; angles are 0: nothing is rotated."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, threads: int = 1, weights: torch.dtype = torch.float32) -> None:
        self._library, self._threads, self._weights = library, threads, weights
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        self.workspace: int | None = None
        """The value of all calls, if they share one."""

    def append(self, kv: KvCache, layer: int, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Attend with some queries, which appends."""
        self._new[layer] = k, v
        self.attend(kv, layer, torch.zeros(len(k), kv.kv_heads, kv.head_dim), batch, None)

    def attend(self, kv: KvCache, layer: int, q: Tensor, batch: AttentionBatch, window: int | None) -> Tensor:
        qkv = torch.cat((q, *self._new[layer]), dim=1).float().contiguous()
        out = torch.empty(q.shape)
        layers = (abi.BatonLayer * kv.num_layers)(*[abi.BatonLayer(window=window or 0)] * kv.num_layers)
        frequencies = torch.zeros(kv.head_dim // 2, dtype=torch.float64)
        model = abi.BatonModel(
            kv.num_layers, 1, 1, 1, q.shape[1], kv.kv_heads, kv.head_dim, TYPES[self._weights], 1e-6,
            ctypes.cast(layers, ctypes.c_void_p), None, None, None, frequencies.data_ptr(), 1.0,
        )  # fmt: skip
        keys, values = (pointers([each.data_ptr() for each in kv.parts[part]]) for part in (KEYS, VALUES))
        described = abi.BatonKv(
            ctypes.cast(keys, ctypes.c_void_p), ctypes.cast(values, ctypes.c_void_p), kv.num_pages, kv.page_size,
            TYPES[kv.dtype],
        )  # fmt: skip
        workspace = self.workspace or self._library.baton_native_workspace_new()
        status = self._library.baton_native_attend(
            model, described, batch_of(batch), layer, self._threads, qkv.data_ptr(), out.data_ptr(), workspace
        )
        if not self.workspace:
            self._library.baton_native_workspace_free(workspace)
        assert status == 0, self._library.baton_native_error()
        return out.to(q.dtype)


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def batch_of(batch: AttentionBatch) -> abi.BatonBatch:
    lens = [(ctypes.c_int32 * len(each))(*each) for each in (batch.query_lens, batch.context_lens)]
    tables = batch.page_tables
    return abi.BatonBatch(len(batch.query_lens), *lens, tables.data_ptr(), tables.shape[1], tables.stride(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ANY
@given(
    count=st.integers(1, 70),
    rows=st.integers(1, 100),
    columns=st.integers(1, 600),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, count: int, rows: int, columns: int, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x, bias = torch.randn(rows, columns).to(dtype), torch.randn(count, columns), torch.randn(rows)
    packed = PackedWeight.pack(library, weight)
    found = packed.multiply(x, bias, threads)
    exact = x.to(dtype) if isa(library) in DOTS and dtype == torch.bfloat16 else x
    expected = exact.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * columns**0.5 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 70, 33])
def test_weights_of_any_dtype_are_packed_in_parts_as_if_they_were_cast_and_joined(
    library: ctypes.CDLL, dtype: torch.dtype, columns: int
) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    parts = [torch.randn(rows, columns).to(kind) for rows, kind in zip((40, 7, 60), kinds, strict=True)]
    whole = torch.cat([part.to(dtype) for part in parts])
    found = torch.zeros(library.baton_native_packed_size(*whole.shape), dtype=dtype)
    row = 0
    for part in parts:
        source, target = TYPES[part.dtype], TYPES[dtype]
        library.baton_native_pack(part.data_ptr(), source, len(part), columns, row, found.data_ptr(), target)
        row += len(part)
    assert torch.equal(found, PackedWeight.pack(library, whole).memory)
    panel = found.view(-1, 32 * (-(-columns // 32) * 32))[1]
    assert panel[5 * 2 if dtype == torch.bfloat16 else 5] == whole[37, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_s_product_does_not_depend_on_the_others(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    if isa(library) == "amx" and dtype == torch.bfloat16:
        pytest.skip("tiles sum in another order than dot products, which few rows take")
    packed = PackedWeight.pack(library, torch.randn(100, 700).to(dtype))
    x = torch.randn(300, 700)
    whole = packed.multiply(x, threads=2)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 13, 32, 64, 129):
        assert torch.equal(packed.multiply(x[:count].contiguous()), whole[:count])


# Any number of threads gives the same bits, which `test_attention_does_not_depend_on_the_others` checks.
@pytest.mark.parametrize(
    ("case", "threads"),
    [*zip([*cases()[::3], *decode_cases(), *block_cases()[::3], *sharp_cases()], itertools.cycle((1, 2)))],
    ids=str,
)
def test_attention_keeps_its_contract(library: ctypes.CDLL, case: Case, threads: int) -> None:
    check(NativeAttention(library, threads), case, CPU, tolerance=2e-5 if case.sharpness == 1 else 2e-4)


@pytest.mark.parametrize(
    "case",
    in_dtypes([*cases()[::9], *decode_cases()[::4], *block_cases()[::5]], torch.bfloat16, torch.bfloat16),
    ids=str,
)
def test_attention_over_bfloat16_pages(library: ctypes.CDLL, case: Case) -> None:
    check(NativeAttention(library, 2, torch.bfloat16), case, CPU, tolerance=2e-2)


def test_memory_for_many_long_contexts_is_given_back_when_it_is_no_longer_needed(library: ctypes.CDLL) -> None:
    """512 sequences share their pages, so that only the intermediate results take much memory: 64 KiB a sequence."""

    def resident() -> int:
        allocator.trim()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

    length, sequences = 32_000, 512
    kv = cache_of(length, 1, 16, torch.float32)
    table = torch.arange(kv.num_pages).int()[None]
    backend = NativeAttention(library)
    backend.workspace = library.baton_native_workspace_new()

    def step(count: int) -> None:
        backend._new[0] = (torch.zeros(count, 1, 16), torch.zeros(count, 1, 16))
        batch = AttentionBatch.build([1] * count, [length] * count, table.expand(count, -1).contiguous(), kv.page_size)
        backend.attend(kv, 0, torch.zeros(count, 1, 16), batch, None)

    step(1)
    before = resident()
    step(sequences)
    grown = resident() - before
    assert grown >= 20
    for _ in range(300):
        step(1)
    assert resident() - before < grown / 2
    library.baton_native_workspace_free(backend.workspace)


@pytest.mark.parametrize("window", [None, 9, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_does_not_depend_on_the_others(library: ctypes.CDLL, dtype: torch.dtype, window: int | None) -> None:
    """A chunk, its tokens one by one, and the parts of a long context by several threads: the same bits."""
    torch.manual_seed(0)
    length, query, heads, kv_heads, size = 2600, 150, 6, 2, 32
    kv = cache_of(length, kv_heads, size, dtype)
    table = torch.randperm(kv.num_pages).int()[None]
    backend = NativeAttention(library, weights=dtype)
    k, v = torch.randn(2, length, kv_heads, size).unbind()
    backend.append(kv, 0, k, v, AttentionBatch.build([length], [length], table, kv.page_size))
    q = torch.randn(query, heads, size)
    backend._new[0] = k[-query:], v[-query:]
    chunk = backend.attend(kv, 0, q, AttentionBatch.build([query], [length], table, kv.page_size), window)
    for token in (0, 1, 77, query - 1):
        context = length - query + 1 + token
        alone = NativeAttention(library, 3, dtype)
        alone._new[0] = k[context - 1 : context], v[context - 1 : context]
        batch = AttentionBatch.build([1], [context], table, kv.page_size)
        assert torch.equal(alone.attend(kv, 0, q[token : token + 1], batch, window)[0], chunk[token])


@pytest.mark.parametrize("query", [1, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_softmax(library: ctypes.CDLL, dtype: torch.dtype, query: int) -> None:
    """Attended values are the weights themselves: their logarithms follow the scores, and they sum to 1."""
    torch.manual_seed(0)
    size, scored, length = 32, 31, 200
    k, q = torch.randn(length, 1, size).to(dtype).float(), torch.randn(query, 7, size)
    v = torch.zeros(length, 1, size)
    v[:scored, 0, :scored] = torch.eye(scored)
    v[..., scored] = 1
    kv = cache_of(length, 1, size, dtype)
    batch = AttentionBatch.build([length], [length], torch.arange(kv.num_pages).int()[None], kv.page_size)
    backend = NativeAttention(library, weights=dtype)
    backend.append(kv, 0, k, v, batch)
    backend._new[0] = k[-query:], v[-query:]
    out = backend.attend(kv, 0, q, batch.select(range(length - query, length)), None).double()
    assert torch.allclose(out[..., scored], torch.ones(()).double(), atol=1e-6)
    scores = torch.einsum("qhd,kd->qhk", q.double(), k[:scored, 0].double()) / size**0.5
    found = out[..., :scored].log()
    scores, found = scores - scores.mean(-1, keepdim=True), found - found.mean(-1, keepdim=True)
    slope = (scores * found).sum() / scores.square().sum()
    assert slope.item() == pytest.approx(1, abs=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("query", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_ignore_values_of_others(library: ctypes.CDLL, dtype: torch.dtype, query: int) -> None:
    """The second sequence has neither the NaN of the first one nor scores above -400, all alike."""
    torch.manual_seed(0)
    size, length = 32, 80
    k, v = torch.full((2 * length, 1, size), 9.0), torch.randn(2 * length, 1, size)
    v[:length] = float("nan")
    kv = cache_of(2 * length, 1, size, dtype)
    tables = torch.arange(kv.num_pages).int().view(2, -1)
    backend = NativeAttention(library, weights=dtype)
    backend.append(kv, 0, k, v, AttentionBatch.build([length] * 2, [length] * 2, tables, kv.page_size))
    backend._new[0] = tuple(each.view(2, length, 1, size)[:, -query:].flatten(0, 1) for each in (k, v))
    q = torch.full((2 * query, 1, size), -9.0)
    out = backend.attend(kv, 0, q, AttentionBatch.build([query] * 2, [length] * 2, tables, kv.page_size), None)
    assert out[:query].isnan().all()
    seen = [v[length : 2 * length - query + 1 + token].mean(0) for token in range(query)]
    assert torch.allclose(out[query:], torch.stack(seen), atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_just_below_a_whole_number(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """One key has a large score, all others nearly 0: their difference rounds to a whole number."""
    size, length = 32, 257
    k, v = torch.zeros(length, 1, size), torch.ones(length, 1, size)
    k[0, 0, 0], k[1:, 0, 0], v[0] = 32, -1e-9, 0
    kv = cache_of(length, 1, size, dtype)
    batch = AttentionBatch.build([length], [length], torch.arange(kv.num_pages).int()[None], kv.page_size)
    backend = NativeAttention(library, weights=dtype)
    backend.append(kv, 0, k, v, batch)
    backend._new[0] = k[-1:], v[-1:]
    q = torch.eye(1, size)[None]
    others = (length - 1) * math.exp(-32 / size**0.5)
    out = backend.attend(kv, 0, q, batch.select([length - 1]), None)
    assert torch.allclose(out, torch.full((), others / (1 + others)), atol=5e-3)


@pytest.mark.parametrize("query", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_before_the_window_are_not_read(library: ctypes.CDLL, dtype: torch.dtype, query: int) -> None:
    """Their pages may hold anything by then."""
    torch.manual_seed(0)
    length, window = 200, 9
    kv = cache_of(length, 2, 32, dtype)
    batch = AttentionBatch.build([length], [length], torch.arange(kv.num_pages).int()[None], kv.page_size)
    backend = NativeAttention(library, weights=dtype)
    k, v = torch.randn(2, length, 2, 32).unbind()
    backend.append(kv, 0, k, v, batch)
    backend._new[0] = k[-query:], v[-query:]
    q, new = torch.randn(query, 4, 32), batch.select(range(length - query, length))
    expected = backend.attend(kv, 0, q, new, window)
    for part in kv.parts.values():
        part.flatten(1, 2)[:, : length - query - window + 1] = float("nan")
    assert torch.equal(backend.attend(kv, 0, q, new, window), expected)


def cache_of(tokens: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32, page_size: int = 16) -> KvCache:
    shape = (1, -(-tokens // page_size), page_size, kv_heads, size)
    return KvCache({KEYS: torch.zeros(shape, dtype=dtype), VALUES: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize("width", [1, 5, 128])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_lowest_noise_of_tiles_is_torchs(library: ctypes.CDLL, width: int, threads: int) -> None:
    """More tiles than a task has, so that both threads take some."""
    drawn = torch.Generator().manual_seed(width)
    first = torch.randint(0, 2**31 - width, (600,), generator=drawn, dtype=torch.int32)
    keys = torch.randint(-(2**31), 2**31, (600, 2), generator=drawn).to(torch.int32)
    lowest = torch.full_like(first, -1)
    library.baton_native_lowest_noise(first.data_ptr(), keys.data_ptr(), 600, width, lowest.data_ptr(), threads)
    assert torch.equal(lowest, lowest_noise(first, keys, width))


def test_products_of_small_whole_numbers_are_exact(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_exactly(library)
    monkeypatch.setattr(library, "baton_native_linear", lambda *_: None)
    assert not multiplies_exactly(library)


@needs_native
def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    code = """
import os, torch
from baton.native import abi
from baton.native.library import load
from baton.native.packed import PackedWeight
library = load()
abi.declare(library)
weight, x = PackedWeight.pack(library, torch.randn(256, 64)), torch.randn(64, 64)
expected = weight.multiply(x, threads=2)
if child := os.fork():
    assert torch.equal(weight.multiply(x, threads=2), expected)
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0 if torch.equal(weight.multiply(x, threads=2), expected) else 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_threads_that_cannot_be_started_are_an_error(library: ctypes.CDLL) -> None:
    assert library.baton_native_start(5_000) == 1
    assert b"5000 threads" in library.baton_native_error()
