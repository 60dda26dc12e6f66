"""The attention contract and whole models on CUDA, over every backend installed there."""

from pathlib import Path

import pytest
import torch

from baton.engine.load import LoadedModel, load_model
from baton.model import decoder
from baton.model.attention import AttentionBackend, flash_backend, varlen_backend
from baton.model.attention.flash_backend import FlashAttention, FlashKernels
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.varlen_backend import VarlenAttention
from tests.checkpoints import FAMILIES, lively_prompt, load_reference, make_checkpoint, prompt_ids
from tests.contract.conftest import make_torch
from tests.contract.engines import generate, state
from tests.unit.model.attention_contract import Case, cases, check, in_dtypes
from tests.unit.model.runner import chunked_logits

CUDA = torch.device("cuda")


def _fast() -> list[AttentionBackend]:
    """The backends that need half precision."""
    found: list[AttentionBackend] = []
    if varlen_backend.runs_on(CUDA):
        found.append(VarlenAttention.load())
    if flash_backend.available():
        found.append(FlashAttention(FlashKernels.load()))
    return found


def _half_precision() -> list[tuple[AttentionBackend, Case]]:
    # Builds may be limited to the head sizes that models have.
    usual = [case for case in cases((256,)) if case.head_dim in (64, 128)]
    taken: list[tuple[AttentionBackend, list[Case]]] = [
        (TorchAttention(), cases()),
        *((each, usual) for each in _fast()),
    ]
    return [(backend, case) for backend, some in taken for case in in_dtypes(some, torch.bfloat16, torch.bfloat16)]


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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_in_float32_equal_generate(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    prompt, reference = lively_prompt(load_reference(tmp_path), 40)
    engine = make_torch(tmp_path, 1, device=CUDA.type)
    assert generate(engine, state(prompt), 64) == reference.token_ids
    engine.close()
    assert engine.audit() == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of fast backends are as near to float32 as torch's operators, with chunks and single tokens."""
    make_checkpoint(family, tmp_path, head_dim=64)
    ids = prompt_ids(300)

    def logits(model: LoadedModel, backend: AttentionBackend) -> torch.Tensor:
        monkeypatch.setattr(decoder, "select", lambda *_: backend)
        whole = chunked_logits(model, ids[:280], chunk=90, page_size=256)
        single = chunked_logits(model, ids[:20], chunk=1, page_size=256)
        return torch.cat((whole, single))

    exact, half = (load_model(tmp_path, dtype=dtype, device=CUDA) for dtype in (torch.float32, torch.bfloat16))
    expected = logits(exact, TorchAttention())

    def error(backend: AttentionBackend) -> float:
        return float((logits(half, backend) - expected).norm() / expected.norm())

    usual = error(TorchAttention())
    assert 0 < usual < 0.1
    for backend in _fast():
        assert error(backend) < 1.5 * usual, backend.name
