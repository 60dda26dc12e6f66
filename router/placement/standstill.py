"""Who of those that wait may ask decode workers, after all workers have refused one of them. Pure.

The one that was refused first waits for news of a worker, and then tries before all others: its claim to a worker's
pages lasts only as long as it asks again. Those behind it may ask meanwhile if their context finds the room that the
refusal told of, one at a time, so that a full fleet is asked about once per news. Where that room was a mistake, half
of it is left until the next news.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn: the news that were known when it began, and whether it went past the one that waits."""

    version: int = 0
    passes: bool = False


class Standstill(Generic[T]):
    """What refusals have told, among entries that wait."""

    def __init__(self) -> None:
        self.version = 0
        """Counts the news."""
        self._refused_at: int | None = None
        self._room = 0
        self._probe: T | None = None

    def news(self) -> None:
        """Some worker may have changed its mind."""
        self.version += 1

    def may_ask(self, entry: T, context: int, first: T | None) -> bool:
        """Whether an entry with a context of so many tokens may ask, where `first` is the one that was refused."""
        if self._refused_at is None:
            return True
        if self._probe is not None:
            return False
        if first in (None, entry) and self._refused_at != self.version:
            return True
        return entry is not first and context <= self._room

    def ask(self, entry: T) -> Asked:
        """An entry has its turn, and is to end it."""
        if self._refused_at is not None:
            self._probe = entry
        return Asked(self.version, self._refused_at == self.version)

    def ended(self, entry: T) -> None:
        """The entry's turn is over, whatever came of it."""
        if self._probe is entry:
            self._probe = None

    def answered(self, asked: Asked, context: int, *, granted: bool, room: int) -> None:
        """What the workers have said to a context of so many tokens, and that they have room for others."""
        if not asked.passes:
            self._refused_at, self._room = (None, 0) if granted else (asked.version, room)
        elif granted:
            self._room -= context
        else:
            self._room = min(room, context // 2)
