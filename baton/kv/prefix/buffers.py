"""Memory for received values, lent out and used again.

A fresh buffer of hundreds of KiB is fresh pages from the kernel, each zeroed at its first use: measured, that took as
long as receiving and checking the value together. So a buffer comes back when the last view of it is gone.
"""

from __future__ import annotations

import ctypes
from typing import Any

MOST_FREE_BYTES = 64 << 20


class Lent:
    """Who exports a lent buffer, the `obj` of its views; nobody writes to it while there is a view."""

    memory: bytearray
    home: list[bytearray]
    most: int

    def __len__(self) -> int:
        return len(self.memory)

    def __del__(self) -> None:
        if len(self.home) < self.most:
            self.home.append(self.memory)


class Buffers:
    """Buffers of `size` bytes, usable from any thread. Of those not in use, MOST_FREE_BYTES are kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._home: list[bytearray] = []
        members = {"home": self._home, "most": max(1, MOST_FREE_BYTES // size)}
        self._lent: Any = type("LentBuffer", (Lent, ctypes.c_ubyte * size), members)

    def take(self, size: int) -> memoryview:
        """A writable buffer of `size` bytes, lent if that is the size of all, with anything in it."""
        if size != self._size:
            return memoryview(bytearray(size))
        try:
            memory = self._home.pop()
        except IndexError:
            memory = bytearray(size)
        lent = self._lent.from_buffer(memory)
        lent.memory = memory
        return memoryview(lent).cast("B")
