"""Weights and KV in huge pages, even if the kernel had no free huge pages when their memory was first used.

Large tensors ask for huge pages (`baton.engine.process`). If free memory is fragmented, the kernel gives small pages
instead. Decode steps and chunks read all weights, and took a tenth to a third longer with small pages. After all
weights are loaded, MADV_COLLAPSE makes the kernel move them to huge pages once. This took 1.6 s for 1.6 GB.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.process.madvise import COLLAPSE, HUGE_PAGE, advise

_MIN_MAPPING_BYTES = 16 << 20
"""Smaller mappings have no weights, and are left alone."""

_PIECE = 64 << 20
_SECONDS = 10.0
"""Seconds after which no further piece is moved, because this takes long if memory is short."""

_ATTEMPTS = 3
_TEMPORARY = (errno.EAGAIN, errno.EBUSY, errno.ENOMEM)
"""Another attempt may succeed, for instance when other code holds a page at this moment."""

_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0 +(?:\[heap\]|\[anon:.*)?$")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ...(?P<kind>[ps]) .*\n(?P<counts>(?:\w+:.*\n)*)", re.MULTILINE)
_PAGE = os.sysconf("SC_PAGESIZE")
_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that this process has in memory, in total and in huge pages.

    They include memory that it shares, such as packed weights, but not libraries.
    """

    total: int
    huge: int


def resident() -> Resident:
    """Memory of this process now; 0 bytes if the kernel does not report it."""
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Resident(0, 0)
    total = huge = 0
    for found in _MAPPING.finditer(text):
        kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", found["counts"], re.MULTILINE)}
        shared = found["kind"] == "s"
        total += kib.get("Rss" if shared else "Anonymous", 0) << 10
        names = ("ShmemPmdMapped", "FilePmdMapped") if shared else ("AnonHugePages",)
        huge += sum(kib.get(name, 0) for name in names) << 10
    return Resident(total, huge)


def collapse() -> None:
    """Move the large mappings of this process to huge pages, as far as possible; pages that are not in memory stay so.

    Does nothing if the operator has turned huge pages off, or if the kernel has no MADV_COLLAPSE.
    """
    if os.environ.get("THP_MEM_ALLOC_ENABLE") != "1" or not _MODES.exists() or "[never]" in _MODES.read_text():
        return
    deadline = time.monotonic() + _SECONDS
    for start, end in _mappings():
        for begin, stop in _touched(start, end):
            if time.monotonic() > deadline:
                return
            problem = _move(begin, stop)
            if problem and problem not in _TEMPORARY:
                # The kernel can't move this mapping at all.
                break


def _move(begin: int, stop: int) -> int:
    """Move these pages to huge pages; 0, or the errno of the last attempt. Pages that are moved already are skipped."""
    for _ in range(_ATTEMPTS):
        problem = advise(begin, stop - begin, COLLAPSE)
        if problem not in _TEMPORARY:
            break
    return problem


def _mappings() -> Iterator[tuple[int, int]]:
    """Start and end address of each large anonymous mapping, rounded inwards to whole huge pages."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _ANONYMOUS.match(line):
            start, end = int(found[1], 16), int(found[2], 16)
            start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if end - start >= _MIN_MAPPING_BYTES:
                yield start, end


def _touched(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Addresses of runs of huge pages, at most _PIECE bytes, that are in memory whole; others would be filled."""
    libc = ctypes.CDLL(None)
    for piece in range(start, end, _PIECE):
        size = min(_PIECE, end - piece)
        present = (ctypes.c_ubyte * (size // _PAGE))()
        if libc.mincore(ctypes.c_void_p(piece), ctypes.c_size_t(size), present):
            continue
        step = HUGE_PAGE // _PAGE
        whole = [index for index in range(size // HUGE_PAGE) if all(present[index * step : (index + 1) * step])]
        for _, run in itertools.groupby(enumerate(whole), key=lambda each: each[1] - each[0]):
            indices = [index for _, index in run]
            yield piece + indices[0] * HUGE_PAGE, piece + (indices[-1] + 1) * HUGE_PAGE
