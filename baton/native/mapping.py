"""The file in which the workers of `baton up` share packed weights, and large mappings, which want huge pages.

Decode reads all weights each step, and in pages of 4 KiB a step of one sequence took 8 to 10 percent longer than in
huge ones. The kernel gives these to a memfd only if /sys/kernel/mm/transparent_hugepage/shmem_enabled says so, which
is "never" by default. ext4 (Linux 6.16) and XFS give them to files of the page cache. No torch and no numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE, from linux/mman.h (Linux 5.14)."""

_HUGE = 2 << 20
_PIECE = 64 << 20


def advise(memory: mmap.mmap) -> None:
    """Ask for huge pages, unless the operator has turned them off (`baton.engine.process`)."""
    if os.environ.get("THP_MEM_ALLOC_ENABLE", "1") == "1" and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have none.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def populate(address: int, size: int, *, write: bool, threads: int = 1) -> None:
    """Make all pages present, for reading or for writing. Raises OSError: EINVAL if the kernel can't."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ask(start: int) -> int:
        length = ctypes.c_size_t(min(_PIECE, size - start))
        failed = libc.madvise(ctypes.c_void_p(address + start), length, _POPULATE_WRITE if write else _POPULATE_READ)
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(threads) as pool:
        for error in pool.map(ask, range(0, size, _PIECE)):
            if error:
                raise OSError(error, os.strerror(error))


def huge_pages_of(fd: int) -> bool:
    """Whether an empty file is mapped in huge pages."""
    try:
        os.ftruncate(fd, 2 * _HUGE)
        with mmap.mmap(fd, 2 * _HUGE) as memory:
            advise(memory)
            before = _huge_bytes()
            memory[0] = memory[_HUGE] = 1
            return _huge_bytes() > before
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return False
        raise
    finally:
        os.ftruncate(fd, 0)


def _huge_bytes() -> int:
    """Bytes of files that this process has mapped in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(int(kib) << 10 for kib in re.findall(r"^(?:Shmem|File)PmdMapped: +(\d+) kB", text, re.MULTILINE))


def unnamed_file(folder: Path, size: int) -> int:
    """A file descriptor for `size` bytes that processes may share; the file is gone after their end.

    It is a memfd, or a file without a name in `folder` where only that gets huge pages. Raises OSError.
    """
    memory = os.memfd_create("baton-packed-weights")
    # Its mode is 0777 else.
    os.fchmod(memory, 0o600)
    try:
        if huge_pages_of(memory):
            return memory
        folder.mkdir(parents=True, exist_ok=True)
        if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 2 * size:
            return memory
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return memory
    try:
        if huge_pages_of(file):
            os.close(memory)
            return file
    except OSError:
        pass
    os.close(file)
    return memory
