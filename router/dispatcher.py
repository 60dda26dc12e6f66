"""The life of a placement: a prefill worker for an attempt, and pages at a decode worker.

1. `place` puts the request into the queue (`placement/queue.py`), which has the order of tenants and limits.
2. `_register` is called in the order of the queue, while prefill workers have room. It asks the decode worker of the
   best pair (`placement/policy.py`) for pages. A place at the prefill worker is kept until the answer.
3. If that decode worker has no room, the reservation waits there, and `_ask_next` asks all others too.
4. The first worker that grants pages wins. `_placement` selects the prefill worker anew, by what is known then, and the
   result is a `Placement`. The other reservations are cancelled, and the next request is registered.

Nothing is asked twice: a worker answers again when it has room. Changes of workers only bring new workers to ask.
Requests also wait in the queue while a role has no workers, each for at most `worker_wait_s` seconds; then it fails
with Unavailable. A request that is suspected of killing workers waits outside the queue for workers of its own
(`isolation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.config.router import RouterConfig
from baton.errors import InvalidRequest, Unavailable
from baton.kv.format import Shard
from baton.lifecycle import State
from baton.request import ReserveResult
from baton.telemetry.logs import about
from baton.telemetry.metrics import BREAKERS_OPEN, PLACEMENTS
from router.isolation import Isolation, IsolationGrant
from router.placement.policy import (
    ASKED_AT_MOST,
    SelectionCriteria,
    WorkerPair,
    can_serve,
    compatible_decode_addresses,
    rank_pairs,
)
from router.placement.queue import PlacementQueue, PlacementRequest, Waiter
from router.workers.decode_session import DecodeCall
from router.workers.failures import AttemptBreakers, Breakers, Deliver, Suspicion
from router.workers.link import WorkerLink
from router.workers.pool import WorkerPool
from router.workers.prefill_call import PrefillAssignment

_MAX_PASSED = 8
"""Most waiters that are passed over at a time because no prefill worker has room for them."""

_LOOK_S = 0.5
"""Seconds between two looks for room at workers of a large fleet that a request has not asked."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker from which prefill can fetch KV: its shards with KV addresses, and its incarnation."""

    shards: tuple[Shard, ...]
    incarnation: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt; `decode` is None if the attempt needs no decode worker.

    `consumer` is the decode worker's name in KV tickets. `breakers` count faults and successes of the
    workers. The decode worker has pinned the KV of the first `pinned_tokens` tokens; prefill can fetch it from `peer`,
    unless that is None.
    """

    prefill: PrefillAssignment
    breakers: AttemptBreakers
    decode: DecodeCall | None = None
    decode_address: str | None = None
    decode_incarnation: str = ""
    consumer: str = ""
    pinned_tokens: int = 0
    peer: Peer | None = None
    in_place: bool = False
    """Whether one worker computes the prompt and decodes it, in the same pages."""
    isolation: IsolationGrant | None = None
    """The grant of the attempt, if its request runs isolated."""

    def describe(self) -> str:
        """The workers, for the ledger's reader."""
        decode = f", decode: at {self.decode_address}" if self.decode else ""
        return f"prefill: on {self.prefill.link.name}{', in place' if self.in_place else decode}"


