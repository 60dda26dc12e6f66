"""The decoder over native kernels: what its bits depend on, what it refuses, what is not finite."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.factory import build
from baton.engine.load import LoadedModel, load_model
from baton.errors import ConfigError, EngineError
from baton.kv.format import KEYS
from baton.model.attention import AttentionBatch, KvCache
from baton.model.config import ModelConfig
from baton.native.decoder import NativeDecoder, NativeOutput, unsupported
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.kernels import LIBRARY, needs_native
from tests.unit.model.runner import Sequence, chunked_logits, forward

pytestmark = needs_native

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, dtype=torch.float32, native=LIBRARY)


def decoder_of(model: LoadedModel) -> NativeDecoder:
    assert isinstance(model.decoder, NativeDecoder)
    return model.decoder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_torch_s(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    ids = prompt_ids(100)
    exact = chunked_logits(load_model(path, dtype=torch.float32), ids, 100, 16)
    torch_s, ours = (
        chunked_logits(load_model(path, dtype=torch.bfloat16, native=native), ids, 64, 16) for native in (None, LIBRARY)
    )
    assert (ours - exact).norm() < 1.1 * (torch_s - exact).norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_do_not_depend_on_chunks(checkpoint: Path, dtype: torch.dtype) -> None:
    model = load_model(checkpoint, dtype=dtype, native=LIBRARY)
    ids = prompt_ids(90)
    whole = chunked_logits(model, ids, 90, 16)
    for chunk, page_size in ((1, 16), (7, 5), (64, 256)):
        found = chunked_logits(model, ids, chunk, page_size)
        if torch.equal(found, whole):
            continue
        # AMX sums in another order than the dot products that few rows take.
        assert dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(found, whole).min() > 0.98


def choose(
    model: LoadedModel, ids: list[int], contexts: list[int], tables: Tensor, kv: KvCache, *, logits: bool
) -> NativeOutput:
    """A step: one new token of each sequence."""
    batch = AttentionBatch((1,) * len(ids), tuple(contexts), tables, kv.page_size)
    return decoder_of(model).forward_head(torch.tensor(ids), batch, kv, None, None, logits)


def test_a_step_chooses_the_largest_logits_first(model: LoadedModel) -> None:
    kv = model.new_kv_cache(20, 16)
    sequence = Sequence(kv, 60)
    forward(model, kv, [(sequence, prompt_ids(40))])
    output = choose(model, [3], [41], sequence.table[None], kv, logits=True)
    assert output.argmax.tolist() == output.logits.argmax(-1).tolist()
    without = choose(model, [3], [41], sequence.table[None], kv, logits=False)
    assert without.logits is None
    assert without.argmax.tolist() == output.argmax.tolist()


def test_a_row_that_is_not_finite_spoils_no_other(model: LoadedModel) -> None:
    kv = model.new_kv_cache(20, 16)
    sequences = [Sequence(kv, 60, first_page=5 * index) for index in range(2)]
    for sequence in sequences:
        forward(model, kv, [(sequence, prompt_ids(40))])
    kv.parts[KEYS][0, sequences[0].table[1]] = float("nan")
    tables = torch.stack([sequence.table for sequence in sequences])
    output = choose(model, [3, 3], [41, 41], tables, kv, logits=True)
    assert output.logits is not None
    assert output.argmax[0] == -1
    assert output.argmax[1] == output.logits[1].argmax() >= 0


def untouched(kv: KvCache) -> bool:
    return all(bool((part == 7).all()) for part in kv.parts.values())


@settings(deadline=None)
@given(data=st.data())
def test_indexes_outside_of_pages_are_refused_before_any_write(model: LoadedModel, data: st.DataObject) -> None:
    """A page, a length or a token id that is outside: an error, and untouched pages."""
    kv = model.new_kv_cache(9, 4)
    for part in kv.parts.values():
        part.fill_(7)
    count, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))

    def some(most: int, least: int, length: int) -> list[int]:
        drawn: list[int] = data.draw(st.lists(st.integers(least, most), min_size=length, max_size=length))
        return drawn

    # No two sequences share a page: threads would write into it at once.
    pages = data.draw(st.permutations(range(9)))
    tables = torch.tensor(pages[: count * width], dtype=torch.int32).view(count, width)
    contexts, ids = some(4 * width, 1, count), some(model.config.vocab_size - 1, 0, count)
    row = data.draw(st.integers(0, count - 1))
    spoilt = data.draw(st.sampled_from(["nothing", "page", "context", "token id"]))
    if spoilt == "page":
        tables[row, (contexts[row] - 1) // 4] = data.draw(st.sampled_from([-1, 9, 2**31 - 1, -(2**31)]))
    elif spoilt == "context":
        contexts[row] = data.draw(st.sampled_from([0, -1, 4 * width + 1, 2**31 - 1, -(2**31)]))
    elif spoilt == "token id":
        ids[row] = data.draw(st.sampled_from([-1, model.config.vocab_size, 2**62]))
    if spoilt == "nothing":
        choose(model, ids, contexts, tables, kv, logits=False)
        assert not untouched(kv)
        return
    with pytest.raises(EngineError, match="native kernels: "):
        choose(model, ids, contexts, tables, kv, logits=False)
    assert untouched(kv)


def test_threads_give_the_same_bits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    for threads in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(
            chunked_logits(load_model(checkpoint, dtype=torch.float32, native=LIBRARY), prompt_ids(70), 32, 16)
        )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("fields", [{"kv_dtype": "float16"}, {"dtype": "float16"}], ids=str)
def test_models_without_kernels_get_torch_s(checkpoint: Path, fields: dict[str, Any]) -> None:
    given = {"device": "cpu", "slots": 1, "kv_memory": 8 << 20, "threads": 1, **fields}
    engine: Any = build(EngineConfig(str(checkpoint), **given))
    assert not isinstance(engine.executor.runner._decoder, NativeDecoder)
    with pytest.raises(ConfigError, match=r"native can't be used: .*dtype is float16"):
        build(EngineConfig(str(checkpoint), kernels="native", **given))


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_kinds_of_layers_without_kernels_get_torch_s(checkpoint: Path, kind: str) -> None:
    """One layer of many is enough."""
    config = ModelConfig.from_pretrained(checkpoint)
    assert unsupported(config, torch.float32, torch.float32) == ""
    other: Any = dataclasses.replace(config.layers[-1], **{kind: "another"})
    mixed = dataclasses.replace(config, layers=(*config.layers[:-1], other))
    found = unsupported(mixed, torch.float32, torch.float32)
    assert found.startswith(f"layer {len(config.layers) - 1} has another ")
