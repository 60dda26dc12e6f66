"""Isolation of requests that are suspected of killing workers: each waits for workers of its own.

    request is first ── its workers get no new requests ── they are empty ── reserve ── run ── first token from decode
                                                                                               └─ isolation ends

One request at a time is isolated, in order of arrival, together with all of its choices. The others wait until their
deadline, or until they are no longer suspected. If the workers do not become empty in `wait_s` seconds, the request
runs among others. It may then kill another worker, which is new evidence against it; but no request fails because it
waited for isolation. The first token from decode ends the isolation, because a request that kills does so before it.

The request has a prefill worker for itself. It has a decode worker for itself only if deaths of decode workers alone
are evidence enough: a long prompt takes minutes to compute, and a small fleet may have one decode worker. Otherwise the
decode worker takes no other request only while this one waits there for pages: the pages that come free are then for
this request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

from baton.errors import Unavailable
from router.placement.policy import SelectionCriteria, WorkerSelection, can_serve, least_loaded_pair
from router.placement.scheduler import selection_criteria
from router.placement.waiter import PlacementRequest, Refusal
from router.workers.failures import Breakers, Suspicion
from router.workers.pool import WorkerPool

P = TypeVar("P")
ReserveAt: TypeAlias = Callable[[SelectionCriteria, WorkerSelection, Mapping[str, str]], Awaitable[P | Refusal]]
"""A function that reserves at the selected workers; the mapping has, by address, why a worker is too small."""


class Isolation:
    """Places requests on workers that serve no other request; `WorkerPool.isolate` keeps new requests away from them.

    `changed` is set at each change of a worker or of the queue. `fleet_epoch` is that of `RefusalGate`.
    """

    def __init__(
        self,
        pool: WorkerPool,
        breakers: Breakers,
        changed: asyncio.Event,
        fleet_epoch: Callable[[], int],
        *,
        wait_s: float,
        worker_wait_s: float,
    ) -> None:
        self._pool = pool
        self._breakers = breakers
        self._changed = changed
        self._fleet_epoch = fleet_epoch
        self._wait_s = wait_s
        self._worker_wait_s = worker_wait_s
        self._attempts: dict[str, int] = {}
        """Number of attempts of each request, by request id, in order of arrival."""
        self._pair: WorkerSelection | None = None
        """Workers of the first request."""
        self._own: frozenset[str] = frozenset()
        """Addresses of the workers that the first request has for itself."""
        self._empty_by: float | None = None
        self._loop = asyncio.get_running_loop()

    async def place(
        self, request: PlacementRequest, reserve: ReserveAt[P], suspicion: Callable[[], Suspicion]
    ) -> tuple[P, IsolationGrant] | None:
        """Wait for a placement on workers of its own. Returns it with a grant that the caller must release.

        Returns None if the request may run among others: it is no longer suspected, no workers became empty in time, or
        no present worker can hold it. Raises Unavailable if there were no workers for `worker_wait_s` seconds.
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
                # An attempt that gave up may have isolated more workers.
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
        too_small_reasons: Mapping[str, str] = {}
        refused, no_workers_since = None, None
        while suspected := suspicion():
            self._changed.clear()
            now, until = self._loop.time(), math.inf
            if not can_serve(self._pool.fleet, needs_decode=request.needs_decode):
                no_workers_since = now if no_workers_since is None else no_workers_since
                until = no_workers_since + self._worker_wait_s
                if now >= until:
                    raise Unavailable(self._pool.describe_missing(self._worker_wait_s))
                # The time in which a pair must become empty starts when there is a pair.
                if self._is_first(request.request_id):
                    self._empty_by = None
            elif self._is_first(request.request_id):
                no_workers_since = None
                criteria = selection_criteria(request, too_small_reasons, self._pool.fleet, self._pool.prefixes)
                isolates_decode = suspected is Suspicion.PAIR
                found = self._select(criteria, isolates_decode=isolates_decode)
                if found is None:
                    return None
                selection, empty = found
                own = frozenset((selection.prefill, *(selection.decode if isolates_decode else ())))
                self._pool.isolate(self._own.union(own, selection.decode if refused else ()))
                until = self._empty_by = self._empty_by or now + self._wait_s
                if empty and refused != (selection, self._fleet_epoch()):
                    refused = selection, self._fleet_epoch()
                    answer = await reserve(criteria, selection, too_small_reasons)
                    if not isinstance(answer, Refusal):
                        self._pair, self._own = selection, self._own | own
                        self._pool.isolate(self._own)
                        # Other choices of the request may be placed now.
                        self._changed.set()
                        return answer, IsolationGrant(
                            partial(self._leave, request.request_id), isolates_decode=isolates_decode
                        )
                    too_small_reasons = answer.too_small_reasons
                    continue
                if now >= until:
                    return None
            else:
                no_workers_since = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(until) else until):
                    await self._changed.wait()
        return None

    def _select(self, criteria: SelectionCriteria, *, isolates_decode: bool) -> tuple[WorkerSelection, bool] | None:
        """The pair to use, and whether its isolated workers serve no other request; None if there is no pair."""
        fleet, pair = self._pool.fleet, self._pair
        has_own = not isolates_decode or (pair is not None and self._own.issuperset(pair.decode))
        if pair is not None and has_own and all(address in fleet for address in (pair.prefill, *pair.decode)):
            return pair, True
        return least_loaded_pair(fleet, criteria, self._breakers.open_breakers(), isolates_decode=isolates_decode)


class IsolationGrant:
    """The right of an attempt to a prefill worker without other requests.

    If `isolates_decode`, also to a decode worker.
    """

    def __init__(self, on_release: Callable[[], None], *, isolates_decode: bool) -> None:
        self._on_release = on_release
        self.isolates_decode = isolates_decode
        self.released = False

    def release(self) -> None:
        """End the right; others may use the workers when all attempts of the request have released it. Idempotent."""
        if not self.released:
            self.released = True
            self._on_release()
