"""The bench of long prompts: strategies compute the same, and only streaming's memory does not grow."""

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.model.decoder import Decoder
from baton.model.load import load_model
from bench.long import (
    PLAIN,
    PlainModel,
    chunked_attention,
    compare_strategies,
    draw_prompt,
    standard_attention,
    write_checkpoint,
)
from bench.long_fleet import generate_plain
from tests.checkpoints import greedy, load_reference


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("segment", [5, 8, 99])
def test_strategies_end_in_the_same_logprobs(checkpoint: Path, segment: int) -> None:
    # It raises where they differ.
    assert [*compare_strategies(checkpoint, 29, 8, segment)] == ["streaming", *(run.__name__ for run in PLAIN)]


def test_streaming_memory_does_not_grow_with_the_prompt(checkpoint: Path) -> None:
    short, long = (compare_strategies(checkpoint, length, 32, 32) for length in (256, 1024))
    growth = {name: long[name]["peak_mib"] / row["peak_mib"] for name, row in short.items()}
    assert growth.pop("streaming") <= 1.02
    assert min(growth.values()) > 1.5


def test_plain_functions_generate_what_transformers_does(checkpoint: Path) -> None:
    model = PlainModel(cast(Decoder, load_model(checkpoint, dtype=torch.float32).decoder), 8, 6)
    prompt = draw_prompt(29)
    assert generate_plain(model, prompt, 12)[0] == greedy(load_reference(checkpoint), prompt, 12).token_ids


def test_chunked_attention_equals_standard() -> None:
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(20, 8, generator=random), torch.randn(4, 8, 8, generator=random)
    torch.testing.assert_close(chunked_attention(x, weights, 6), standard_attention(x, weights))
