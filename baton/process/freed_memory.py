"""Whether memory that this process frees stays with it (glibc's malloc).

By default glibc returns large blocks to the kernel at once, and whoever allocates such a block next pays for its page
faults: several milliseconds for a message of 4 MB. The parameters are those of mallopt, from malloc.h
(https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html).
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def keep(size: int) -> None:
    """Take blocks below 1 GiB from the heap, and keep its free end while that is shorter than `size` bytes.

    An older glibc takes only blocks below 32 MiB from the heap. A block that does not come from the heap goes back to
    the kernel when it is freed. So does nearly all of the free end, when it reaches `size` bytes or 2 GiB.
    """
    # Another C library has no such function, and habits of its own.
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(_MMAP_THRESHOLD, 1 << 30):
            # The most that an older glibc takes.
            mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, min(size, (1 << 31) - 1))


def share() -> None:
    """Have threads that start from now on take memory from one heap, so that they use what others have freed."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def prepare(size: int) -> None:
    """Have `size` bytes, less than `keep` keeps, in this process before they are needed."""
    block = bytearray(size)
    block[::4096] = bytes(len(range(0, size, 4096)))


def trim() -> None:
    """Give all that was freed back to the kernel."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
