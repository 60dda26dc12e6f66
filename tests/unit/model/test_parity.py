"""Every family against transformers, in float32: logits of all positions, and greedy tokens."""

from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.load import LoadedModel, load_model
from baton.model.attention import AttentionBatch
from tests.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    lively_prompt,
    load_reference,
    make_checkpoint,
    prompt_ids,
)
from tests.kernels import KERNELS, library_of
from tests.unit.model.runner import Sequence, chunked_logits, forward, greedy_ids

LENGTH = 100
"""Past every window (20, 24) and past the original length of Llama-3's RoPE (32)."""


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both runtimes."""

    ours: LoadedModel
    theirs: Any

    def expected(self, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=KERNELS)
def native(request: pytest.FixtureRequest) -> CDLL | None:
    """The native library, or None for torch's operators."""
    return library_of(request.param)


@pytest.fixture(scope="module", params=[(f, tied) for f in FAMILIES for tied in (False, True)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, native: CDLL | None) -> Pair:
    family, tied = request.param
    directory = make_checkpoint(family, tmp_path_factory.mktemp(family), tied=tied)
    return Pair(load_model(directory, dtype=torch.float32, native=native), load_reference(directory))


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (7, 256), (16, 16), (64, 16), (LENGTH, 256)])
def test_logits_equal_transformers_for_any_chunk_and_page_size(pair: Pair, chunk: int, page_size: int) -> None:
    ids = prompt_ids(LENGTH)
    found = chunked_logits(pair.ours, ids, chunk, page_size)
    assert found.shape == (LENGTH, VOCAB_SIZE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, pair.expected(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 16), (LENGTH, 256)])
def test_greedy_equals_generate(pair: Pair, chunk: int, page_size: int) -> None:
    prompt, reference = lively_prompt(pair.theirs, 40)
    assert greedy_ids(pair.ours, prompt, 64, chunk, page_size) == reference.token_ids


@pytest.mark.parametrize("sampled", [[], [-1], [0, 1, 2, 7, -2, -1]])
def test_a_pass_for_some_hidden_states_leaves_the_same_kv(pair: Pair, sampled: list[int]) -> None:
    """A pass of which only some tokens' hidden states are wanted yields those, and leaves the same KV."""
    ids, chunk = prompt_ids(LENGTH), 40
    pools = [pair.ours.new_kv_cache(8, 16) for _ in range(2)]
    whole, tail = (Sequence(kv, LENGTH) for kv in pools)
    for begin in range(0, LENGTH, chunk):
        part = ids[begin : begin + chunk]
        expected = forward(pair.ours, pools[0], [(whole, part)])
        wanted = [place % len(part) for place in sampled]
        found = forward(pair.ours, pools[1], [(tail, part)], wanted)
        torch.testing.assert_close(found, expected[wanted], rtol=0, atol=1e-4)
    for name, expected in pools[0].parts.items():
        torch.testing.assert_close(pools[1].parts[name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("page_size", [16, 256])
def test_mixed_batch_equals_alone(pair: Pair, page_size: int) -> None:
    """Prompts of any length in one forward, then steps and chunks in one forward, as if each were alone."""
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((1, 5, 19, 40, 90, 33))]
    kv = pair.ours.new_kv_cache(40, page_size)
    sequences = [Sequence(kv, 100, first_page=index * 6) for index in range(len(prompts))]
    forward(pair.ours, kv, list(zip(sequences, [ids[:-1] or ids for ids in prompts], strict=True))[1:])
    last = [ids[-1:] for ids in prompts]
    last[-1] = prompt_ids(30, seed=9)  # a chunk among the steps
    hidden = forward(pair.ours, kv, list(zip(sequences, last, strict=True)))
    found = pair.ours.decoder.logits(hidden)
    ends = torch.tensor([len(ids) for ids in last]).cumsum(0) - 1
    for prompt, new, row in zip(prompts, last, found[ends], strict=True):
        alone = pair.expected(prompt[:-1] + new)[-1]
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-4)


def test_bfloat16_stays_close(pair: Pair, native: CDLL | None) -> None:
    model = load_model(pair.ours.path, dtype=torch.bfloat16, native=native)
    ids = prompt_ids(LENGTH)
    found = chunked_logits(model, ids, 64, 16)
    expected = pair.expected(ids)
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, expected).mean() > 0.98


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": None}),
        ("mistral", {"sliding_window": None, "head_dim": 20}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                   "use_sliding_window": True, "sliding_window": 13}),
    ],
    ids=str,
)  # fmt: skip
def test_family_variants(family: str, overrides: dict[str, Any], tmp_path: Path, native: CDLL | None) -> None:
    make_checkpoint(family, tmp_path, **overrides)
    both = Pair(load_model(tmp_path, dtype=torch.float32, native=native), load_reference(tmp_path))
    ids = prompt_ids(LENGTH)
    torch.testing.assert_close(chunked_logits(both.ours, ids, 32, 16), both.expected(ids), rtol=0, atol=1e-4)


def test_a_layer_callback_sees_final_pages_and_may_abort(tmp_path: Path, native: CDLL | None) -> None:
    class Stop(Exception):
        pass

    model = load_model(make_checkpoint("qwen2", tmp_path), dtype=torch.float32, native=native)
    kv, ids = model.new_kv_cache(8, 16), prompt_ids(20)
    seen: list[tuple[int, Tensor]] = []

    def run(on_layer: Any) -> Tensor:
        sequence = Sequence(kv, 20)
        batch = AttentionBatch.build([20], [20], sequence.table[None], 16)
        hidden: Tensor = model.decoder(torch.tensor(ids), batch.positions, batch, kv, on_layer)
        return hidden

    def stop(layer: int) -> None:
        seen.append((layer, kv.parts["k"][layer].clone()))
        if layer == 1:
            raise Stop

    with pytest.raises(Stop):
        run(stop)
    assert [layer for layer, _ in seen] == [0, 1]
    assert not kv.parts["k"][2].any()
    layers: list[int] = []
    again = run(layers.append)
    assert layers == [0, 1, 2]
    for layer, pages in seen:
        assert torch.equal(kv.parts["k"][layer], pages)
    found = model.decoder.logits(again)
    torch.testing.assert_close(found, chunked_logits(model, ids, 20, 16), rtol=0, atol=1e-6)
