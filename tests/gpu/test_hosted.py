"""KV in host memory beside a CUDA device: segments equal plain attention, a batch may have sequences of both homes,
transfers read and write beside a chunk, and device memory does not grow with the prompt."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import factory
from baton.engine.core import EngineCore
from baton.kv.format import attention_parts
from baton.model.attention import (
    AttentionBackend,
    AttentionBatch,
    HostKv,
    KvCache,
    SegmentedAttention,
    SegmentRing,
    select,
)
from baton.model.tensors import dtype_name
from tests.checkpoints import make_checkpoint
from tests.contract.conftest import make_torch
from tests.contract.engines import MIXED, chunks, copy_kv, generate, ignore, prefill, start, state, whole_kv
from tests.engine_calls import found, prefill_chunk
from tests.unit.model.attention_contract import dense

DEVICE = torch.device("cuda")
PAGE, LAYERS, HEADS, KV_HEADS, DIM = 16, 2, 4, 2, 64
Make = Callable[..., EngineCore]


@pytest.fixture
def make(checkpoint: Path) -> Iterator[Make]:
    """Makes engines, and closes them."""
    made: list[EngineCore] = []

    def engine(home: str, path: Path = checkpoint, **sizes: Any) -> EngineCore:
        made.append(make_torch(path, 1, device=DEVICE.type, home=home, **sizes))
        return made[-1]

    yield engine
    for each in made:
        each.close()
        assert each.audit() == {}


@pytest.mark.parametrize("window", [None, 40, 700])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("size", [50, 256, 2000])
def test_segments_of_both_homes_are_exact(size: int, dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    backend: AttentionBackend = select(DEVICE, dtype, dtype, PAGE, DIM)
    tokens, device_pages = 1500, 60
    parts = attention_parts(dtype_name(dtype), KV_HEADS, DIM)
    kv = KvCache.allocate(
        parts, num_layers=LAYERS, num_pages=device_pages + 1, host_pages=100, page_size=PAGE, device=DEVICE
    )
    ring = SegmentRing(kv, DEVICE, 3, size)
    # Runs and single pages of both homes in turns, and a run across the border.
    pages = [*range(45, 72), *range(20), *range(75, 115), 74, 30, 73, 31, *range(120, 130)]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(LAYERS, tokens, heads, DIM, device=DEVICE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    table = torch.tensor([pages], dtype=torch.int32, device=DEVICE)
    for begin, end in [*chunks(1400, 400), (1400, 1401), (1401, 1500)]:
        host = HostKv({0: pages}, ring)
        batch = AttentionBatch.build([end - begin], [end], table, PAGE, host)
        attention = SegmentedAttention(backend, host, [window] * LAYERS)
        for layer in range(LAYERS):
            attention.append(kv, layer, k[layer, begin:end], v[layer, begin:end], batch)
            found = attention.attend(kv, layer, q[layer, begin:end], batch, window)
            expected = dense(q[layer, begin:end], k[layer, :end], v[layer, :end], window)
            torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
        ring.end()


def test_rates_of_the_device_decide_how_long_chunks_are(make: Make) -> None:
    engine = make("host")
    assert 100 < engine.spec.min_overlap_chunk < 100_000
    assert make("device").spec.min_overlap_chunk == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes longer than a test."""
    monkeypatch.setattr(factory, "measure_rates", lambda *_: (1e15, 5e10))


def test_a_batch_has_sequences_of_both_homes(make: Make, quick: None) -> None:
    alone, engine = make("device"), make("both")
    prompts = [[(7 * i + position) % 256 for position in range(30 + 25 * i)] for i in range(len(MIXED))]
    wanted = [state(prompt, params) for prompt, params in zip(prompts, MIXED, strict=True)]
    expected = [generate(alone, one, 20) for one in wanted]
    # Sequences in turns: where the device has room, and where a filler has taken what is left of it.
    running, homes = [], list[bool]()
    for i, one in enumerate(wanted):
        left = engine.stats().free - engine.spec.host_pages
        filler = engine.reserve("filler", left * engine.spec.page_size) if i % 2 and left > 0 else None
        handle, outputs = start(engine, f"{i}", one, 22)
        homes.append(handle.in_host)
        running.append((handle, outputs))
        if filler is not None:
            engine.free(filler)
    assert set(homes) == {True, False}
    unread = engine.launch()
    for _ in range(20):
        following = engine.launch()
        for own, infos in found(unread.result()):
            next(outputs for handle, outputs in running if handle is own).append(infos[0].token_id)
        unread = following
    unread.result()
    assert [outputs[:20] for _, outputs in running] == expected
    for handle, _ in running:
        engine.free(handle)


@pytest.mark.parametrize("home", ["both", "host"])
def test_transfers_read_and_write_while_a_chunk_is_computed(make: Make, quick: None, home: str) -> None:
    engine = make(home, pages=160)
    prompt, heads = [position % 251 for position in range(450)], range(engine.spec.kv_format.heads)
    donor = engine.reserve("donor", 450)
    first = prefill(engine, donor, state(prompt), 64)
    before = [bytes(part.data) for part in whole_kv(engine, donor, 450)]
    layers = range(engine.spec.kv_format.layers)
    handle = engine.reserve("computed", 450)
    reads: list[Any] = []

    with ThreadPoolExecutor(3) as threads:
        copies = [threads.submit(copy_kv, engine, donor, f"t{number}", 450) for number in range(4)]
        for begin, end in chunks(450, 90):

            def read(layer: int, tokens: range = range(begin, end)) -> None:
                found = threads.submit(engine.read_kv, handle, layer, tokens, heads)
                reads.append((layer, tokens, found))

            sample = [state(prompt)] if end == 450 else ()
            result = prefill_chunk(engine, handle, prompt, begin, end, on_layer=read, sample=sample)
        assert all(each.result(60) == before for each in copies)
        found = [(layer, tokens, [bytes(part.data) for part in each.result(60)]) for layer, tokens, each in reads]
    assert result.tokens[0].token_id == first.token_id
    assert len(found) == 5 * len(layers)
    for layer, tokens, data in found:
        assert data == [bytes(part.data) for part in engine.read_kv(handle, layer, tokens, heads)]
    engine.free(handle)
    engine.free(donor)


def test_device_memory_does_not_grow_with_the_prompt(make: Make, quick: None, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, max_position_embeddings=16384)
    engine = make("host", path, pages=1100, max_model_len=16384)
    peaks = []
    for tokens in (2048, 4096, 16384):
        handle, prompt = engine.reserve("a", tokens), [position % 251 for position in range(tokens)]
        torch.cuda.reset_peak_memory_stats(DEVICE)
        for begin, end in chunks(tokens, 512):
            prefill_chunk(engine, handle, prompt, begin, end, on_layer=ignore)
        peaks.append(torch.cuda.max_memory_allocated(DEVICE))
        engine.free(handle)
    assert max(peaks[1:]) <= 1.02 * peaks[0]
