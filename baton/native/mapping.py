"""Mappings in huge pages, and the file in which the workers of `baton up` share packed weights.

Each decode step reads all weights. In pages of 4 KiB, a step of one sequence took 8 to 10 percent longer than in huge
pages. A memfd gets huge pages only if /sys/kernel/mm/transparent_hugepage/shmem_enabled allows it; its default is
"never". Files on ext4 (Linux 6.16) and XFS get them in the page cache. No torch and no numpy.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.process.madvise import HUGE_PAGE, POPULATE_READ, POPULATE_WRITE, advise, ask_for_huge_pages

_PIECE = 64 << 20


def populate(
    address: int, size: int, *, write: bool, threads: int = 1, report: Callable[[int], None] = lambda count: None
) -> None:
    """Bring all pages of a mapping into memory, writable if `write`. Raises OSError, with EINVAL on old kernels.

    `report` is called with the bytes of each piece.
    """
    advice = POPULATE_WRITE if write else POPULATE_READ

    def ask(start: int) -> tuple[int, int]:
        count = min(_PIECE, size - start)
        return advise(address + start, count, advice), count

    with ThreadPoolExecutor(threads) as pool:
        for error, count in pool.map(ask, range(0, size, _PIECE)):
            if error:
                raise OSError(error, os.strerror(error))
            report(count)


def shared_file(name: str, size: int) -> int:
    """The descriptor of `size` bytes of zeroed memory that processes can share (memfd). Raises OSError."""
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def huge_pages_of(fd: int) -> bool:
    """Whether the kernel maps the file, which must be empty, in huge pages; the file is empty again afterwards."""
    try:
        os.ftruncate(fd, 2 * HUGE_PAGE)
        with mmap.mmap(fd, 2 * HUGE_PAGE) as memory:
            ask_for_huge_pages(memory)
            before = _huge_bytes()
            memory[0] = memory[HUGE_PAGE] = 1
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
    """Create a file without a name, for `size` bytes that processes share; returns its descriptor. Raises OSError.

    It is a memfd, or a file in `folder` if only that gets huge pages. The kernel removes it when nobody has it open.
    """
    memory = os.memfd_create("baton-packed-weights")
    # By default its mode is 0777.
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
