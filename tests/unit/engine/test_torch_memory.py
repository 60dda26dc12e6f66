"""Pages in host memory and on a device: any tokens and heads come out and go in as if tokens lay in one row.

The device is acted out on a CPU (`tests.unit.engine.cuda_standin`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.engine.cuda_memory import LAYERS_AHEAD, CudaMemory
from baton.engine.torch_memory import DTYPES, TorchMemory, dtype_name
from baton.kv.format import PartData
from baton.model.attention import KvCache
from tests.unit.engine.cuda_standin import Cuda, Event, cuda

__all__ = ["cuda"]

PAGES, PAGE, HEADS, WIDTH = 12, 8, 3, 5

Memory = TorchMemory | CudaMemory
Kind = Callable[[KvCache], Memory]


@pytest.fixture(params=[TorchMemory, CudaMemory])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param is CudaMemory:
        request.getfixturevalue("cuda")
    made: Kind = request.param
    return made


def cache_of(dtype: torch.dtype, layers: int = 2) -> KvCache:
    kv = KvCache.allocate(
        num_layers=layers,
        num_pages=PAGES,
        page_size=PAGE,
        kv_heads=HEADS,
        head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for part in kv.parts.values():
        part.copy_(torch.randn(part.shape))
    return kv


def rows_of(kv: KvCache, pages: list[int], name: str) -> torch.Tensor:
    """All tokens of the pages, one after the other: `[layers, tokens, heads, width]`."""
    return kv.parts[name][:, pages].flatten(1, 2)


def random_ranges(seed: int) -> tuple[list[int], int, range, range]:
    rng = random.Random(seed)
    pages = rng.sample(range(PAGES), 6)
    begin = rng.randrange(6 * PAGE)
    head = rng.randrange(HEADS)
    tokens = range(begin, rng.randint(begin + 1, 6 * PAGE))
    return pages, rng.randrange(2), tokens, range(head, rng.randint(head + 1, HEADS))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
def test_any_range_is_read(kind: Kind, dtype: torch.dtype) -> None:
    kv = cache_of(dtype)
    memory = kind(kv)
    for seed in range(200):
        pages, layer, tokens, heads = random_ranges(seed)
        for part in memory.read(pages, layer, tokens, heads):
            expected = rows_of(kv, pages, part.name)[layer, tokens.start : tokens.stop, heads.start : heads.stop]
            assert (part.dtype, part.shape) == (dtype_name(dtype), tuple(expected.shape))
            assert bytes(part.data) == expected.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
def test_any_range_is_written_and_nothing_beside_it(kind: Kind, dtype: torch.dtype) -> None:
    source, kv = TorchMemory(cache_of(torch.float32)), cache_of(dtype)
    target = kind(kv)
    for seed in range(200):
        pages, layer, tokens, heads = random_ranges(seed)
        parts = source.read(pages, layer, tokens, heads)
        # What is received begins at any address.
        odd = [replace(part, data=memoryview(b"\0" + bytes(part.data))[1:]) for part in parts]
        expected = {name: part.clone() for name, part in kv.parts.items()}
        for part in parts:
            flat = rows_of(kv, pages, part.name)
            values = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape).to(dtype)
            flat[layer, tokens.start : tokens.stop, heads.start : heads.stop] = values
            expected[part.name][:, pages] = flat.view(2, len(pages), PAGE, HEADS, WIDTH)
        target.write(pages, layer, tokens.start, heads.start, odd)
        assert all(torch.equal(kv.parts[name], part) for name, part in expected.items())


def test_what_is_read_is_a_copy(kind: Kind) -> None:
    kv = cache_of(torch.float32)
    part: PartData = kind(kv).read([3], 0, range(PAGE), range(HEADS))[0]
    before = bytes(part.data)
    kv.parts["k"].zero_()
    assert bytes(part.data) == before


def test_what_was_saved_comes_back_into_other_pages(kind: Kind) -> None:
    kv = cache_of(torch.bfloat16)
    memory = kind(kv)
    before = {name: rows_of(kv, [5, 1, 8], name)[:, : 2 * PAGE + 3].clone() for name in kv.parts}
    saved = memory.save([5, 1, 8], 2 * PAGE + 3)
    for part in kv.parts.values():
        part[:, [5, 1, 8]] = 0.0
    memory.restore([2, 11, 0], saved)
    assert all(torch.equal(rows_of(kv, [2, 11, 0], name)[:, : 2 * PAGE + 3], rows) for name, rows in before.items())


def test_a_page_is_copied_as_far_as_it_is_filled(kind: Kind) -> None:
    kv = cache_of(torch.float32)
    expected = {name: part.clone() for name, part in kv.parts.items()}
    for part in expected.values():
        part[:, 7, :3] = part[:, 4, :3]
    kind(kv).copy_page(4, 7, 3)
    assert all(torch.equal(kv.parts[name], part) for name, part in expected.items())


def test_the_host_is_a_few_layers_ahead_of_the_device(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, waited = CudaMemory(cache_of(torch.float32, layers=5)), []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    for layer in range(5):
        memory.produced(layer)
        assert len(waited) == max(0, layer + 1 - LAYERS_AHEAD)
    assert waited == [memory._produced[layer] for layer in range(5 - LAYERS_AHEAD)]


def test_a_write_that_fails_midway_is_waited_for(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may have another owner as soon as it has raised."""
    kv, waited = cache_of(torch.float32), []
    parts = TorchMemory(kv).read([1], 0, range(PAGE), range(HEADS))
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    with pytest.raises(RuntimeError):
        CudaMemory(kv).write([3], 0, 0, 0, [parts[0], replace(parts[1], shape=(PAGE + 1, HEADS, WIDTH))])
    assert len(waited) == 1
