"""Which prefix blocks a worker holds, as news for those who watch its status.

A block is held while the engine's pages or the cache's host memory have it: it is told as stored when the first of
them gets it, as dropped when the last has lost it. What happens to it in between is no news.

The tiers tell of their changes from any thread, the engine with its pool's lock held. So a change only goes into an
inbox, and is merged soon after on the asyncio loop, where all else happens. Each follower keeps what it has not been
told yet, of each block the latest state only. When that becomes longer than all that is held, everything is told anew:
a follower that does not listen costs no more than that.
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
"""Names in one message; the rest is told in the next ones."""

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
        """Someone new who knows nothing yet."""
        follower = Follower(self._tiers)
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Nobody listens there any more."""
        self._followers.discard(follower)

    def close(self) -> None:
        """Listen to the tiers no longer."""
        self._engine.watch_prefixes(None)
        self._cache.watch(None)

    def _put(self, tier: int, stored: Sequence[bytes], dropped: Sequence[bytes]) -> None:
        """Called from any thread."""
        self._inbox.append((tier, stored, dropped))
        if not self._due:
            self._due = True
            # A closed loop has nobody to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._merge)

    def _merge(self) -> None:
        # First: what is put from here on is due again.
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
    """What one watcher has not been told yet."""

    def __init__(self, held: Mapping[bytes, int]) -> None:
        self._held = held
        self._anew = True
        self._untold: dict[bytes, bool] = {}

    @property
    def more(self) -> bool:
        """Whether something is left to be told."""
        return self._anew or bool(self._untold)

    def add(self, news: Mapping[bytes, bool]) -> None:
        """Blocks that are held now (True) or no longer."""
        if self._anew:
            return
        self._untold.update(news)
        if len(self._untold) > len(self._held) + MOST_NAMES:
            self._anew = True
            self._untold.clear()

    def take(self) -> PrefixChange | None:
        """The next message: all blocks that are held, or what changed since; None if nothing has."""
        if not self.more:
            return None
        reset, self._anew = self._anew, False
        if reset:
            self._untold = dict.fromkeys(self._held, True)
        names = list(islice(self._untold, MOST_NAMES))
        told = {name: self._untold.pop(name) for name in names}
        stored = tuple(name for name, there in told.items() if there)
        return PrefixChange(reset, stored, tuple(name for name, there in told.items() if not there))
