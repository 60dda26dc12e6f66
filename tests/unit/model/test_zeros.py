"""Memory that is committed in the background."""

import ctypes
import errno
import threading

import pytest
import torch
from torch import Tensor

from baton.kv.format import attention_parts
from baton.model import zeros
from baton.model.attention import KvCache
from baton.process.madvise import COLLAPSE, POPULATE_WRITE

PAGE = 4096


def resident(tensor: Tensor) -> float:
    """The share of the tensor's memory that is there."""
    start = -(-tensor.data_ptr() // PAGE) * PAGE
    pages = (tensor.data_ptr() + tensor.nbytes - start) // PAGE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), found) == 0
    return sum(each & 1 for each in found) / pages


def pool() -> Tensor:
    parts, cpu = attention_parts("bfloat16", 2, 512), torch.device("cpu")
    kv = KvCache.allocate(parts, num_layers=2, num_pages=1024, page_size=16, device=cpu)
    return kv.parts[parts[0].name]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set to commit all behind the first piece."""
    event, rest = threading.Event(), zeros._populate_rest

    def wait(*of: object) -> None:
        event.wait(60)
        rest(*of)

    monkeypatch.setattr(zeros, "_populate_rest", wait)
    return event


def committing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-pages"]


def test_a_pool_is_committed_after_it_was_made_and_what_was_written_stays(gate: threading.Event) -> None:
    k = pool()
    assert k.nbytes == 64 << 20
    assert resident(k) < 0.5
    k[1, 1000] = 7
    gate.set()
    for thread in committing():
        thread.join(60)
    assert resident(k) == 1
    assert bool((k[1, 1000] == 7).all())
    k[1, 1000] = 0
    assert not k.any()


def test_a_pool_that_nobody_has_any_more_is_left_alone(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = (zeros.host_zeros((1 << 24,), torch.float32) for _ in range(2))
    threads, calls = committing(), []
    advise = zeros.advise
    monkeypatch.setattr(zeros, "advise", lambda *of: calls.append(of) or advise(*of))
    begin, end = v.data_ptr(), v.data_ptr() + v.nbytes
    del k
    gate.set()
    for thread in threads:
        thread.join(60)
    huge = 2 << 20
    populated = [at for at, _, advice in calls if advice == POPULATE_WRITE]
    assert populated == list(range(begin // huge * huge + huge, end, huge)), "each begins a huge page"


def test_huge_pages_take_one_call_for_many(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    calls, advise = [], zeros.advise
    monkeypatch.setattr(zeros, "advise", lambda *of: calls.append(of) or advise(*of))
    tensor = zeros.host_zeros((1 << 26,), torch.float32)
    gate.set()
    for thread in committing():
        thread.join(60)
    collapsed = [length for _, length, advice in calls if advice == COLLAPSE]
    assert sum(collapsed) == tensor.nbytes == 256 << 20
    assert len(collapsed) <= 5


def test_a_kernel_that_can_not_gets_zeros_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeros, "advise", lambda *_: errno.EINVAL)
    tensor = zeros.host_zeros((4, 1 << 20), torch.float32)
    assert resident(tensor) == 1
    assert not committing()
    assert tensor.shape == (4, 1 << 20)
    assert not tensor.any()


class Runtime:
    """CUDA's calls for host memory; it refuses to register more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if size > self.most or flags:
            return 2
        assert ctypes.string_at(address, size) == bytes(size)
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        # Still there.
        assert ctypes.string_at(address, 1)
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"out of memory ({code})")

    made = Runtime(most=1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return made


def test_pinned_memory_is_registered_until_the_last_view_is_gone(runtime: Runtime) -> None:
    one, other = (zeros.host_zeros((2, 3, 5), torch.float16, pinned=True) for _ in range(2))
    assert runtime.registered == {one.data_ptr(): 60, other.data_ptr(): 60}
    view = one[1]
    del one
    assert len(runtime.registered) == 2
    view += 1
    assert view.sum() == 15
    del view
    assert runtime.registered == {other.data_ptr(): 60}


def test_memory_that_cuda_does_not_register_is_refused(runtime: Runtime) -> None:
    with pytest.raises(zeros.RegistrationError, match=r"can't register 1048577 bytes .* out of memory \(2\)"):
        zeros.host_zeros(((1 << 20) + 1,), torch.uint8, pinned=True)
    assert not runtime.registered


def test_small_zeros_are_allocated_without_a_thread() -> None:
    assert torch.equal(zeros.host_zeros((3, 5), torch.float16), torch.zeros(3, 5, dtype=torch.float16))
    assert not committing()
