"""The waiting entries that may ask decode workers, after workers have refused one of them. Pure.

The one that all workers refused first waits for news of a worker, and then tries before all others: its claim to a
worker's pages lasts only as long as it asks again. Those behind it may ask meanwhile if their context finds the room
that the refusal named, one at a time, so that a full fleet is asked about once per news. Where that room was a
mistake, half of it is left until the next news.

Some can use only some of the decode workers: the others are too small, failed them, or are kept. These are *narrowed*,
and their refusal stops nobody who can ask more workers. The first of them that is refused tries again at news as well,
before or after the first of all, whichever has waited longer, so that neither takes all places from the other. Its
answer counts for those behind it that could ask nobody else.

One that workers have room for, but not for its choices, stops only those that have several choices too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ask:
    """The need of an entry: a context of so many tokens, for so many choices, on none of the `closed` workers."""

    context: int
    choices: int
    closed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Try:
    """One turn: the news that were known when it began, and whether it went past the one that waits."""

    version: int = 0
    overtakes: bool = False


class RefusalGate(Generic[T]):
    """The meaning of refusals for the entries that wait."""

    def __init__(self) -> None:
        self.version = 0
        """Counts the news."""
        self._refused_at: int | None = None
        self._room = 0
        self._probe: T | None = None
        self._blocked: set[T] = set()
        """The entries that were refused since the last news, for a reason of their own."""
        self._forks_blocked = False
        self._narrowed: T | None = None
        """The first of those that are narrowed, one at a time, whichever was refused first."""
        self._narrowed_tries = False
        self._narrow_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """The latest refusal of one that is narrowed: the news then, the workers closed to it, and the room."""
        self._head_since: dict[T, float] = {}
        """Since when an entry is the first of all, or the first of those that are narrowed."""

    @property
    def narrowed(self) -> T | None:
        """The first of those that are narrowed."""
        return self._narrowed

    def record_update(self) -> None:
        """Some worker may have changed its mind."""
        self.version += 1
        self._blocked.clear()
        self._forks_blocked = False

    def record_first(self, entry: T, now: float) -> None:
        """An entry is the first of all now."""
        self._head_since.setdefault(entry, now)

    def may_try(self, entry: T, ask: Ask, first: T | None) -> bool:
        """Whether an entry may ask, where `first` is the one that was refused by all."""
        if entry in self._blocked or (ask.choices > 1 and self._forks_blocked) or self._is_known(ask):
            return False
        return self._may_try(entry, ask, first)

    def narrowed_may_try(self, ask: Ask, first: T | None) -> bool:
        """Whether the first narrowed entry may ask before the head of the queue.

        The head can use any placement, and would take the only ones that the narrowed entry can use.
        """
        entry = self._narrowed
        if entry is None or entry in self._blocked:
            return False
        if first is not None and self._head_since[first] < self._head_since[entry]:
            return False
        return self._may_try(entry, ask, None)

    def begin(self, entry: T) -> Try:
        """An entry has its turn, and is to end it."""
        if self._refused_at is not None:
            self._probe = entry
        self._narrowed_tries = self._narrowed_tries or entry is self._narrowed
        return Try(self.version, self._refused_at == self.version)

    def end(self, entry: T) -> None:
        """The entry's turn is over, whatever came of it."""
        if self._probe is entry:
            self._probe = None
        if self._narrowed is entry:
            self._narrowed_tries = False

    def forget(self, entry: T) -> None:
        """The entry does not return."""
        self._forget_narrowed(entry)
        self._head_since.pop(entry, None)
        self._blocked.discard(entry)

    def record_grant(self, of: Try, ask: Ask) -> None:
        """Workers have reserved pages."""
        if of.overtakes:
            self._room -= ask.context
        else:
            self._refused_at, self._room = None, 0

    def record_refusal(self, of: Try, entry: T, ask: Ask, room: int) -> None:
        """All workers have refused, and have room for other contexts of `room` tokens."""
        self._forget_narrowed(entry)
        if of.overtakes:
            self._room = min(room, ask.context // 2)
        else:
            self._refused_at, self._room = of.version, room

    def record_fork_refusal(self, of: Try, entry: T) -> None:
        """Workers have refused an entry for its choices."""
        if of.version == self.version:
            self._blocked.add(entry)
            self._forks_blocked = True

    def record_narrow_refusal(self, of: Try, entry: T, ask: Ask, room: int, now: float) -> None:
        """The few workers that the entry can use have refused it, and have room for other contexts of `room` tokens."""
        if of.version == self.version:
            self._blocked.add(entry)
        self._narrow_refusal = of.version, ask.closed, room
        if self._narrowed is None:
            self._narrowed = entry
            self._head_since.setdefault(entry, now)

    def _forget_narrowed(self, entry: T) -> None:
        if self._narrowed is entry:
            self._narrowed, self._narrowed_tries = None, False

    def _may_try(self, entry: T, ask: Ask, first: T | None) -> bool:
        if self._refused_at is None:
            return True
        if self._probe is not None:
            return False
        if first in (None, entry) and self._refused_at != self.version:
            return True
        return entry is not first and ask.context <= self._room

    def _is_known(self, ask: Ask) -> bool:
        """Whether only workers could be asked that have just refused, or are being asked by, one with more choice."""
        version, closed, room = self._narrow_refusal
        known = self._narrowed_tries or version == self.version
        return known and ask.context > room and closed <= ask.closed
