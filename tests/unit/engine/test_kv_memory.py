"""Pages in host memory and on a device: any tokens and heads come out and go in as if tokens lay in one row.

The device is acted out on a CPU (`tests.unit.engine.cuda_standin`).
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.engine.kv_memory import LAYERS_AHEAD, CudaMemory, KvShard, ShardedMemory, TorchMemory
from baton.kv.format import KvPart, PartData, attention_parts
from baton.model.attention import KvCache
from baton.model.tensors import DTYPES, dtype_name
from tests.unit.engine.cuda_standin import Cuda, Event, Stream, cuda

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
    parts = attention_parts(dtype_name(dtype), HEADS, WIDTH)
    kv = KvCache.allocate(parts, num_layers=layers, num_pages=PAGES, page_size=PAGE, device=torch.device("cpu"))
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
        # Received bytes begin at any address.
        odd = [replace(part, data=memoryview(b"\0" + bytes(part.data))[1:]) for part in parts]
        expected = {name: part.clone() for name, part in kv.parts.items()}
        for part in parts:
            flat = rows_of(kv, pages, part.name)
            values = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape).to(dtype)
            flat[layer, tokens.start : tokens.stop, heads.start : heads.stop] = values
            expected[part.name][:, pages] = flat.view(2, len(pages), PAGE, HEADS, WIDTH)
        target.write(pages, layer, tokens.start, heads.start, odd)
        assert all(torch.equal(kv.parts[name], part) for name, part in expected.items())


def test_parts_may_differ_in_width_and_dtype(kind: Kind) -> None:
    parts, device = [KvPart("int", "bfloat16", (HEADS, WIDTH)), KvPart("scale", "float32", (HEADS, 1))], "cpu"
    sizes = {"num_layers": 2, "num_pages": PAGES, "page_size": PAGE, "device": torch.device(device)}
    kv, copies = KvCache.allocate(parts, **sizes), [KvCache.allocate(parts, **sizes) for _ in range(2)]
    for part in kv.parts.values():
        part.copy_(torch.randn(part.shape))
    pages, count = [3, 1], 2 * PAGE
    source, (read, block) = kind(kv), map(kind, copies)
    for layer in range(2):
        read.write(pages, layer, 0, 0, source.read(pages, layer, range(count), range(HEADS)))
    block.write_blocks(pages, 0, PAGE, source.read_blocks(pages, 0, PAGE, 2))
    for copy in copies:
        assert all(torch.equal(copy.parts[name][:, pages], part[:, pages]) for name, part in kv.parts.items())


def block_bytes(kv: KvCache, pages: list[int], tokens: range) -> bytes:
    """A block's payload, as it is defined: layer after layer, part after part, each `[tokens, heads, width]`."""
    rows = [rows_of(kv, pages, name)[:, tokens.start : tokens.stop] for name in kv.parts]
    return b"".join(part[layer].contiguous().view(torch.uint8).numpy().tobytes() for layer in range(2) for part in rows)


