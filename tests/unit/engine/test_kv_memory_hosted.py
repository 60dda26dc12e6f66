"""Pages of both homes, in and out, equal pages in one tensor. The device is acted out on a CPU."""

import random

import pytest
import torch

from baton.engine.kv_memory import CudaMemory, HostedMemory, TorchMemory
from baton.kv.format import attention_parts
from baton.model.attention import KvCache, SegmentRing
from tests.unit.engine.cuda_standin import Cuda, Event, Stream, cuda

__all__ = ["cuda"]

DEVICE_PAGES, PAGES, PAGE, HEADS, WIDTH, LAYERS = 5, 12, 4, 3, 5, 2


def caches() -> tuple[KvCache, KvCache]:
    """The same pages in one tensor, and in two: those from number 5 on in host memory."""
    shape = (LAYERS, PAGES, PAGE, HEADS, WIDTH)
    names = [part.name for part in attention_parts("float32", HEADS, WIDTH)]
    whole = {name: torch.randn(shape) for name in names}
    device = {
        name: torch.cat([part[:, :DEVICE_PAGES], torch.zeros(LAYERS, 1, *shape[2:])], 1) for name, part in whole.items()
    }
    host = {name: part[:, DEVICE_PAGES:].clone() for name, part in whole.items()}
    return KvCache(whole), KvCache(device, host, DEVICE_PAGES)


def hosted(kv: KvCache) -> HostedMemory:
    return HostedMemory(CudaMemory(kv), kv, SegmentRing(kv, torch.device("cpu"), 2, 8))


def check_equal(whole: KvCache, parted: KvCache) -> None:
    for name, part in whole.parts.items():
        assert torch.equal(torch.cat([parted.parts[name][:, :DEVICE_PAGES], parted.host[name]], 1), part)


@pytest.mark.parametrize("pages", [(1, 9, 4, 6, 7, 5), (2, 0, 4, 1, 3, 2), (11, 5, 6, 7, 10, 9)], ids=str)
def test_all_calls_equal_those_of_one_tensor(cuda: Cuda, pages: tuple[int, ...]) -> None:
    rng = random.Random(str(pages))
    whole, parted = caches()
    one, two = TorchMemory(whole), hosted(parted)
    for _ in range(30):
        begin, head, layer = rng.randrange(23), rng.randrange(HEADS), rng.randrange(LAYERS)
        tokens, heads = range(begin, rng.randint(begin + 1, 24)), range(head, rng.randint(head + 1, HEADS))
        parts = one.read(pages, layer, tokens, heads)
        found = two.read(pages, layer, tokens, heads)
        assert [(part.name, part.shape, bytes(part.data)) for part in found] == [
            (part.name, part.shape, bytes(part.data)) for part in parts
        ]
        for memory in (one, two):
            memory.write(pages, 1 - layer, 0, head, parts)
    check_equal(whole, parted)
    blocks = one.read_blocks(pages, 3, 7, 2)
    assert two.read_blocks(pages, 3, 7, 2) == blocks
    for memory in (one, two):
        memory.write_blocks(pages, 9, 7, blocks)
        memory.copy_page(pages[0], pages[1], 3)
    check_equal(whole, parted)


def test_pages_of_both_homes_are_read_after_their_layers_are_done(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kv = caches()
    device, source = CudaMemory(kv), SegmentRing(kv, torch.device("cpu"), 2, 8)
    memory, waited = HostedMemory(device, kv, source), list[Event]()
    k = v = torch.randn(8, HEADS, WIDTH)
    for layer in range(LAYERS):
        source.store(layer, (6, 2), range(8), k, v)
        device.produced(layer)
    stored, produced = list(source._stored.values()), list(device._produced.values())
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: waited.append(event))
    for pages in ((6, 2), (2, 1)):
        hosted = 6 in pages
        memory.read(pages, 1, range(8), range(HEADS))
        assert waited[:-1] == [*stored[1:][:hosted], produced[1]]
        waited.clear()
        memory.read_blocks(pages, 0, 4, 2)
        assert waited[:-1] == [*stored[: 2 * hosted], *produced]
        waited.clear()


def test_writes_wait_for_nothing_that_is_being_computed(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kv = caches()
    device, source = CudaMemory(kv), SegmentRing(kv, torch.device("cpu"), 2, 8)
    memory, waited = HostedMemory(device, kv, source), list[Event]()
    k = v = torch.randn(4, HEADS, WIDTH)
    read, blocks = memory.read((6,), 0, range(4), range(HEADS)), memory.read_blocks((6,), 0, 4, 1)
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: waited.append(event))
    for layer in range(LAYERS):
        source.store(layer, (6,), range(4), k, v)
        device.produced(layer)
    computed = {*source._stored.values(), *device._produced.values()}
    waited.clear()
    memory.copy_page(7, 8, 4)
    memory.write((7, 2), 0, 0, 0, read)
    memory.write_blocks((7, 2), 0, 4, blocks)
    assert len(waited) >= 3
    assert computed.isdisjoint(waited)
