"""Isolation of requests that are suspected of killing workers: each waits for workers of its own.

    its turn ── give the least loaded workers nothing new ── empty ── reserve ── run ── first token from decode
                                                                                        └─ the end of the turn

One request at a time has the turn, in order of arrival; all its choices share it. A request waits for its turn until
its deadline, or until it is no longer suspected. If the workers do not become empty in `wait_s`, the request runs among
others after all: it may then kill a worker once more, but no request fails because others were isolated before it, and
the next loss is evidence again. The first token from decode ends the turn: a request that kills does so before it.

It has a prefill worker for itself. It has a decode worker for itself only if deaths of decode workers alone point at
it: a long prompt takes minutes to compute, and a small fleet has one decode worker. If such a request kills a decode
worker among others, that is evidence for its next turn. Otherwise the decode worker is isolated only while the request
waits there for pages, so that released pages go to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

from baton.errors import Unavailable
from router.placement.policy import PlacementQuery, Selection, can_serve, least_loaded_pair
from router.placement.scheduler import make_query
from router.placement.waiter import PlacementRequest, Refusal
from router.workers.failures import Breakers, Suspicion
from router.workers.pool import Pool

P = TypeVar("P")
ReserveAt: TypeAlias = Callable[[PlacementQuery, Selection, Mapping[str, str]], Awaitable[P | Refusal]]
"""Reserves at the selected workers; the mapping has the reasons of decode workers that are too small."""


class Isolation:
    """Places requests where nothing else runs; `Pool.isolate` tells others which workers are not for them.

    `changed` is set whenever a worker or the queue has changed; `updates` is the number of changes of workers.
    """

    def __init__(
        self,
        pool: Pool,
        breakers: Breakers,
        changed: asyncio.Event,
        updates: Callable[[], int],
        *,
        wait_s: float,
        worker_wait_s: float,
    ) -> None:
        self._pool = pool
        self._breakers = breakers
        self._changed = changed
        self._updates = updates
        self._wait_s = wait_s
        self._worker_wait_s = worker_wait_s
        self._attempts: dict[str, int] = {}
        """Requests in the order of their turns, and how many of their attempts take part."""
        self._pair: Selection | None = None
        """Workers for the attempts of the request whose turn it is."""
        self._own: frozenset[str] = frozenset()
        """The workers that these have for themselves."""
        self._empty_by: float | None = None
        self._loop = asyncio.get_running_loop()

    async def place(
        self, request: PlacementRequest, reserve: ReserveAt[P], suspicion: Callable[[], Suspicion]
    ) -> tuple[P, IsolationGrant] | None:
        """A placement on workers of its own, and the grant that is to be released; None to run among others.

        That is so when the request is no longer suspected, when no workers became empty in time, and when no worker
        that is there can hold the request. Raises Unavailable when there were no workers for `worker_wait_s`.
        """
        request_id = request.request_id
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1
        placed = None
        try:
            placed = await self._place(request, reserve, suspicion)
        finally:
            if placed is None:
                self._leave(request_id)
        return placed

    def _leave(self, request_id: str) -> None:
        was_first = self._is_first(request_id)
        self._attempts[request_id] -= 1
        if self._attempts[request_id]:
            if was_first and self._own:
                # One that gave up had more.
                self._pool.isolate(self._own)
            return
        del self._attempts[request_id]
        if was_first:
            self._pair = self._empty_by = None
            self._own = frozenset()
            self._changed.set()
            self._pool.isolate(frozenset())

    def _is_first(self, request_id: str) -> bool:
        return next(iter(self._attempts)) == request_id

    async def _place(
        self, request: PlacementRequest, reserve: ReserveAt[P], suspicion: Callable[[], Suspicion]
    ) -> tuple[P, IsolationGrant] | None:
        too_small: Mapping[str, str] = {}
        refused, gone_since = None, None
        while suspected := suspicion():
            self._changed.clear()
            now, until = self._loop.time(), math.inf
            if not can_serve(self._pool.fleet, decodes=request.decodes):
                gone_since = now if gone_since is None else gone_since
                until = gone_since + self._worker_wait_s
                if now >= until:
                    raise Unavailable(self._pool.describe_missing(self._worker_wait_s))
                # The time in which a pair must become empty counts only while there is one.
                if self._is_first(request.request_id):
                    self._empty_by = None
            elif self._is_first(request.request_id):
                gone_since = None
                query = make_query(request, too_small, self._pool.fleet, self._pool.prefixes)
                of_pair = suspected is Suspicion.DECODE
                found = self._select(query, of_pair=of_pair)
                if found is None:
                    return None
                selection, empty = found
                own = frozenset((selection.prefill, *(selection.decode if of_pair else ())))
                self._pool.isolate(self._own.union(own, selection.decode if refused else ()))
                until = self._empty_by = self._empty_by or now + self._wait_s
                if empty and refused != (selection, self._updates()):
                    refused = selection, self._updates()
                    answer = await reserve(query, selection, too_small)
                    if not isinstance(answer, Refusal):
                        self._pair, self._own = selection, self._own | own
                        self._pool.isolate(self._own)
                        # Other choices of the request may follow.
                        self._changed.set()
                        return answer, IsolationGrant(partial(self._leave, request.request_id), of_pair=of_pair)
                    too_small = answer.too_small
                    continue
                if now >= until:
                    return None
            else:
                gone_since = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(until) else until):
                    await self._changed.wait()
        return None

    def _select(self, query: PlacementQuery, *, of_pair: bool) -> tuple[Selection, bool] | None:
        """The pair to run at, and whether nothing but other choices of the request runs on the isolated part of it."""
        fleet, pair = self._pool.fleet, self._pair
        has_own = not of_pair or (pair is not None and self._own.issuperset(pair.decode))
        if pair is not None and has_own and all(address in fleet for address in (pair.prefill, *pair.decode)):
            return pair, True
        return least_loaded_pair(fleet, query, self._breakers.excluded(), of_pair=of_pair)


class IsolationGrant:
    """The right of an attempt to run where no other request does, until `release`; `of_pair`: also on decode."""

    def __init__(self, on_release: Callable[[], None], *, of_pair: bool) -> None:
        self._on_release = on_release
        self.of_pair = of_pair
        self.released = False

    def release(self) -> None:
        """Let others use the workers; idempotent."""
        if not self.released:
            self.released = True
            self._on_release()
