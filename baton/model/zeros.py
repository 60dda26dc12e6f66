"""Large zeroed tensors in host memory that don't make a start wait for their page faults.

Zeroing a pool of 3.4 GB took 1.3 s, and 8 s on a virtual machine whose host had to find the memory, which was most of a
worker's start. The kernel gives zeroed pages anyway. Here a thread asks for them (MADV_POPULATE_WRITE,
https://man7.org/linux/man-pages/man2/madvise.2.html, Linux 5.14) while the worker already serves. So memory is still
committed soon after the start, and not in mid-request: a machine that has too little shows it at once.
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

_POPULATE_WRITE, _COLLAPSE = 23, 25
"""MADV_POPULATE_WRITE and MADV_COLLAPSE, from linux/mman.h."""

_PIECE = 2 << 20
"""Bytes populated in one call, a huge page: other threads' mmap, munmap and brk wait as long, for a millisecond or so,
and a thread that waits may have the interpreter's lock."""

_COLLAPSED = 64 << 20
"""Bytes put in huge pages in one call. Before a call does so, all cores put away what they hold back of the kernel's
lists of pages, and whoever needs the address space waits for that too: on busy cores for milliseconds."""

_PAUSE_S = 0.001
"""Time between two pieces, in which threads that wait for the address space get their turn."""

_SMALL = 8 << 20
"""Bytes that are zeroed at once."""


class RegistrationError(RuntimeError):
    """CUDA refused to register host memory."""


def host_zeros(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Zeros, as of torch.zeros; memory after the first 2 MiB is committed in the background, where the kernel can.

    `pinned`: all of it is committed at once, and registered with CUDA until the tensor and its views are gone, so that
    copies can overlap with kernels. Raises RegistrationError if CUDA refuses that.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size <= _SMALL and not pinned:
        return torch.zeros(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # As torch's own allocator does; see baton.engine.process.
    huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    if pinned:
        return torch.frombuffer(_register(memory, size), dtype=dtype, count=count).view(*shape)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
    start, libc = tensor.data_ptr(), ctypes.CDLL(None)
    calls: Iterator[tuple[int, int, int]] = ((_POPULATE_WRITE, *piece) for piece in _pieces(start, size, _PIECE))
    if not _advise(libc, *next(calls)):
        return tensor.zero_()
    if huge:
        # Where free memory lies in pieces the kernel gave small pages; see baton.engine.huge_pages.
        calls = chain(calls, ((_COLLAPSE, *piece) for piece in _pieces(start, size, _COLLAPSED)))
    rest = threading.Thread(
        target=_populate_rest, args=(libc, weakref.ref(memory), calls), name="kv-pages", daemon=True
    )
    rest.start()
    return tensor


def _register(memory: mmap.mmap, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory, registered with CUDA for the life of what is returned.

    torch's own pinned memory would be rounded up to a power of two.
    """
    cuda = torch.cuda.cudart()
    # Ends before the memory does; an mmap's own finalizer would run when it is unmapped already.
    held = (ctypes.c_ubyte * size).from_buffer(memory)
    address = ctypes.addressof(held)
    try:
        torch.cuda.check_error(cuda.cudaHostRegister(address, size, 0))
    except RuntimeError as error:
        raise RegistrationError(f"CUDA can't register {size} bytes of host memory: {error}") from error
    # At the end of the process the driver does it.
    weakref.finalize(held, cuda.cudaHostUnregister, address).atexit = False
    return held


def _pieces(start: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Address and size of each piece. They end where huge pages do."""
    begin, stop = start, start + size
    while begin < stop:
        end = min(begin // most * most + most, stop)
        yield begin, end - begin
        begin = end


def _populate_rest(libc: ctypes.CDLL, memory: weakref.ref[mmap.mmap], calls: Iterator[tuple[int, int, int]]) -> None:
    for call in calls:
        # Held during the call; None when the tensor is gone.
        held = memory()
        if held is None:
            return
        _advise(libc, *call)
        del held
        time.sleep(_PAUSE_S)


def _advise(libc: ctypes.CDLL, advice: int, begin: int, length: int) -> bool:
    """Whether the kernel has followed the advice; what the pages hold stays as it is."""
    return not libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)
