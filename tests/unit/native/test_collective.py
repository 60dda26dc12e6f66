"""Exchanges between ranks that are threads, each with a mapping of its own, as processes have."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.errors import EngineError
from baton.native.collective import Collective, shared_memory
from tests.kernels import needs_native
from tests.ranks import run_threads

pytestmark = needs_native


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_the_same_bits_on_all_ranks(size: int) -> None:
    """Over many exchanges, of arrays that fill a piece in part, exactly, and more than once."""
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(size, count, generator=generator) for count in (1, 7, 64, 65, 1000)] * 20

    def work(collective: Collective) -> list[Tensor]:
        return [collective.all_reduce(array[collective.rank]) for array in arrays]

    found = run_threads(size, 64, work)
    for index, array in enumerate(arrays):
        total = array[0].clone()
        for part in array[1:]:
            total += part
        for rank in range(size):
            assert torch.equal(found[rank][index], total), f"rank {rank}, {array.shape[1]} floats"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_keep_shape_and_dtype(dtype: torch.dtype) -> None:
    """Also where they are not contiguous; the argument of a sum does not change."""

    def work(collective: Collective) -> tuple[Tensor, Tensor, Tensor]:
        own = (torch.arange(6.0).view(2, 3) + 10 * collective.rank).to(dtype).t()
        return own, collective.all_reduce(own), collective.all_gather(own)

    for rank, (own, total, joined) in enumerate(run_threads(2, 5, work)):
        base = torch.arange(6.0).view(2, 3).t()
        assert torch.equal(own, (base + 10 * rank).to(dtype))
        assert torch.equal(total, (2 * base + 10).to(dtype))
        assert torch.equal(joined, torch.cat((base, base + 10), dim=1).to(dtype))


def test_a_late_rank_is_waited_for_and_the_wait_is_counted() -> None:
    """Its arrival wakes the others, which would look again after 100 ms only."""

    def work(collective: Collective) -> tuple[list[float], int]:
        waits: list[float] = []
        for _ in range(10):
            before = collective.waited_s
            collective.barrier()
            if collective.rank:
                time.sleep(0.02)
            collective.barrier()
            waits.append(collective.waited_s - before)
        return waits, collective.calls

    (waits, _), (_, calls) = run_threads(2, 1, work)
    assert 0.015 < min(waits) < 0.08
    assert calls == 20


@pytest.fixture
def pair() -> Iterator[tuple[Collective, Collective]]:
    fd = shared_memory(2, 16)
    ranks = (Collective(fd, 0, 2, 16), Collective(fd, 1, 2, 16))
    os.close(fd)
    yield ranks
    for each in ranks:
        each.close()


def test_an_abort_ends_waits_until_a_reset(pair: tuple[Collective, Collective]) -> None:
    """A wait that sleeps, and one that would begin later; afterwards sums are right again."""
    first, second = pair
    took: list[float] = []
    for _ in range(3):
        ended: list[float] = []

        def wait(ended: list[float] = ended) -> None:
            with pytest.raises(EngineError, match="aborted"):
                first.barrier()
            ended.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        assert not ended
        began = time.monotonic()
        second.abort()
        waiting.join()
        took.append(ended[0] - began)
        with pytest.raises(EngineError, match="aborted"):
            second.all_reduce(torch.ones(3))
        first.reset()
        other = threading.Thread(target=second.all_reduce, args=(torch.ones(40),))
        other.start()
        assert first.all_reduce(torch.ones(40)).tolist() == [2.0] * 40
        other.join()
    assert max(took) < 1
    # A sleeper would look again after 100 ms.
    assert min(took) < 0.03


def test_memory_and_ranks_that_do_not_fit_are_refused() -> None:
    fd = shared_memory(2, 16)
    with pytest.raises(EngineError, match="rank 2 of 2"):
        Collective(fd, 2, 2, 16)
    with pytest.raises(EngineError, match="bytes, not"):
        Collective(fd, 0, 2, 1 << 20)
    os.close(fd)
    with pytest.raises(EngineError, match="ranks' memory"):
        Collective(fd, 0, 2, 16)


def test_memory_is_unmapped_with_the_last_reference() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:baton-ranks")

    before, fd = mapped(), shared_memory(2, 64)
    ranks = [Collective(fd, rank, 2, 64) for rank in range(2)]
    os.close(fd)
    reduce = ranks[0].all_reduce
    assert mapped() == before + 2
    ranks.clear()
    # A method is a reference.
    assert mapped() == before + 1
    del reduce
    assert mapped() == before
