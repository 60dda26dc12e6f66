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
from itertools import islice
from typing import TYPE_CHECKING

from baton.engine.contract import Engine
from baton.kv.hashing import NAME_BYTES

if TYPE_CHECKING:
    from baton.kv.prefix import PrefixCache

MAX_NAMES = 4096
"""Largest number of names in one message; the others follow in the next ones."""

_POOL, _HOST = 1, 2


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
        self._inbox: deque[tuple[int, Sequence[bytes], Sequence[bytes]]] = deque()
        self._due = False
        self._tiers: dict[bytes, int] = {}
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

    def _put(self, tier: int, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """Called from any thread."""
        for start in range(0, len(stored), MAX_NAMES):
            self._inbox.append((tier, stored[start : start + MAX_NAMES], ()))
        for start in range(0, len(dropped), MAX_NAMES):
            self._inbox.append((tier, (), dropped[start : start + MAX_NAMES]))
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
            tier, stored, dropped = self._inbox.popleft()
            merged += len(stored) + len(dropped)
            for digest in stored:
                name = digest[:NAME_BYTES]
                tiers = self._tiers.get(name, 0)
                self._tiers[name] = tiers | tier
                if not tiers:
                    changes[name] = True
            for digest in dropped:
                name = digest[:NAME_BYTES]
                tiers = self._tiers.get(name, 0)
                if tiers == tier:
                    del self._tiers[name]
                    changes[name] = False
                elif tiers:
                    self._tiers[name] = tiers & ~tier
        if changes:
            for subscriber in self._subscribers:
                subscriber.add(changes)
            self._changed()


class PrefixSubscriber:
    """The changes that one watcher has not received yet."""

    def __init__(self, cached: Mapping[bytes, int]) -> None:
        self._cached = cached
        self._reset = True
        self._unsent: dict[bytes, bool] = {}

    @property
    def has_changes(self) -> bool:
        """Whether there is something to send."""
        return self._reset or bool(self._unsent)

    def add(self, changes: Mapping[bytes, bool]) -> None:
        """Add blocks that are cached now (True) or no longer (False)."""
        if self._reset:
            return
        self._unsent.update(changes)
        if len(self._unsent) > len(self._cached) + MAX_NAMES:
            self._reset = True
            self._unsent.clear()

    def pop(self) -> PrefixChange | None:
        """The next message: all cached blocks, or the changes since the last message; None if there are none."""
        if not self.has_changes:
            return None
        reset, self._reset = self._reset, False
        if reset:
            self._unsent = dict.fromkeys(self._cached, True)
        names = list(islice(self._unsent, MAX_NAMES))
        changes = {name: self._unsent.pop(name) for name in names}
        stored = tuple(name for name, is_cached in changes.items() if is_cached)
        return PrefixChange(reset, stored, tuple(name for name, is_cached in changes.items() if not is_cached))
