"""Workers of its own for a request that several worker deaths point at.

    its turn ── keep the quietest workers free of new requests ── empty ── reserve ── run ── first token from decode
                                                                                             └─ the end of the turn

One request at a time has the turn, in order of arrival; all its choices share it. A request waits for its turn until
its deadline, or until it is no longer suspected. If the workers do not become empty in `wait_s`, the request runs among
others after all: it may then kill a worker once more, but no request fails because others were isolated before it, and
the next loss is evidence again. The first token from decode ends the turn: a request that kills does so before it.

It has a prefill worker for itself. It has a decode worker for itself only if deaths of decode workers alone point at
it: a long prompt takes minutes to compute, and a small fleet has one decode worker. If such a request kills a decode
worker among others, that is evidence for its next turn. Otherwise the decode worker is kept only while the request
waits there for pages, so that those that others give back go to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from baton.errors import Unavailable
from router.placement.policy import PlacementQuery, Selection, can_serve, quietest_pair
from router.placement.scheduler import PlacementRequest, Refusal
from router.request import Deliver, Suspicion
from router.workers.failures import Breakers
from router.workers.pool import Pool
from router.workers.reservation import IsolationGrant, Placement, Reserver


class Isolation:
    """Places requests where nothing else runs; tells others by `Pool.keep` which workers are not for them."""

    def __init__(
        self, pool: Pool, reserver: Reserver, breakers: Breakers, *, wait_s: float, worker_wait_s: float
    ) -> None:
        self._pool = pool
        self._reserver = reserver
        self._breakers = breakers
        self._wait_s = wait_s
        self._worker_wait_s = worker_wait_s
        self._attempts: dict[str, int] = {}
        """Requests in the order of their turns, and how many of their attempts take part."""
        self._pair: Selection | None = None
        """Workers for the attempts of the request whose turn it is."""
        self._granted: frozenset[str] = frozenset()
        """The workers that these have for themselves."""
        self._empty_by: float | None = None
        self._event = asyncio.Event()
        self._version = self._news = 0
        self._loop = asyncio.get_running_loop()

    def wake(self, *, news: bool) -> None:
        """Something was given back; `news` when a worker that refused may have changed its mind."""
        self._news += news
        self._version += 1
        self._event.set()

    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion]
    ) -> Placement | None:
        """A place on workers of its own, with the grant that is to be released; None to run among others.

        That is so when the request is no longer suspected, when no workers became empty in time, and when no worker
        that is there can hold the request. Raises Unavailable when there were no workers for `worker_wait_s`.
        """
        name = request.request_id
        self._attempts[name] = self._attempts.get(name, 0) + 1
        placement = None
        try:
            request = replace(request, query=replace(request.query, alone=True))
            placement = await self._place(request, deliver, suspicion)
        finally:
            if placement is None:
                self._leave(name)
        return placement

    def _leave(self, name: str) -> None:
        had_turn = self._has_turn(name)
        self._attempts[name] -= 1
        if self._attempts[name]:
            if had_turn and self._granted:
                # One that gave up kept more.
                self._pool.keep(self._granted)
            return
        del self._attempts[name]
        if had_turn:
            self._pair = self._empty_by = None
            self._granted = frozenset()
            self.wake(news=False)
            self._pool.keep(frozenset())

    def _has_turn(self, name: str) -> bool:
        return next(iter(self._attempts)) == name

    async def _place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion]
    ) -> Placement | None:
        never: Mapping[str, str] = {}
        refused, gone_since = None, None
        while suspected := suspicion():
            seen, now, until = self._version, self._loop.time(), math.inf
            if not can_serve(self._pool.fleet, decodes=request.query.decodes):
                gone_since = now if gone_since is None else gone_since
                until = gone_since + self._worker_wait_s
                if now >= until:
                    raise Unavailable(self._pool.describe_missing(self._worker_wait_s))
                # The time in which a pair must become empty counts only while there is one.
                if self._has_turn(request.request_id):
                    self._empty_by = None
            elif self._has_turn(request.request_id):
                gone_since = None
                query = self._reserver.query(request, never)
                of_pair = suspected is Suspicion.DECODE
                found = self._select(query, of_pair=of_pair)
                if found is None:
                    return None
                selection, empty = found
                own = frozenset((selection.prefill, *(selection.decode if of_pair else ())))
                self._pool.keep(self._granted.union(own, selection.decode if refused else ()))
                until = self._empty_by = self._empty_by or now + self._wait_s
                if empty and refused != (selection, self._news):
                    refused = selection, self._news
                    answer = await self._reserve(request, query, selection, deliver, never)
                    if isinstance(answer, Placement):
                        self._pair, self._granted = selection, self._granted | own
                        self._pool.keep(self._granted)
                        # Other choices of the request may follow.
                        self.wake(news=False)
                        grant = IsolationGrant(partial(self._leave, request.request_id), of_pair=of_pair)
                        return replace(answer, isolation=grant)
                    never = answer.never
                    continue
                if now >= until:
                    return None
            else:
                gone_since = None
            await self._wait_change(seen, until)
        return None

    def _select(self, query: PlacementQuery, *, of_pair: bool) -> tuple[Selection, bool] | None:
        """The pair to run at, and whether nothing but other choices of the request runs on what is to be kept of it."""
        fleet, pair = self._pool.fleet, self._pair
        has_own = not of_pair or (pair is not None and self._granted.issuperset(pair.decode))
        if pair is not None and has_own and all(name in fleet for name in (pair.prefill, *pair.decode)):
            return pair, True
        return quietest_pair(fleet, query, self._breakers.excluded(), of_pair=of_pair)

    async def _reserve(
        self,
        request: PlacementRequest,
        query: PlacementQuery,
        selection: Selection,
        deliver: Deliver,
        never: Mapping[str, str],
    ) -> Placement | Refusal:
        assignment, answer = self._reserver.assign(selection, query), None
        try:
            answer = await self._reserver.reserve(request, assignment, selection, deliver, never)
        finally:
            if not isinstance(answer, Placement):
                assignment.release()
        return answer

    async def _wait_change(self, seen: int, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if math.isinf(until) else until):
                while self._version == seen:
                    self._event.clear()
                    await self._event.wait()
