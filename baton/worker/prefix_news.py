"""Changes of a worker's cached prefix blocks, for the watchers of its status.

A block counts as cached while the engine's pages or the cache's host memory have it. It is reported as stored when the
first of them gets it, and as dropped when the last has lost it.

The tiers report changes from any thread, and the engine holds its pool's lock meanwhile. So a change only goes into an
inbox; the asyncio loop merges it soon after. Each follower keeps the changes that it has not sent yet, only the latest
state of each block. When these become more than all cached blocks, it sends the whole list again. This bounds the
memory of a follower that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

from baton.engine.contract import Engine
from baton.kv.prefix import PrefixCache
from baton.worker.status import PREFIX_NAME_BYTES, PrefixChange

MOST_NAMES = 4096
"""Names in one message; the others follow in the next ones."""

_POOL, _HOST = 1, 2


class PrefixNews:
    """Merges the tiers' changes; made and used on the asyncio loop, until `close`.

    `changed` is called on the loop, when there is something new to `take` for the followers.
    """

    def __init__(self, engine: Engine, cache: PrefixCache, changed: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._cache = cache
        self._changed = changed
        self._inbox: deque[tuple[int, Sequence[bytes], Sequence[bytes]]] = deque()
        self._due = False
        self._tiers: dict[bytes, int] = {}
        self._followers: set[Follower] = set()
        engine.watch_prefixes(partial(self._put, _POOL))
        cache.watch(partial(self._put, _HOST))

    def follow(self) -> Follower:
        """Add a follower, which begins with the whole list."""
        follower = Follower(self._tiers)
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a follower."""
        self._followers.discard(follower)

    def close(self) -> None:
        """Stop watching the tiers."""
        self._engine.watch_prefixes(None)
        self._cache.watch(None)

    def _put(self, tier: int, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """Called from any thread."""
        self._inbox.append((tier, stored, dropped))
        if not self._due:
            self._due = True
            # The loop is closed: there are no followers.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._merge)

    def _merge(self) -> None:
        # Reset this first: a change that comes from now on needs another merge.
        self._due = False
        news: dict[bytes, bool] = {}
        while self._inbox:
            tier, stored, dropped = self._inbox.popleft()
            for digest in stored:
                name = digest[:PREFIX_NAME_BYTES]
                tiers = self._tiers.get(name, 0)
                self._tiers[name] = tiers | tier
                if not tiers:
                    news[name] = True
            for digest in dropped:
                name = digest[:PREFIX_NAME_BYTES]
                tiers = self._tiers.get(name, 0)
                if tiers == tier:
                    del self._tiers[name]
                    news[name] = False
                elif tiers:
                    self._tiers[name] = tiers & ~tier
        if news:
            for follower in self._followers:
                follower.add(news)
            self._changed()


class Follower:
    """The changes that one watcher has not received yet."""

    def __init__(self, held: Mapping[bytes, int]) -> None:
        self._held = held
        self._anew = True
        self._untold: dict[bytes, bool] = {}

    @property
    def more(self) -> bool:
        """Whether there is something to send."""
        return self._anew or bool(self._untold)

    def add(self, news: Mapping[bytes, bool]) -> None:
        """Add blocks that are cached now (True) or no longer (False)."""
        if self._anew:
            return
        self._untold.update(news)
        if len(self._untold) > len(self._held) + MOST_NAMES:
            self._anew = True
            self._untold.clear()

    def take(self) -> PrefixChange | None:
        """The next message: all cached blocks, or the changes since the last message; None if there are none."""
        if not self.more:
            return None
        reset, self._anew = self._anew, False
        if reset:
            self._untold = dict.fromkeys(self._held, True)
        names = list(islice(self._untold, MOST_NAMES))
        told = {name: self._untold.pop(name) for name in names}
        stored = tuple(name for name, there in told.items() if there)
        return PrefixChange(reset, stored, tuple(name for name, there in told.items() if not there))
