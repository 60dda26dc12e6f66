"""The progress of the load of a model, for logs and probes. No torch.

    download ── hash ── read and pack, or wait for the worker that packs ── make the KV pool      each is a step

A step that has bytes to count makes progress with each piece of them. Other steps make progress while the process uses
its processors. If there is none for longer than a slow piece takes, the load stands still.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

PIECE = 16 << 20
"""Bytes after which progress is counted."""

_BUSY_S = 0.01
"""Seconds of processor time that count as progress."""

_log = logging.getLogger(__name__)


def _processor_s() -> float:
    """Processor time of all threads but the calling one, which answers probes while others load."""
    return time.process_time() - time.thread_time()


class LoadProgress:
    """The current step of a load, and how far it is. Threads that load change it; any thread may read it."""

    def __init__(
        self,
        owner: str = "",
        clock: Callable[[], float] = time.monotonic,
        processor_s: Callable[[], float] = _processor_s,
    ) -> None:
        self.owner = owner
        """The name of the worker that loads."""
        self.publish: Callable[[], None] = lambda: None
        """Called after each piece, by one thread at a time."""
        self.check: Callable[[], None] = lambda: None
        """Called before a piece is counted; it raises if the load is in vain."""
        self.moves = 0
        """The number of pieces so far."""
        self._clock = clock
        self._processor_s = processor_s
        self._used_s = 0.0
        self._lock = threading.RLock()
        self._places: dict[int, str] = {}
        self.begin("starting")

    def begin(self, step: str, total: int = 0, files: Mapping[str, int] | None = None, done: int = 0) -> None:
        """Begin a step, such as "reading the weights", of `total` bytes, of which `done` are done.

        `files` has the number of bytes of each file. A `total` of 0 means that bytes are not counted.
        """
        with self._lock:
            self._step, self.total, self.done, self._first = step, total, done, done
            self._left, self._count, self._file = dict(files or {}), len(files or {}), ""
            self._began = self._moved_at = self._clock()

    @contextlib.contextmanager
    def aside(self, step: str, total: int) -> Iterator[None]:
        """Do another step first, of `total` bytes; afterwards the current one begins."""
        with self._lock:
            before = self._step, self.total, self.done, self._left, self._count, self._file
            self.begin(step, total)
        yield
        with self._lock:
            self.begin(step)
            self._step, self.total, self.done, self._left, self._count, self._file = before
            self._first = self.done

    def place(self, address: int, file: str) -> None:
        """Record that `file` is mapped at `address`, so that `add` can be given the address instead."""
        self._places[address] = file

    def add(self, count: int, file: str = "", address: int = 0) -> None:
        """Count `count` bytes as done. They are those of `file`, or of the file at `address`, if one is given."""
        with self._lock:
            self.done += count
            file = file or self._places.get(address, "")
            if file in self._left:
                self._file = file
                self._left[file] -= count
                if self._left[file] <= 0:
                    self._end_file(file)
            self.touch()

    def advance(self, done: int) -> None:
        """Record that `done` bytes are done."""
        self.add(done - self.done)

    def touch(self) -> None:
        """Record progress that is not counted in bytes. Raises the error of `check`."""
        self.check()
        with self._lock:
            self.moves += 1
            self._moved_at = self._clock()
            self.publish()

    def _end_file(self, file: str) -> None:
        del self._left[file]
        if self._count > 1:
            seconds = self._clock() - self._began
            ended = self._count - len(self._left)
            _log.info("%s: %s is done after %.1f s, %d of %d files", self._step, file, seconds, ended, self._count)

    def stalled_s(self) -> float:
        """Seconds since the last progress. One thread calls it, which does not load."""
        with self._lock:
            used = self._processor_s()
            if not self.total and used - self._used_s > _BUSY_S:
                self._used_s, self._moved_at = used, self._clock()
            return self._clock() - self._moved_at

    def __str__(self) -> str:
        with self._lock:
            parts = [self._step]
            if self.total:
                parts[0] += f": {self.done >> 20} of {self.total >> 20} MiB ({100 * self.done // self.total} %)"
            if self._count > 1:
                at = f" ({self._file})" if self._file else ""
                parts.append(f"{self._count - len(self._left)} of {self._count} files{at}")
            seconds, counted = self._clock() - self._began, self.done - self._first
            if self.total and counted * 100 > self.total and seconds >= 1:
                parts.append(f"about {(self.total - self.done) * seconds / counted:.0f} s left")
            return ", ".join(parts)
