"""Settings of glibc's malloc: memory that this process frees stays in the process.

By default glibc returns large blocks to the kernel at once, and the next allocation of such a block has page faults
again: several milliseconds for a message of 4 MB. The parameters are those of mallopt, from malloc.h
(https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html).
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep_freed(size: int) -> None:
    """Take blocks below 1 GiB from the heap, and keep its free end while that is shorter than `size` bytes.

    An older glibc takes only blocks below 32 MiB from the heap. A block that does not come from the heap goes back to
    the kernel when it is freed. So does nearly all of the free end, when it reaches `size` bytes or 2 GiB.
    """
    # Other C libraries have no such function.
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(_MMAP_THRESHOLD, 1 << 30):
            # The most that an older glibc takes.
            mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, min(size, (1 << 31) - 1))


def use_one_arena() -> None:
    """Let all threads that start from now on share one heap, so that they use memory that others have freed."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def prefault(size: int) -> None:
    """Allocate and free `size` bytes, at most the size of `keep_freed`: the process has them before it needs them."""
    block = bytearray(size)
    block[::4096] = bytes(len(range(0, size, 4096)))


def trim() -> None:
    """Give all that was freed back to the kernel."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
