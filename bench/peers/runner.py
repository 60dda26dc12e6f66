"""A runner (see runners/protocol.py) as a child process that is stopped while others are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bench.children import Child, ChildFailed, child


class Absent:
    """A runner that did not start."""

    def __init__(self, words: str) -> None:
        self._words = words

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Raises ChildFailed with what it said."""
        raise ChildFailed(self._words)


@contextlib.contextmanager
def runner(name: str, command: Sequence[str]) -> Iterator[Child]:
    """Start a runner and wait until it is ready; it is killed at the end. Raises ChildFailed."""
    with child(command, name=name, suspended=True) as started:
        started.answer()
        started.suspend()
        yield started
