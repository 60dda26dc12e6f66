"""Memory that the kernel gave in small pages is moved to huge ones, and what was never touched stays so."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.engine import huge_pages
from baton.native import mapping
from baton.process.madvise import ask_for_huge_pages

MOVED = """
import ctypes, mmap
from baton.engine import huge_pages
from baton.process.madvise import HUGE_PAGE
SIZE = 32 << 20
# Without advice: where huge pages are given on advice only, these are small, and the kernel's own daemon lets them be.
memory = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
empty = huge_pages.resident()
# Whole huge pages, and the first small page of another.
memory[begin : begin + SIZE + 1] = b"x" * (SIZE + 1)
before = huge_pages.resident()
huge_pages.collapse()
after = huge_pages.resident()
assert memory[begin : begin + SIZE] == b"x" * SIZE
print(empty.huge, before.huge, after.huge, after.total - before.total)
"""


def _moved(**environ: str) -> tuple[int, int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MOVED], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    empty, before, after, grown = map(int, done.stdout.split())
    return empty, before, after, grown


def test_touched_memory_is_moved_and_nothing_else_is_filled() -> None:
    empty, _, after, grown = _moved(THP_MEM_ALLOC_ENABLE="1")
    # Where the kernel gives huge pages without advice, the other is one as well.
    assert 32 << 20 <= after - empty <= 34 << 20
    assert grown < 1 << 20


def test_shared_memory_is_counted_without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    size, library = 32 << 20, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    before = huge_pages.resident()
    with library.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
        assert sum(memory[:: mmap.PAGESIZE]) > 0
        assert huge_pages.resident().total - before.total < size // 2
    with (tmp_path / "shared").open("w+b") as file:
        has_huge = mapping.huge_pages_of(file.fileno())
        file.truncate(size)
        before = huge_pages.resident()
        with mmap.mmap(file.fileno(), size) as memory:
            ask_for_huge_pages(memory)
            memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
            after = huge_pages.resident()
    assert after.total - before.total > size // 2
    assert (after.huge - before.huge > size // 2) == has_huge


def test_it_is_left_alone_where_huge_pages_are_turned_off() -> None:
    _, before, after, _ = _moved(THP_MEM_ALLOC_ENABLE="0")
    assert after == before
