"""Workers of its own for a request that several worker deaths point at.

    its turn ── keep the quietest pair free of new requests ── empty ── reserve ── run ── first token from decode
                                                                                          └─ the end of the turn

One request at a time has the turn, in order of arrival; all its choices share it. A request waits for its turn until
its deadline, or until it is no longer suspected. If the pair does not become empty in `wait_s`, the request runs among
others after all: it may then kill a worker once more, but no request fails because others were isolated before it, and
the next loss is evidence again. The first token from decode ends the turn: a request that kills does so before it.
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
from router.request import Deliver
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
        """Where the attempts of the request whose turn it is run."""
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
        self, request: PlacementRequest, deliver: Deliver, suspected: Callable[[], bool]
    ) -> Placement | None:
        """A place where nothing else runs, with the grant that is to be released; None to run among others.

        That is so when the request is no longer suspected, when no pair became empty in time, and when no worker that
        is there can hold the request. Raises Unavailable when there were no workers for `worker_wait_s`.
        """
        name = request.request_id
        self._attempts[name] = self._attempts.get(name, 0) + 1
        grant, placement = IsolationGrant(partial(self._leave, name)), None
        try:
            request = replace(request, query=replace(request.query, alone=True))
            placement = await self._place(request, deliver, suspected)
        finally:
            if placement is None:
                grant.release()
        return placement and replace(placement, isolation=grant)

    def _leave(self, name: str) -> None:
        had_turn = self._has_turn(name)
        self._attempts[name] -= 1
        if self._attempts[name]:
            return
        del self._attempts[name]
        if had_turn:
            self._pair = self._empty_by = None
            self.wake(news=False)
            self._pool.keep(frozenset())

    def _has_turn(self, name: str) -> bool:
        return next(iter(self._attempts)) == name

    async def _place(
        self, request: PlacementRequest, deliver: Deliver, suspected: Callable[[], bool]
    ) -> Placement | None:
        never: Mapping[str, str] = {}
        refused, gone_since = None, None
        while suspected():
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
                found = self._select(query)
                if found is None:
                    return None
                selection, empty = found
                self._pool.keep(frozenset((selection.prefill, *selection.decode)))
                until = self._empty_by = self._empty_by or now + self._wait_s
                if empty and refused != (selection, self._news):
                    refused = selection, self._news
                    answer = await self._reserve(request, query, selection, deliver, never)
                    if isinstance(answer, Placement):
                        self._pair = selection
                        # Other choices of the request may follow.
                        self.wake(news=False)
                        return answer
                    never = answer.never
                    continue
                if now >= until:
                    return None
            else:
                gone_since = None
            await self._wait_change(seen, until)
        return None

    def _select(self, query: PlacementQuery) -> tuple[Selection, bool] | None:
        """The pair to be kept, and whether nothing but other choices of the request runs there."""
        fleet = self._pool.fleet
        if self._pair is not None and all(name in fleet for name in (self._pair.prefill, *self._pair.decode)):
            return self._pair, True
        return quietest_pair(fleet, query, self._breakers.excluded())

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
