"""Large zeroed tensors in host memory, whose page faults do not delay the start of a worker.

Zeroing a pool of 3.4 GB took 1.3 s, and 8 s on a virtual machine whose host had to find the memory: most of the start.
The kernel's new pages are zero anyway. Here a thread asks for them (MADV_POPULATE_WRITE) while the worker already
serves. So memory is committed soon after the start, not during a request, and a machine with too little memory fails
early.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from baton.process.madvise import COLLAPSE, HUGE_PAGE, POPULATE_WRITE, advise, ask_for_huge_pages

_PIECE = HUGE_PAGE
"""Bytes populated in one call: one huge page. Meanwhile mmap, munmap and brk of other threads wait, for about a
millisecond, and a thread that waits may hold the interpreter's lock."""

_COLLAPSED = 64 << 20
"""Bytes moved to huge pages in one call. Each call first empties the lists of free pages of all cores. Threads that
need the address space wait for that too: on busy cores for milliseconds."""

_PAUSE_S = 0.001
"""Seconds between two calls, so that threads that wait for the address space get it."""

_SMALL = 8 << 20
"""Largest number of bytes that are zeroed at once, without a thread."""


class RegistrationError(RuntimeError):
    """CUDA refused to register host memory."""


class SharedMemory:
    """Memory of a file, such as a memfd, from which tensors are made one after the other.

    Processes that have the same file and make the same tensors share these tensors. The file grows as needed, and new
    memory is zero.
    """

    def __init__(self, file: int, *, commits: bool = True) -> None:
        """`file` is a descriptor, which the caller keeps open until all tensors are made.

        Only one of the processes `commits` the memory: on a machine of several sockets, that is where it will be.
        """
        self.commits = commits
        self._file = file
        self._end = 0

    def map(self, size: int) -> mmap.mmap:
        """Map the next `size` bytes."""
        begin = self._end
        self._end += -(-size // _PIECE) * _PIECE
        if os.fstat(self._file).st_size < self._end:
            os.ftruncate(self._file, self._end)
        return mmap.mmap(self._file, size, offset=begin)


def host_zeros(
    shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False, shared: SharedMemory | None = None
) -> Tensor:
    """Make a tensor as torch.zeros does; memory after the first 2 MiB is committed in the background if the kernel can.

    If `pinned`, all memory is committed at once, and registered with CUDA until the tensor and its views are gone, so
    that copies can overlap with kernels. Raises RegistrationError if CUDA refuses that. With `shared`, the tensor is in
    that memory.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size <= _SMALL and not pinned and shared is None:
        return torch.zeros(*shape, dtype=dtype)
    memory = shared.map(size) if shared else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # As torch's own allocator does; see baton.engine.process.
    huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    if huge:
        ask_for_huge_pages(memory)
    if pinned:
        return torch.frombuffer(_register(memory, size), dtype=dtype, count=count).view(*shape)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
    if shared is not None and not shared.commits:
        return tensor
    start = tensor.data_ptr()
    calls: Iterator[tuple[int, int, int]] = ((*piece, POPULATE_WRITE) for piece in _pieces(start, size, _PIECE))
    if advise(*next(calls)):
        return tensor if shared else tensor.zero_()
    if huge:
        # The kernel has given small pages if free memory is fragmented; see baton.engine.huge_pages.
        calls = chain(calls, ((*piece, COLLAPSE) for piece in _pieces(start, size, _COLLAPSED)))
    threading.Thread(target=_populate_rest, args=(weakref.ref(memory), calls), name="kv-pages", daemon=True).start()
    return tensor


def _register(memory: mmap.mmap, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Register the memory with CUDA while the returned array exists.

    The size of torch's own pinned memory would be rounded up to a power of two.
    """
    cuda = torch.cuda.cudart()
    # It ends before the memory; a finalizer of the mmap itself would run after the unmapping.
    held = (ctypes.c_ubyte * size).from_buffer(memory)
    address = ctypes.addressof(held)
    try:
        torch.cuda.check_error(cuda.cudaHostRegister(address, size, 0))
    except RuntimeError as error:
        raise RegistrationError(f"CUDA can't register {size} bytes of host memory: {error}") from error
    # At the end of the process the driver unregisters it.
    weakref.finalize(held, cuda.cudaHostUnregister, address).atexit = False
    return held


def _pieces(start: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Address and size of each piece; pieces end at the borders of huge pages."""
    begin, stop = start, start + size
    while begin < stop:
        end = min(begin // most * most + most, stop)
        yield begin, end - begin
        begin = end


def _populate_rest(memory: weakref.ref[mmap.mmap], calls: Iterator[tuple[int, int, int]]) -> None:
    for call in calls:
        # It keeps the memory during the call; None if the tensor is gone.
        held = memory()
        if held is None:
            return
        advise(*call)
        del held
        time.sleep(_PAUSE_S)
