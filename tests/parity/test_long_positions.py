"""Greedy output beyond position 4,096, where transformers' float32 angles are no reference any more.

Ours here is transformers with its rotary embedding in float64, whose frequencies are computed from the formulas again.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from baton.engine.load import load_model
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.kernels import KERNELS, library_of
from tests.unit.model.runner import greedy_ids

PROMPT, NEW = 4_500, 12
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 8192, "sliding_window": None}
PLAIN = {"use_sliding_window": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}


class ExactRotary(torch.nn.Module):
    """Cosines and sines of float64 angles, in place of a model's rotary embedding with theta 10,000."""

    def __init__(self, head_dim: int, factor: float) -> None:
        super().__init__()
        self._frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim) / factor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of transformers."""
        angles = position_ids[..., None].double() * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


@pytest.fixture(scope="module", params=[("qwen2", 1.0), ("mistral", 2.0)], ids=lambda param: str(param[0]))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], list[int]]:
    """A model (one whose frequencies are divided by a factor), a prompt, and what follows it."""
    family, factor = request.param
    path = make_checkpoint(family, tmp_path_factory.mktemp(family), **SIZES, **(PLAIN if factor == 1.0 else {}))
    ids = prompt_ids(PROMPT, 7)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    model.model.rotary_emb = ExactRotary(head_dim, factor)
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return path, ids, out[0, PROMPT:].tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_output_equals_that_of_exact_angles(checkpoint: tuple[Path, list[int], list[int]], kernels: str) -> None:
    path, ids, expected = checkpoint
    model = load_model(path, dtype=torch.float32, native=library_of(kernels))
    with torch.inference_mode():
        assert greedy_ids(model, ids, NEW, chunk=1024, page_size=16) == expected
    assert len(set(expected)) > 3
