"""Advice to the kernel about memory of this process: huge pages, and pages that it brings before they are used.

https://man7.org/linux/man-pages/man2/madvise.2.html. No torch and no numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64, and on arm64 with pages of 4 KiB."""

WILL_NEED, POPULATE_READ, POPULATE_WRITE, COLLAPSE = 3, 22, 23, 25
"""MADV_WILLNEED, MADV_POPULATE_READ and MADV_POPULATE_WRITE (Linux 5.14) and MADV_COLLAPSE (6.1), from linux/mman.h."""

_libc = ctypes.CDLL(None, use_errno=True)


def advise(address: int, length: int, advice: int) -> int:
    """Give advice about `length` bytes at `address`; returns 0 or the errno. No advice here changes what pages hold."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if failed else 0


def populate_file(address: int, length: int, ahead: int = 0) -> None:
    """Bring `length` bytes of a mapped file into memory, as far as possible, and begin to read the `ahead` after them.

    The file is then read in long runs, and not page by page as it is used.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length += address - start
    advise(start, length + ahead, WILL_NEED)
    advise(start, length, POPULATE_READ)


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, unless the operator has turned them off (`baton.engine.process`)."""
    if os.environ.get("THP_MEM_ALLOC_ENABLE", "1") == "1" and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have none.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
