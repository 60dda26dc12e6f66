"""The free pages of a pool, so kept that whoever takes several gets neighbours where it can.

They are *runs*: pages that follow each other, with none free before the first or after the last. What returns is joined
to the runs beside it, so pages that were taken together are one run again when all have returned. Runs are listed by
the power of two below their length: to find a good one takes a few looks, however many pages there are.

Pure bookkeeping without a lock: the pool has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

_LOOKS = 32
"""Runs to look at among those that may be long enough, before a longer one is cut."""


class FreePages:
    """Pages 0 to `pages` - 1 at first. A run is known by its first page, and by the page after its last."""

    def __init__(self, pages: int) -> None:
        self._count = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._sized = [OrderedDict[int, None]() for _ in range(pages.bit_length() + 1)]
        self._enter(0, pages)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (page for start, end in self._end_of.items() for page in range(start, end))

    def add(self, pages: Iterable[int]) -> None:
        """`pages`, each once and none of them free, are free now."""
        start = end = -1
        for page in sorted(pages):
            if page != end:
                self._join(start, end)
                start = page
            end = page + 1
        self._join(start, end)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages, of as many or more: those that follow page `after`, then in few ascending runs."""
        taken: list[int] = []
        start = -1 if after is None else after + 1
        while len(taken) < count:
            missing = count - len(taken)
            if start not in self._end_of:
                start = self._find(missing)
            end = self._leave(start)
            cut = min(end, start + missing)
            self._enter(cut, end)
            taken += range(start, cut)
        return taken

    def _find(self, count: int) -> int:
        """Where a run of `count` pages or a little more begins; if there is none, one of the longest."""
        least = count.bit_length()
        for start in islice(self._sized[least], _LOOKS):
            if self._end_of[start] - start >= count:
                return start
        for runs in self._sized[least + 1 :]:
            if runs:
                return next(iter(runs))
        return next(next(iter(runs)) for runs in reversed(self._sized) if runs)

    def _join(self, start: int, end: int) -> None:
        """Enter a run, as one with those beside it."""
        if start in self._start_of:
            start = self._start_of[start]
            self._leave(start)
        if end in self._end_of:
            end = self._leave(end)
        self._enter(start, end)

    def _enter(self, start: int, end: int) -> None:
        if start < end:
            self._count += end - start
            self._end_of[start], self._start_of[end] = end, start
            self._sized[(end - start).bit_length()][start] = None

    def _leave(self, start: int) -> int:
        """Take a run out; where it ends."""
        end = self._end_of.pop(start)
        del self._start_of[end], self._sized[(end - start).bit_length()][start]
        self._count -= end - start
        return end
