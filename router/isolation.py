"""Isolation of requests that are suspected of killing workers: each waits for workers of its own. Pure.

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

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from router.placement.policy import SelectionCriteria, WorkerPair, can_serve, least_loaded_pair
from router.workers.failures import Suspicion
from router.workers.pool import WorkerPool


class Isolation:
    """Chooses workers that serve no other request; `WorkerPool.isolate` keeps new requests away from them."""

    def __init__(self, pool: WorkerPool, *, wait_s: float) -> None:
        self._pool = pool
        self._wait_s = wait_s
        self._attempts: dict[str, int] = {}
        """Number of attempts of each request, by request id, in order of arrival."""
        self._pair: WorkerPair | None = None
        """Workers for all attempts of the first request, once they serve no other one."""
        self._pair_suspicion = Suspicion.NONE
        """The suspicion for which the pair was selected."""
        self._own: frozenset[str] = frozenset()
        """Addresses of the workers that the first request has for itself."""
        self._empty_by: float | None = None

    def enter(self, request_id: str) -> None:
        """Count one attempt more of a request; the caller must call `leave`, or `release` of a grant."""
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1

    def leave(self, request_id: str) -> None:
        """Count one attempt fewer. The next request is first when no attempt of the first one is left."""
        was_first = self._is_first(request_id)
        self._attempts[request_id] -= 1
        if self._attempts[request_id]:
            if was_first and self._own:
                # An attempt that gave up may have isolated more workers, where others may run from now on.
                if self._pair is not None and not self._addresses(self._pair, self._pair_suspicion) <= self._own:
                    self._pair = None
                self._pool.isolate(self._own)
            return
        del self._attempts[request_id]
        if was_first:
            self._pair, self._empty_by, self._own = None, None, frozenset()
            self._pool.isolate(self._own)

    def select(
        self, request_id: str, criteria: SelectionCriteria, suspicion: Suspicion, asked: Collection[str], now: float
    ) -> tuple[bool, WorkerPair | None]:
        """Whether an attempt still waits for workers of its own, and the pair to use, if one is empty.

        It waits for pages at the decode worker in `asked`, if at any. It may run among others if no workers became
        empty in time, or no present worker can hold it.
        """
        fleet = self._pool.fleet
        if not self._is_first(request_id):
            return True, None
        if not can_serve(fleet, needs_decode=criteria.needs_decode):
            # The time in which a pair must become empty starts when there is a pair.
            self._empty_by = None
            return True, None
        pair, empty = self._pair, True
        if pair is None or not self._can_use(pair, criteria, suspicion):
            found = least_loaded_pair(fleet, criteria, isolates_decode=suspicion is Suspicion.PAIR)
            if found is None:
                return False, None
            pair, empty = found
            if empty:
                self._pair, self._pair_suspicion = found[0], suspicion
        elif not criteria.needs_decode:
            pair = WorkerPair(pair.prefill)
        self._pool.isolate(self._own | self._addresses(pair, suspicion) | ({pair.decode} & {*asked}))
        self._empty_by = self._empty_by or now + self._wait_s
        if now >= self._empty_by and (not empty or pair.decode in asked):
            return False, None
        return True, pair if empty else None

    def grant(self, request_id: str, pair: WorkerPair, suspicion: Suspicion) -> IsolationGrant:
        """The right of an attempt that is placed on the pair; other choices of the request may be placed there now."""
        self._own |= self._addresses(pair, suspicion)
        self._pool.isolate(self._own)
        return IsolationGrant(partial(self.leave, request_id), suspicion is Suspicion.PAIR)

    def _is_first(self, request_id: str) -> bool:
        return next(iter(self._attempts), None) == request_id

    def _addresses(self, pair: WorkerPair, suspicion: Suspicion) -> frozenset[str]:
        """Addresses of the workers in the pair that the request has for itself."""
        return frozenset(pair if suspicion is Suspicion.PAIR and pair.decode else pair[:1])

    def _can_use(self, pair: WorkerPair, criteria: SelectionCriteria, suspicion: Suspicion) -> bool:
        """Whether one more attempt of the first request can use the pair."""
        return (
            suspicion <= self._pair_suspicion
            and pair.decode not in criteria.excluded_decodes
            and any(
                pair.prefill in prefills and (pair.decode in decodes or not criteria.needs_decode)
                for prefills, decodes in self._pool.fleet.compatible_groups
            )
        )


@dataclass(eq=False, slots=True)
class IsolationGrant:
    """The right of an attempt to a prefill worker and, if `isolates_decode`, a decode worker without other requests."""

    _on_release: Callable[[], None]
    isolates_decode: bool
    released: bool = False

    def release(self) -> None:
        """End the right; others may use the workers when all attempts of the request have released it. Idempotent."""
        if not self.released:
            self.released = True
            self._on_release()
