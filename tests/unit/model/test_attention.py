"""The attention contract over every backend that runs on CPU, and the batch that describes a forward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.kv.format import attention_parts
from baton.model.attention import AttentionBackend, AttentionBatch, KvCache, flash_backend, select
from baton.model.attention.flash_backend import FlashAttention
from baton.model.attention.reference import ReferenceAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.torch_decode import group_by_length
from baton.model.attention.workspace import Workspace
from tests.unit.model.attention_contract import (
    Case,
    block_cases,
    cases,
    check,
    decode_cases,
    in_dtypes,
    sharp_cases,
)
from tests.unit.model.flash_standin import KERNELS

CPU = torch.device("cpu")
SMALL = [Case(page, window=window) for page in (16, 256) for window in (None, 9)]


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("backend", [TorchAttention(), FlashAttention(KERNELS)], ids=lambda b: b.name)
def test_equals_dense_attention(backend: AttentionBackend, case: Case) -> None:
    check(backend, case, CPU, tolerance=2e-5)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_equals_dense_attention(case: Case) -> None:
    check(ReferenceAttention(), case, CPU, tolerance=2e-5)


def test_cpu_gets_the_torch_backend() -> None:
    assert select(CPU, torch.bfloat16, torch.bfloat16, 256, 64).name == "torch"


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "torch"), ((8, 0), "flash"), ((9, 0), "flash")])
def test_flash_attention_is_for_ampere_and_newer(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_backend, "available", lambda: True)
    monkeypatch.setattr(flash_backend.FlashKernels, "load", lambda: KERNELS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    chosen = select.__wrapped__(torch.device("cuda"), torch.bfloat16, torch.bfloat16, 256, 64)
    assert chosen.name == name


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "page_size", "head_dim", "fits"),
    [
        (torch.bfloat16, torch.bfloat16, 256, 128, True),
        (torch.float16, torch.float16, 512, 80, True),
        (torch.float32, torch.float32, 256, 128, False),
        (torch.bfloat16, torch.float16, 256, 128, False),
        (torch.bfloat16, torch.bfloat16, 16, 128, False),
        (torch.bfloat16, torch.bfloat16, 256, 100, False),
        (torch.bfloat16, torch.bfloat16, 256, 264, False),
    ],
)
def test_what_flash_attention_can_serve(
    dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, head_dim: int, fits: bool
) -> None:
    assert flash_backend.supports(dtype, kv_dtype, page_size, head_dim) is fits


@pytest.mark.parametrize("case", block_cases(), ids=str)
def test_blocks_of_queries_equal_dense_attention(case: Case) -> None:
    check(TorchAttention(), case, CPU, tolerance=2e-5)


@pytest.mark.parametrize("case", decode_cases(), ids=str)
def test_ragged_steps_equal_dense_attention(case: Case) -> None:
    check(TorchAttention(), case, CPU, tolerance=2e-5)


@pytest.mark.parametrize("case", sharp_cases(), ids=str)
def test_merged_parts_may_differ_by_any_weight(case: Case) -> None:
    check(TorchAttention(), case, CPU, tolerance=2e-4)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, 2e-5), (torch.bfloat16, torch.bfloat16, 3e-2)])
def test_other_dtypes_lose_only_their_own_rounding(dtypes: tuple[torch.dtype, torch.dtype, float]) -> None:
    for case in in_dtypes([*SMALL, *block_cases()[:12], *decode_cases()[:5]], *dtypes[:2]):
        check(TorchAttention(), case, CPU, tolerance=dtypes[2])


@pytest.mark.parametrize("case", [SMALL[0], decode_cases()[0], block_cases()[2]], ids=str)
def test_nothing_is_left_from_the_call_before(case: Case) -> None:
    backend = TorchAttention()
    check(backend, case, CPU, tolerance=2e-5)
    parts = attention_parts("float32", 2, 16)
    kv = KvCache.allocate(parts, num_layers=1, num_pages=300, page_size=16, device=CPU)
    for part in kv.parts.values():
        part.fill_(float("nan"))
    lengths = [(1, 2000), (1, 2000), (1, 2000), (600, 1200)]
    tables = torch.arange(4 * 125, dtype=torch.int32).remainder(300).view(4, 125)
    batch = AttentionBatch.build(*zip(*lengths, strict=True), tables, 16)
    assert backend.attend(kv, 0, torch.ones(603, 4, 16), batch, None).isnan().all()
    check(backend, case, CPU, tolerance=2e-5)


def test_one_backend_serves_several_threads() -> None:
    backend = TorchAttention()
    listed = [SMALL[0], decode_cases()[0], block_cases()[3], decode_cases()[4]] * 3
    # `check` seeds torch's one generator: what it draws differs between runs, what must hold does not.
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(check, backend, case, CPU, 2e-5) for case in listed]:
            done.result()


def test_scratch_made_in_inference_mode_serves_outside_of_it() -> None:
    workspace = Workspace()
    with torch.inference_mode():
        inside = workspace.take("a", (4, 3), torch.empty(0))
    outside = workspace.take("a", (2, 3), torch.empty(0)).fill_(1)
    assert outside.data_ptr() == inside.data_ptr()
    assert workspace.take("b", (2, 3), torch.empty(0)).data_ptr() != inside.data_ptr()
    assert workspace.take("a", (2,), torch.empty(0, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_groups_are_split_where_padding_costs_more_than_a_group() -> None:
    assert group_by_length(range(5), [5, 4000, 60, 3990, 1]) == [[1, 3], [2, 0, 4]]
    assert group_by_length(range(4), [30000, 30000, 30000, 29000]) == [[0, 1], [2, 3]]
    assert group_by_length(range(3), [1000, 300, 100]) == [[0, 1, 2]]
    assert group_by_length([], [5]) == []


def test_batch_derives_positions_and_slots() -> None:
    tables = torch.tensor([[7, 2, 0], [4, 0, 0]], dtype=torch.int32)
    batch = AttentionBatch.build([3, 1], [6, 2], tables, page_size=4)
    assert batch.positions.tolist() == [3, 4, 5, 1]
    assert batch.slots.tolist() == [31, 8, 9, 17]
    assert batch.query_starts == (0, 3, 4)
    assert batch.cu_query_lens.tolist() == [0, 3, 4]
    assert batch.cu_context_lens.tolist() == [0, 6, 8]
    assert batch.context_lens_tensor.tolist() == [6, 2]


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "message"),
    [
        ([1], [1], "1 query lengths, 1 context lengths, 2 page tables"),
        ([1, 0], [1, 1], "query length 0"),
        ([1, 3], [1, 2], "query length 3 and context length 2"),
        ([1, 1], [1, 9], "context length 9 with 2 pages of 4"),
    ],
)
def test_impossible_batches_are_refused(query_lens: list[int], context_lens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build(query_lens, context_lens, torch.zeros(2, 2, dtype=torch.int32), 4)


def test_cache_describes_itself() -> None:
    parts = attention_parts("bfloat16", 2, 8)
    kv = KvCache.allocate(parts, num_layers=3, num_pages=5, page_size=16, device=CPU)
    assert (kv.num_layers, kv.num_pages, kv.page_size, kv.kv_heads, kv.head_dim) == (3, 5, 16, 2, 8)
    assert kv.page_bytes == 2 * 3 * 16 * 2 * 8 * 2
    assert list(kv.parts) == [part.name for part in parts]
