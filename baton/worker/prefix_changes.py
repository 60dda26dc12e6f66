"""Changes of a worker's cached prefix blocks, for the watchers of its status.

A block counts as cached while the engine's pages or the cache's host memory have it. It is reported as stored when the
first of them gets it, and as dropped when the last has lost it.

The tiers report changes from any thread, and the engine holds its pool's lock meanwhile. So a change only goes into an
inbox; the asyncio loop merges it soon after, in slices. Each subscriber keeps the changes that it has not sent yet, and
of each block only the latest one. When these become more than all cached blocks, it sends the whole list again. This
limits the memory of a subscriber that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.engine.contract import Engine
from baton.kv.hashing import NAME_BYTES

if TYPE_CHECKING:
    from baton.kv.prefix import PrefixCache

MAX_NAMES = 2048
"""Largest number of names in one message; the others follow in the next ones."""

_POOL, _HOST = 1, 2
_SHARDS = 256
"""A large dict takes many milliseconds to grow, and to list. So names are in several, by their last byte."""


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """Blocks that a worker has stored and dropped, by the first NAME_BYTES of their digests.

    No block is in both. After a `reset` the worker has only the blocks that this message and later ones list as stored.
    """

    reset: bool
    stored: tuple[bytes, ...]
    dropped: tuple[bytes, ...]


class PrefixChangeFeed:
    """Merges the tiers' changes; made and used on the asyncio loop, until `close`.

    `changed` is called on the loop when subscribers have something new to `pop`.
    """

    def __init__(self, engine: Engine, cache: PrefixCache, changed: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._cache = cache
        self._changed = changed
        self._inbox: deque[tuple[int, Sequence[bytes] | None, bool]] = deque()
        self._merged = 0
        """How much of the first in the inbox has been merged: digests, or shards where all names are dropped."""
        self._due = False
        self._tiers: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._subscribers: set[PrefixSubscriber] = set()
        engine.watch_prefixes(partial(self._put, _POOL))
        cache.watch(partial(self._put, _HOST))

    def subscribe(self) -> PrefixSubscriber:
        """Add a subscriber, which gets the whole list first."""
        subscriber = PrefixSubscriber(self._tiers)
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: PrefixSubscriber) -> None:
        """Remove a subscriber."""
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Stop watching the tiers."""
        self._engine.watch_prefixes(None)
        self._cache.watch(None)

    def _put(self, tier: int, stored: Sequence[bytes], dropped: Sequence[bytes] | None) -> None:
        """Called from any thread."""
        if stored:
            self._inbox.append((tier, stored, True))
        if dropped is None or dropped:
            self._inbox.append((tier, dropped, False))
        if not self._due:
            self._due = True
            # If the loop is closed, there are no subscribers.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._merge)

    def _merge(self) -> None:
        # Reset this first: a change that comes from now on needs another merge.
        self._due = False
        changes: dict[bytes, bool] = {}
        merged = 0
        while self._inbox:
            if merged >= MAX_NAMES:
                self._due = True
                self._loop.call_soon(self._merge)
                break
            tier, names, is_stored = self._next_names()
            merged += len(names)
            for name in names:
                shard = self._tiers[name[-1]]
                before = shard.get(name, 0)
                after = before | tier if is_stored else before & ~tier
                if after:
                    shard[name] = after
                elif before:
                    del shard[name]
                if bool(before) != bool(after):
                    changes[name] = is_stored
        if changes:
            for subscriber in self._subscribers:
                subscriber.add(changes)
            self._changed()

    def _next_names(self) -> tuple[int, list[bytes], bool]:
        """A slice of what is first in the inbox."""
        tier, digests, is_stored = self._inbox[0]
        if digests is None:
            names, end = [name for name, tiers in self._tiers[self._merged].items() if tiers & tier], _SHARDS
            self._merged += 1
        else:
            names = [digest[:NAME_BYTES] for digest in digests[self._merged : self._merged + MAX_NAMES]]
            end = len(digests)
            self._merged += MAX_NAMES
        if self._merged >= end:
            self._inbox.popleft()
            self._merged = 0
        return tier, names, is_stored


class PrefixSubscriber:
    """The changes that one watcher has not received yet, by shard."""

    def __init__(self, cached: Sequence[Mapping[bytes, int]]) -> None:
        self._cached = cached
        self._reset = True
        self._unsent: list[dict[bytes, bool]] = [{} for _ in cached]
        self._listed = 0
        """How many shards have been listed since the last reset; the others will be listed as they are then."""

    @property
    def has_changes(self) -> bool:
        """Whether there is something to send."""
        return self._reset or any(self._unsent) or any(self._cached[self._listed :])

    def add(self, changes: Mapping[bytes, bool]) -> None:
        """Add blocks that are cached now (True) or no longer (False)."""
        for name, is_cached in changes.items():
            if name[-1] < self._listed:
                self._unsent[name[-1]][name] = is_cached
        if sum(map(len, self._unsent)) > sum(map(len, self._cached)) + MAX_NAMES:
            self._reset, self._listed = True, 0
            self._unsent = [{} for _ in self._cached]

    def pop(self) -> PrefixChange | None:
        """The next message: first of all cached blocks, then of the changes since the last; None if there are none."""
        if not self.has_changes:
            return None
        reset, self._reset = self._reset, False
        stored, dropped, room = list[bytes](), list[bytes](), MAX_NAMES
        for number, unsent in enumerate(self._unsent):
            if number == self._listed and room:
                unsent.update(dict.fromkeys(self._cached[number], True))
                self._listed += 1
            while unsent and room:
                name, is_cached = unsent.popitem()
                (stored if is_cached else dropped).append(name)
                room -= 1
        return PrefixChange(reset, tuple(stored), tuple(dropped))
