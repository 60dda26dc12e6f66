"""Memory that the kernel gave in small pages is moved to huge ones, and what was never touched stays so."""

from __future__ import annotations

import os
import subprocess
import sys

MOVED = """
import ctypes, mmap, sys
from baton.engine import huge_pages
SIZE, NO_HUGE, HUGE = 32 << 20, 15, 14
libc = ctypes.CDLL(None)
memory = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(NO_HUGE)
memory[: SIZE + 1] = b"x" * (SIZE + 1)
memory.madvise(HUGE)
before = huge_pages.resident()
huge_pages.collapse()
after = huge_pages.resident()
assert memory[:SIZE] == b"x" * SIZE
print(before.huge, after.huge, after.total - before.total)
"""


def _moved(**environ: str) -> tuple[int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MOVED], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    before, after, grown = map(int, done.stdout.split())
    return before, after, grown


def test_what_was_touched_is_moved_and_nothing_else_is_filled() -> None:
    before, after, grown = _moved(THP_MEM_ALLOC_ENABLE="1")
    # The mapping need not begin at a huge page.
    assert after - before >= (32 << 20) - 2 * (2 << 20)
    assert after - before <= 32 << 20
    assert grown < 2 << 20


def test_it_is_left_alone_where_huge_pages_are_turned_off() -> None:
    before, after, _ = _moved(THP_MEM_ALLOC_ENABLE="0")
    assert after == before