class Dispatcher:
    """Gives placements to attempts. Use it on the event loop only."""

    def __init__(self, pool: WorkerPool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.queue = PlacementQueue(
            capacity=config.queue_capacity, prefill_limit=config.prefill_limit, max_wait_s=config.queue_wait_s
        )
        self._reservations: dict[Waiter, Reservations] = {}
        """Those of each waiter in the queue."""
        self._places: dict[Waiter, PrefillAssignment] = {}
        """Places at prefill workers that are kept for waiters until decode workers have answered."""
        self._tenants: dict[PrefillAssignment, str] = {}
        """Tenant of each assignment at a prefill worker that came from the queue."""
        self._watching: set[Reservations] = set()
        """Reservations of attempts for which a change of workers matters."""
        self._no_workers_since = math.inf
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._breakers = Breakers(self._loop.time)
        self._isolation = Isolation(pool, wait_s=config.isolation_wait_s, worker_wait_s=config.worker_wait_s)
        pool.subscribe(self._on_update)

    def check_admission(self, tenant: str, *, needs_decode: bool) -> None:
        """Raise Overloaded if the queue is full for the tenant.

        Raises Unavailable if no worker can serve the request and `worker_wait_s` is 0.
        """
        self._check_workers(needs_decode=needs_decode)
        self.queue.check_capacity(tenant)

    def _check_workers(self, *, needs_decode: bool) -> None:
        if not self._config.worker_wait_s and not can_serve(self._pool.fleet, needs_decode=needs_decode):
            raise Unavailable(self._pool.describe_missing())

    def close(self) -> None:
        """Fail all requests in the queue with Unavailable."""
        for reservations in self._reservations.values():
            reservations.fail(Unavailable("the router is stopping"))
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()

    @contextlib.asynccontextmanager
    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion] = lambda: Suspicion.NONE
    ) -> AsyncIterator[Placement]:
        """Wait for a placement and hold it until the block ends, which releases the assignment and the pages.

        `deliver` gets the events of the attempt. While `suspicion` returns more than NONE, the request gets workers of
        its own. Raises Overloaded at once if the queue is full or the deadline can't be met, Unavailable if no worker
        that can serve the request came in time, and InvalidRequest if no decode worker can ever hold it.
        """
        with Reservations(self._pool, request, deliver, self._config.reserve_timeout_s) as reservations:
            try:
                placement = await self._isolate(request, reservations, suspicion) if suspicion() else None
                if placement is None:
                    placement = await self._wait_in_queue(request, reservations)
            finally:
                self._watching.discard(reservations)
        PLACEMENTS.labels(
            "in_place" if placement.in_place else "transfer" if placement.decode is not None else "prefill_only"
        ).inc()
        try:
            yield placement
        finally:
            placement.breakers.end()
            self.release(placement.prefill)
            if placement.decode is not None:
                placement.decode.close()
            if placement.isolation is not None:
                placement.isolation.release()
            self._on_update()

    def release(self, assignment: PrefillAssignment) -> None:
        """Release the assignment, since the prompt is computed; idempotent."""
        if self._free(assignment):
            self._register_waiters()

    async def _wait_in_queue(self, request: PlacementRequest, reservations: Reservations) -> Placement:
        """Wait in the queue until the request is registered and a decode worker has granted pages."""
        if not request.is_retry:
            self._check_workers(needs_decode=request.needs_decode)
        waiter = Waiter(request, self._loop.time())
        self.queue.push(waiter, self._pool.fleet, self._loop.time())
        self._reservations[waiter] = reservations
        try:
            self._register_waiters()
            while True:
                await reservations.wait_for_change()
                if (placement := self._placement(waiter, reservations)) is not None:
                    self.queue.pop(waiter, self._loop.time())
                    return placement
                if self._is_too_large(reservations):
                    await self._wait_for_larger_worker(waiter, reservations)
                elif self.queue.is_registered(waiter):
                    self._ask_next(waiter, reservations)
        finally:
            self.queue.remove(waiter)
            del self._reservations[waiter]
            self._free_place(waiter)
            self._register_waiters()

    def _register_waiters(self) -> None:
        """Register waiters in the order of the queue while prefill workers have room."""
        passed: set[Waiter] = set()
        while len(passed) <= _MAX_PASSED:
            waiter = self.queue.next_to_register(self._pool.fleet, self._loop.time(), passed)
            if waiter is None:
                break
            if not self._register(waiter):
                # Waiters behind it may still find a prefill worker that it can't use.
                passed.add(waiter)
        self._fail_overdue()

    def _register(self, waiter: Waiter) -> bool:
        """Ask the decode worker of the best pair for pages; False if no prefill worker has room."""
        request, reservations, fleet = waiter.request, self._reservations[waiter], self._pool.fleet
        limit = self.queue.prefill_limit(request.tenant, fleet)
        pairs = self._rank(request, reservations, limit=limit) if fleet.has_capacity(limit) else []
        if not pairs:
            return False
        self.queue.register(waiter)
        self._watching.add(reservations)
        self._places[waiter] = self._assign(request, pairs[0], from_queue=True)
        if request.needs_decode:
            request.lifecycle.enter(State.RESERVING, self._loop.time())
            waiter.waits = not fleet.decode[pairs[0].decode].has_room(request.context_tokens)
            reservations.ask(pairs[0].decode)
        else:
            reservations.changed.set()
        return True

    def _ask_next(self, waiter: Waiter, reservations: Reservations) -> None:
        """Ask more decode workers, if all that were asked have answered that the reservation must wait there.

        The best one is asked first, then all others, and at last those that failed the request before.
        """
        request, fleet, known = waiter.request, self._pool.fleet, reservations.known
        before = waiter in self._places, waiter.waits, waiter.unused
        if reservations.waiting:
            # The prompt may be computed long after others, which can use the place until then.
            self._free_place(waiter)
        most = max(ASKED_AT_MOST - len(reservations.calls), 1) if reservations.calls else 1
        unasked = {
            view.address
            for view in fleet.decode.values()
            if view.address not in known
            and not view.draining
            and (len(reservations.calls) < ASKED_AT_MOST or view.has_room(request.context_tokens))
        }
        for each in (request, replace(request, avoided_workers=frozenset())) if unasked else ():
            if not reservations.unanswered:
                pairs = self._rank(each, reservations, most=most + len(known))
                for address in [pair.decode for pair in pairs if pair.decode in unasked][:most]:
                    reservations.ask(address)
        waiter.unused = (
            reservations.left_out | {decode for _, decode in request.avoided_pairs} - reservations.calls.keys()
        )
        waiter.waits = bool(reservations.waiting) or (bool(reservations.calls) and waiter.waits)
        if before != (waiter in self._places, waiter.waits, waiter.unused):
            # A place at a prefill worker is free, or this waiter hides others no longer.
            self._register_waiters()

    def _placement(self, waiter: Waiter, reservations: Reservations) -> Placement | None:
        """The placement, if a decode worker has granted pages or none is needed. The prefill worker is selected anew.

        If all prefill workers are full, the best one gets more than the limit: pages must not be idle.
        """
        request = waiter.request
        if not request.needs_decode:
            place = self._places.pop(waiter, None)
            return None if place is None else self._placed(request, reservations, place)
        for address in list(reservations.granted):
            self._free_place(waiter)
            limit = self.queue.prefill_limit(request.tenant, self._pool.fleet)
            if pairs := self._rank(request, reservations, limit=limit, only=address, may_exceed=True):
                assignment = self._assign(request, pairs[0], from_queue=True)
                return self._placed(request, reservations, assignment, address)
            # It drains, or another request has it for itself.
            reservations.leave_out(address)
        return None

    def _is_too_large(self, reservations: Reservations) -> bool:
        """Whether the request is too large for every decode worker that is there."""
        matching = compatible_decode_addresses(self._pool.fleet) if reservations.too_small else frozenset()
        return bool(matching) and reservations.too_small.keys() >= matching

    async def _wait_for_larger_worker(self, waiter: Waiter, reservations: Reservations) -> None:
        """Wait until a decode worker joins that may be large enough, and return to the queue.

        Only retries wait, because they ran on such a worker before. Raises InvalidRequest for a new request, and
        Unavailable after `worker_wait_s` seconds.
        """
        request, reasons = waiter.request, "; ".join(reservations.too_small.values())
        problem = (
            f"{request.context_tokens} tokens of context and {request.max_new_tokens} of output need more than any "
            f"decode worker can hold (--kv-memory, --max-model-len): {reasons}"
        )
        if not request.is_retry:
            raise InvalidRequest("max_tokens", problem)
        self.queue.remove(waiter)
        self._free_place(waiter)
        self._register_waiters()
        request.lifecycle.enter(State.QUEUED, self._loop.time())
        try:
            async with asyncio.timeout(self._config.worker_wait_s):
                while self._is_too_large(reservations):
                    await reservations.wait_for_change()
        except TimeoutError:
            waited = f"after a wait of {self._config.worker_wait_s:g} s"
            message = f"no decode worker is left that could hold the request, {waited}: {problem}"
            raise Unavailable(message) from None
        self.queue.push(waiter, self._pool.fleet, self._loop.time())
        self._register_waiters()

    async def _isolate(
        self, request: PlacementRequest, reservations: Reservations, suspicion: Callable[[], Suspicion]
    ) -> Placement | None:
        """A placement on workers of its own; None if the request may run among others."""
        self._isolation.enter(request.request_id)
        self._watching.add(reservations)
        reservations.wakes_always = True
        placement = None
        try:
            while suspected := suspicion():
                step = self._isolation.next_step(
                    request.request_id,
                    self._criteria(request, reservations),
                    self._breakers.open_breakers(),
                    suspected,
                    reservations.calls,
                    self._loop.time(),
                )
                if step is None:
                    break
                if step.pair is not None:
                    if request.needs_decode:
                        reservations.ask_only(step.pair.decode)
                    if not request.needs_decode or step.pair.decode in reservations.granted:
                        assignment = self._assign(request, step.pair)
                        placement = self._placed(request, reservations, assignment, step.pair.decode)
                        grant = self._isolation.grant(request.request_id, step.pair, suspected)
                        return replace(placement, isolation=grant)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(None if math.isinf(step.until) else step.until):
                        await reservations.wait_for_change()
            reservations.ask_only("")
            return None
        finally:
            reservations.wakes_always = False
            if placement is None:
                self._isolation.leave(request.request_id)
            self._on_update()

    def _placed(
        self,
        request: PlacementRequest,
        reservations: Reservations,
        assignment: PrefillAssignment,
        address: str = "",
    ) -> Placement:
        """The placement on workers that have given the attempt all that it needs."""
        prefill = assignment.link.address
        # The prompt goes there at once, so the worker will soon hold its blocks.
        expect = self._pool.prefixes.expect
        expect(prefill, request.digests, assignment.cached_tokens, writes=request.cache.writes)
        if not address:
            return Placement(assignment, self._breakers.begin_attempt(prefill, None))
        call, answer = reservations.take(address)
        in_place, link = address == prefill, self._pool.decode_link(address)
        status = link.status if link is not None else None
        return Placement(
            prefill=assignment,
            breakers=self._breakers.begin_attempt(prefill, address),
            decode=call,
            decode_address=address,
            decode_incarnation=status.identity.incarnation if status else "",
            consumer=link.consumer if link is not None else "",
            pinned_tokens=answer.cached_tokens,
            peer=self._peer(assignment, link) if link is not None and answer.cached_tokens and not in_place else None,
            in_place=in_place,
        )

    def _peer(self, assignment: PrefillAssignment, decode: WorkerLink) -> Peer | None:
        """The decode worker as a source of KV; None if its block namespace differs, or if it refuses our KV tickets."""
        status = decode.status
        if status is None or decode.namespace != assignment.link.namespace or not self._pool.signs_for(status.identity):
            return None
        return Peer(status.identity.shards_at(decode.address), status.identity.incarnation)

    def _criteria(self, request: PlacementRequest, reservations: Reservations) -> SelectionCriteria:
        """The needs of a request, for the fleet and the known prefixes as they are now."""
        fleet, prefixes = self._pool.fleet, self._pool.prefixes
        views = (
            (each, fleet.prefill.get(each.address) or fleet.decode.get(each.address))
            for each in request.avoided_workers
        )
        return SelectionCriteria(
            request.context_tokens,
            request.needs_decode,
            avoided_workers=frozenset(each.address for each, view in views if view is not None and each.applies(view)),
            avoided_pairs=request.avoided_pairs,
            in_place_only=request.in_place_only,
            too_small_workers=frozenset(reservations.too_small),
            prefill_match=prefixes.match_prefill(request.digests),
            decode_match=prefixes.match_decode(request.digests),
        )

    def _rank(
        self,
        request: PlacementRequest,
        reservations: Reservations,
        *,
        limit: float = math.inf,
        only: str | None = None,
        may_exceed: bool = False,
        most: int = 1,
    ) -> list[WorkerPair]:
        """The best pairs for a request now, as `rank_pairs` has them."""
        return rank_pairs(
            self._pool.fleet,
            self._criteria(request, reservations),
            prefill_limit=limit,
            open_breakers=self._breakers.open_breakers(),
            only=only,
            may_exceed=may_exceed,
            most=most,
        )

    def _assign(self, request: PlacementRequest, pair: WorkerPair, *, from_queue: bool = False) -> PrefillAssignment:
        """An assignment at the prefill worker of the pair; one `from_queue` counts for its tenant."""
        match = self._pool.prefixes.match_prefill(request.digests)
        cached = min(match.tokens(pair.prefill), request.context_tokens)
        assignment = self._pool.prefill_link(pair.prefill).assign(request.context_tokens, cached)
        if from_queue:
            self._tenants[assignment] = request.tenant
            self.queue.begin_prefill(request.tenant)
        return assignment

    def _free_place(self, waiter: Waiter) -> None:
        if (place := self._places.pop(waiter, None)) is not None:
            self._free(place)

    def _free(self, assignment: PrefillAssignment) -> bool:
        if not assignment.release():
            return False
        if (tenant := self._tenants.pop(assignment, None)) is not None:
            self.queue.end_prefill(tenant)
        return True

    def _on_update(self) -> None:
        """Handle a change of workers, or the end of a placement."""
        self._breakers.retain(self._pool.fleet)
        workers, pairs = self._breakers.count_open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        for reservations in self._watching:
            reservations.on_update()
        self._register_waiters()

    def _fail_overdue(self) -> None:
        """Fail waiters that have waited `worker_wait_s` seconds while no workers can serve them."""
        fleet, now, wait_s = self._pool.fleet, self._loop.time(), self._config.worker_wait_s
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
            self._overdue_timer = None
        if not len(self.queue) or can_serve(fleet, needs_decode=True):
            self._no_workers_since = math.inf
            return
        self._no_workers_since, next_at = min(self._no_workers_since, now), math.inf
        for waiter in self.queue:
            until = max(self._no_workers_since, waiter.queued_at) + wait_s
            if until > now:
                next_at = min(next_at, until)
            elif not can_serve(fleet, needs_decode=waiter.request.needs_decode):
                self._reservations[waiter].fail(Unavailable(self._pool.describe_missing(wait_s)))
        if math.isfinite(next_at):
            self._overdue_timer = self._loop.call_at(next_at, self._fail_overdue)


