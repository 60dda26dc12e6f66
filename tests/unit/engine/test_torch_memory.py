"""Host pages: any range of tokens and heads comes out and goes in as if tokens lay in one row."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from baton.engine.torch_memory import DTYPES, TorchMemory, dtype_name
from baton.kv.format import PartData
from baton.model.attention import KvCache

PAGES, PAGE, HEADS, WIDTH = 12, 8, 3, 5


def memory_of(dtype: torch.dtype) -> TorchMemory:
    kv = KvCache.allocate(
        num_layers=2,
        num_pages=PAGES,
        page_size=PAGE,
        kv_heads=HEADS,
        head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for part in kv.parts.values():
        part.copy_(torch.randn(part.shape))
    return TorchMemory(kv)


def rows_of(memory: TorchMemory, pages: list[int], name: str) -> torch.Tensor:
    """All tokens of the pages, one after the other: `[layers, tokens, heads, width]`."""
    return memory.kv.parts[name][:, pages].flatten(1, 2)


def random_ranges(seed: int) -> tuple[list[int], int, range, range]:
    rng = random.Random(seed)
    pages = rng.sample(range(PAGES), 6)
    begin = rng.randrange(6 * PAGE)
    head = rng.randrange(HEADS)
    tokens = range(begin, rng.randint(begin + 1, 6 * PAGE))
    return pages, rng.randrange(2), tokens, range(head, rng.randint(head + 1, HEADS))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
def test_any_range_is_read(dtype: torch.dtype) -> None:
    memory = memory_of(dtype)
    for seed in range(200):
        pages, layer, tokens, heads = random_ranges(seed)
        for part in memory.read(pages, layer, tokens, heads):
            expected = rows_of(memory, pages, part.name)[layer, tokens.start : tokens.stop, heads.start : heads.stop]
            assert (part.dtype, part.shape) == (dtype_name(dtype), tuple(expected.shape))
            assert bytes(part.data) == expected.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
def test_any_range_is_written_and_nothing_beside_it(dtype: torch.dtype) -> None:
    source, target = memory_of(torch.float32), memory_of(dtype)
    for seed in range(200):
        pages, layer, tokens, heads = random_ranges(seed)
        parts = source.read(pages, layer, tokens, heads)
        # What is received begins at any address.
        odd = [replace(part, data=memoryview(b"\0" + bytes(part.data))[1:]) for part in parts]
        expected = {name: part.clone() for name, part in target.kv.parts.items()}
        for part in parts:
            flat = rows_of(target, pages, part.name)
            values = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape).to(dtype)
            flat[layer, tokens.start : tokens.stop, heads.start : heads.stop] = values
            expected[part.name][:, pages] = flat.view(2, len(pages), PAGE, HEADS, WIDTH)
        target.write(pages, layer, tokens.start, heads.start, odd)
        assert all(torch.equal(target.kv.parts[name], part) for name, part in expected.items())


def test_what_is_read_is_a_copy() -> None:
    memory = memory_of(torch.float32)
    part: PartData = memory.read([3], 0, range(PAGE), range(HEADS))[0]
    before = bytes(part.data)
    memory.kv.parts["k"].zero_()
    assert bytes(part.data) == before