BLOCK_SIZES = [1, 3, PAGE, 2 * PAGE, 12, 20]
"""Part of a page, a page, several, and sizes of which neither divides the other."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_blocks_are_read_from_any_token_on(kind: Kind, dtype: torch.dtype, size: int) -> None:
    kv = cache_of(dtype)
    memory, rng = kind(kv), random.Random(size)
    for _ in range(20):
        pages, start = rng.sample(range(PAGES), 6), rng.randrange(6 * PAGE - size + 1)
        count = rng.randint(1, (6 * PAGE - start) // size)
        blocks = [range(first, first + size) for first in range(start, start + count * size, size)]
        found = memory.read_blocks(pages, start, size, count)
        assert found == [block_bytes(kv, pages, tokens) for tokens in blocks]
        assert all(type(payload) is bytes for payload in found)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=dtype_name)
@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_blocks_are_written_from_any_token_on_and_none_beside_them(kind: Kind, dtype: torch.dtype, size: int) -> None:
    source, kv = cache_of(dtype), cache_of(dtype)
    memory, rng = kind(kv), random.Random(size)
    for _ in range(20):
        pages, start = rng.sample(range(PAGES), 6), rng.randrange(6 * PAGE - size + 1)
        count = rng.randint(1, (6 * PAGE - start) // size)
        blocks = [range(first, first + size) for first in range(start, start + count * size, size)]
        # Received bytes begin at any address, and must not be written to.
        payloads = [memoryview(b"\0" + block_bytes(source, pages, tokens))[1:] for tokens in blocks]
        expected = {name: part.clone() for name, part in kv.parts.items()}
        for name, part in expected.items():
            flat = rows_of(kv, pages, name)
            written = slice(start, start + count * size)
            flat[:, written] = rows_of(source, pages, name)[:, written]
            part[:, pages] = flat.view(2, len(pages), PAGE, HEADS, WIDTH)
        memory.write_blocks(pages, start, size, payloads)
        assert all(torch.equal(kv.parts[name], part) for name, part in expected.items())


def test_kv_that_is_read_is_a_copy(kind: Kind) -> None:
    kv = cache_of(torch.float32)
    part: PartData = kind(kv).read([3], 0, range(PAGE), range(HEADS))[0]
    before = bytes(part.data)
    kv.parts["k"].zero_()
    assert bytes(part.data) == before


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
    source, memory = TorchMemory(kv), CudaMemory(kv)
    keys, values = source.read([1], 0, range(PAGE), range(HEADS))
    (payload,) = source.read_blocks([1], 0, PAGE, 1)
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    with pytest.raises(RuntimeError):
        memory.write([3], 0, 0, 0, [keys, replace(values, shape=(PAGE + 1, HEADS, WIDTH))])
    assert len(waited) == 1
    with pytest.raises(RuntimeError):
        memory.write_blocks([3, 4], 0, PAGE, [payload, payload[:-1]])
    assert len(waited) == 2


def test_blocks_of_a_device_are_read_after_their_kernels(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, waited = cache_of(torch.float32), []
    memory = CudaMemory(kv)
    for layer in range(2):
        memory.produced(layer)
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: waited.append(event))
    memory.read_blocks([1], 0, PAGE, 1)
    assert waited == [memory._produced[layer] for layer in range(2)]


def shard(whole: KvCache, layers: range, heads: range) -> KvShard:
    """An empty cache like `whole`, of some layers and heads."""
    parts = attention_parts(dtype_name(whole.dtype), len(heads), WIDTH)
    sizes = {"num_layers": len(layers), "num_pages": PAGES, "page_size": PAGE}
    return KvShard(TorchMemory(KvCache.allocate(parts, **sizes, device=torch.device("cpu"))), layers, heads)


SHARDS = {
    "heads": [(range(3), range(1)), (range(3), range(1, 3))],
    "copies of heads": [(range(3), range(2)), (range(3), range(2)), (range(3), range(2, 3)), (range(3), range(2, 3))],
    "layers": [(range(2), range(3)), (range(2, 3), range(3))],
    "both": [(layers, heads) for layers in (range(1), range(1, 3)) for heads in (range(2), range(2, 3))],
}


@pytest.mark.parametrize("places", SHARDS.values(), ids=SHARDS.keys())
@pytest.mark.parametrize("seed", range(4))
def test_shards_are_read_and_written_as_one(places: list[tuple[range, range]], seed: int) -> None:
    kv = cache_of(torch.bfloat16, layers=3)
    whole, shards = TorchMemory(kv), [shard(kv, *place) for place in places]
    joined, (pages, layer, tokens, some) = ShardedMemory(shards), random_ranges(seed)

    def check() -> None:
        for each in shards:
            for name, part in each.memory.kv.parts.items():
                own = kv.parts[name][each.layers.start : each.layers.stop, :, :, each.heads.start : each.heads.stop]
                assert torch.equal(part, own)

    everything = list(range(PAGES))
    for each in range(kv.num_layers):
        joined.write(everything, each, 0, 0, whole.read(everything, each, range(PAGES * PAGE), range(HEADS)))
    assert data_of(joined.read(pages, layer, tokens, some)) == data_of(whole.read(pages, layer, tokens, some))
    check()
    # A part of the heads, blocks and copies of pages reach the same tokens of every shard.
    given = whole.read(pages, layer, tokens, some)
    for memory in (whole, joined):
        memory.write(pages, 2 - layer, tokens.start, some.start, given)
        memory.copy_page(pages[0], pages[1], 3)
        memory.write_blocks(pages, 5, 4, memory.read_blocks(pages, 12, 4, 3))
    assert joined.read_blocks(pages, 1, 4, 8) == whole.read_blocks(pages, 1, 4, 8)
    check()


def data_of(parts: list[PartData]) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(part.name, part.shape, bytes(part.data)) for part in parts]