class Reservations:
    """The reservations of one attempt at decode workers, by address; the first one that is granted is used.

    A worker is asked once. It answers `granted` or a refusal, at once or after the answer `waiting`. A worker without
    an answer after `timeout_s` seconds counts as one that refuses. The end of the block cancels all reservations but
    one that was taken.
    """

    def __init__(self, pool: WorkerPool, request: PlacementRequest, deliver: Deliver, timeout_s: float) -> None:
        self._pool = pool
        self._request = request
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._incarnations: dict[str, str] = {}
        self._error: Exception | None = None
        self.changed = asyncio.Event()
        """Set at each answer, and at a change of workers if there may be one more to ask."""
        self.wakes_always = False
        """Whether it is set at each change of workers."""
        self._looked_at = 0.0
        self.calls: dict[str, DecodeCall] = {}
        """Calls that have no answer yet, wait for pages, or have them."""
        self.waiting: set[str] = set()
        self.granted: dict[str, ReserveResult] = {}
        """Answers with pages that are not in use yet."""
        self.too_small: dict[str, str] = {}
        """The reason of each worker that can never hold the request."""
        self.left_out: set[str] = set()
        """Workers that have refused for another reason, or have not answered."""

    def __enter__(self) -> Reservations:
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_only("")

    @property
    def known(self) -> set[str]:
        """Addresses of workers that are not asked again."""
        return {*self.calls, *self.left_out, *self.too_small}

    @property
    def unanswered(self) -> bool:
        """Whether a worker has not answered yet, though it must answer at once."""
        return bool(self._timers)

    async def wait_for_change(self) -> None:
        """Wait for an answer or a change of workers. Raises the error of `fail`."""
        await self.changed.wait()
        self.changed.clear()
        if self._error is not None:
            raise self._error

    def fail(self, error: Exception) -> None:
        """Let `wait_for_change` raise an error."""
        self._error = error
        self.changed.set()

    def ask(self, address: str) -> None:
        """Ask a worker for pages, if it has a session."""
        request, link = self._request, self._pool.decode_link(address)
        if link is None or link.session is None or not link.session.open:
            return
        view = self._pool.fleet.decode[address]
        if view.has_room(request.context_tokens):
            # The worker will grant it, and no status tells so until then.
            link.subtract_free(request.context_tokens, len(request.choices))
        call = link.session.begin_call(request.request_id, request.attempt_number, self._deliver)
        self.calls[address] = call
        self._incarnations[address] = view.incarnation
        self._timers[address] = self._loop.call_later(self._timeout_s, self._on_silence, address)
        left = request.deadline - self._loop.time()
        call.reserve(
            partial(self._on_answer, address),
            context_tokens=request.context_tokens,
            max_new_tokens=request.max_new_tokens,
            choices=request.choices,
            deadline_ms=0 if math.isinf(left) else max(math.ceil(1e3 * left), 1),
            salt=request.salt,
            cache=request.cache,
            prefix_digests=self._pool.prefixes.digests_to_pin(address, link.namespace, request.digests),
        )

    def ask_only(self, address: str) -> None:
        """Cancel all reservations but the one at `address`, and ask there unless it was asked before."""
        for other in [each for each in self.calls if each != address]:
            self._end(other)
        if address and address not in self.known:
            self.ask(address)

    def take(self, address: str) -> tuple[DecodeCall, ReserveResult]:
        """The call and the answer of a worker that has granted pages; the caller must close the call."""
        call, answer = self.calls.pop(address), self.granted.pop(address)
        call.keep()
        return call, answer

    def leave_out(self, address: str) -> None:
        """End the reservation at a worker, and don't ask it again for now."""
        self._end(address)
        self.left_out.add(address)

    def on_update(self) -> None:
        """Handle a change of workers: another worker may have come to an address."""
        fleet = self._pool.fleet.decode
        for address in [*self.too_small, *self.left_out]:
            view = fleet.get(address)
            # Where all have refused, they are asked again at the next status.
            if view is None or view.incarnation != self._incarnations[address] or not self.calls:
                self.left_out.discard(address)
            if view is None or view.incarnation != self._incarnations[address]:
                self.too_small.pop(address, None)
        now = self._loop.time()
        if len(self.calls) < ASKED_AT_MOST:
            may_ask = not fleet.keys() <= self.known
        else:
            # One look at a large fleet costs a part of a millisecond, and its workers report all the time.
            may_ask = now - self._looked_at >= _LOOK_S
        if may_ask or self.wakes_always:
            self._looked_at = now
            self.changed.set()

    def _on_answer(self, address: str, answer: ReserveResult) -> None:
        if (timer := self._timers.pop(address, None)) is not None:
            timer.cancel()
        self.waiting.discard(address)
        self.granted.pop(address, None)
        if answer.granted:
            self.granted[address] = answer
        elif answer.waiting:
            self.waiting.add(address)
        elif answer.too_small:
            self._end(address)
            link = self._pool.decode_link(address)
            self.too_small[address] = f"decode worker {link.name if link else address}: {answer.reason}"
        else:
            self.leave_out(address)
        self.changed.set()

    def _on_silence(self, address: str) -> None:
        name = f"{self._request.request_id}/{self._request.attempt_number}"
        words = "reservation %s: decode worker at %s has not answered in %g s"
        _logger.warning(words, name, address, self._timeout_s, extra=about(name))
        self._on_answer(address, ReserveResult(False, "no answer", False))

    def _end(self, address: str) -> None:
        """End the reservation at a worker."""
        if (timer := self._timers.pop(address, None)) is not None:
            timer.cancel()
        self.waiting.discard(address)
        self.granted.pop(address, None)
        self.calls.pop(address).close()
