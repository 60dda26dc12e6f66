"""The attention contract and whole models on CUDA, over every backend installed there."""

from pathlib import Path

import pytest
import torch

from baton.engine.load import load_model
from baton.model.attention import AttentionBackend, flash_backend, varlen_backend
from baton.model.attention.flash_backend import FlashAttention, FlashKernels
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.varlen_backend import VarlenAttention
from tests.checkpoints import FAMILIES, load_reference, make_checkpoint, prompt_ids
from tests.unit.model.attention_contract import Case, cases, check, in_dtypes
from tests.unit.model.runner import chunked_logits

CUDA = torch.device("cuda")


def _half_precision() -> list[tuple[AttentionBackend, Case]]:
    pairs: list[tuple[AttentionBackend, Case]] = [
        (TorchAttention(), case) for case in in_dtypes(cases(), torch.bfloat16, torch.bfloat16)
    ]
    # Builds may be limited to the head sizes that models have.
    usual = [case for case in cases((256,)) if case.head_dim in (64, 128)]
    if varlen_backend.runs_on(CUDA):
        pairs += [(VarlenAttention.load(), case) for case in in_dtypes(usual, torch.bfloat16, torch.bfloat16)]
    if flash_backend.available():
        flash = FlashAttention(FlashKernels.load())
        pairs += [(flash, case) for case in in_dtypes(usual, torch.bfloat16, torch.bfloat16)]
    return pairs


@pytest.mark.parametrize("case", cases(), ids=str)
def test_torch_in_float32(case: Case) -> None:
    check(TorchAttention(), case, CUDA, tolerance=1e-4)


@pytest.mark.parametrize(("backend", "case"), _half_precision(), ids=lambda x: getattr(x, "name", str(x)))
def test_half_precision(backend: AttentionBackend, case: Case) -> None:
    check(backend, case, CUDA, tolerance=3e-2)


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32(family: str, page_size: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    ids = prompt_ids(100)
    with torch.inference_mode():
        expected = load_reference(tmp_path)(torch.tensor([ids])).logits[0]
    model = load_model(tmp_path, dtype=torch.float32, device=CUDA)
    found = chunked_logits(model, ids, chunk=7, page_size=page_size)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-3)
