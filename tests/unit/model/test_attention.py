"""The attention contract over every backend that runs on CPU, and the batch that describes a forward."""

from inspect import signature

import pytest
import torch

from baton.model.attention import AttentionBackend, AttentionBatch, flash_backend, select, torch_backend
from baton.model.attention.flash_backend import FlashAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.varlen_backend import VarlenAttention
from tests.unit.model.attention_contract import Case, block_cases, cases, check, decode_cases, in_dtypes, sharp_cases
from tests.unit.model.flash_standin import KERNELS
from tests.unit.model.varlen_standin import VARLEN, varlen_attn

CPU = torch.device("cpu")
SMALL = [Case(page, window=window) for page in (16, 256) for window in (None, 9)]


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("backend", [TorchAttention(), FlashAttention(KERNELS), VARLEN], ids=lambda b: b.name)
def test_equals_dense_attention(backend: AttentionBackend, case: Case) -> None:
    check(backend, case, CPU, tolerance=2e-5)


def test_cpu_gets_the_torch_backend() -> None:
    assert select(CPU, torch.bfloat16, torch.bfloat16, 256, 64).name == "torch"


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "torch"), ((8, 0), "flash"), ((9, 0), "flash")])
def test_flash_attention_needs_ampere(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_backend, "available", lambda: True)
    monkeypatch.setattr(flash_backend.FlashKernels, "load", lambda: KERNELS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    chosen = select.__wrapped__(torch.device("cuda"), torch.bfloat16, torch.bfloat16, 256, 64)
    assert chosen.name == name


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "name"),
    [
        ((8, 0), torch.bfloat16, 64, "varlen"),
        ((7, 5), torch.bfloat16, 64, "torch"),
        ((9, 0), torch.float32, 64, "torch"),
        ((9, 0), torch.float16, 100, "torch"),
    ],
)
def test_torchs_own_kernels_serve_where_flash_attn_is_missing(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_backend, "available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert select.__wrapped__(torch.device("cuda"), dtype, torch.bfloat16, 16, head_dim).name == name


def test_torchs_kernel_is_called_as_its_signature_says() -> None:
    from torch.nn.attention.varlen import AuxRequest
    from torch.nn.attention.varlen import varlen_attn as real

    wanted = signature(real).parameters
    assert list(wanted)[:7] == list(signature(varlen_attn).parameters)[:7]
    assert {"return_aux", "window_size"} <= wanted.keys()
    loaded = VarlenAttention.load()
    assert loaded._lse == AuxRequest(lse=True)
    keywords = getattr(loaded._kernel, "keywords", {})
    assert keywords == ({"enable_gqa": True} if "enable_gqa" in wanted else {})


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
def test_shapes_that_flash_attention_can_serve(
    dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, head_dim: int, fits: bool
) -> None:
    assert flash_backend.supports(dtype, kv_dtype, page_size, head_dim) is fits


@pytest.mark.parametrize("case", [*block_cases()[::6], *decode_cases()[::6], *sharp_cases()], ids=str)
def test_blocks_of_queries_equal_dense_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of few queries, of which no two need see the same keys."""
    monkeypatch.setattr(torch_backend, "_MASK_ELEMENTS", 20_000)
    check(TorchAttention(), case, CPU, tolerance=2e-4 if case.sharpness > 1 else 2e-5)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, 2e-5), (torch.bfloat16, torch.bfloat16, 3e-2)])
def test_other_dtypes_lose_only_their_own_rounding(dtypes: tuple[torch.dtype, torch.dtype, float]) -> None:
    for case in in_dtypes([*SMALL, *decode_cases()[:5]], *dtypes[:2]):
        check(TorchAttention(), case, CPU, tolerance=dtypes[2])


def test_batch_derives_positions_and_slots() -> None:
    tables = torch.tensor([[7, 2, 0], [4, 0, 0]], dtype=torch.int32)
    batch = AttentionBatch.build([3, 1], [6, 2], tables, page_size=4)
    assert batch.positions.tolist() == [3, 4, 5, 1]
    assert batch.slots.tolist() == [31, 8, 9, 17]
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
