"""The life of a placement: a prefill worker for an attempt, and pages at a decode worker.

1. `place` puts the request into the queue (`placement/queue.py`), which has the order of tenants and limits.
2. `_register` is called in the order of the queue, while prefill workers have room. It asks the decode worker of the
   best pair (`placement/policy.py`) for pages. A place at the prefill worker is kept until the answer.
3. If that decode worker has no room, the reservation waits there, and `_ask_next` asks others too: ASKED_AT_MOST at
   most, and as many each second.
4. The first worker that grants pages wins. `_find_placement` selects the prefill worker anew, by what is known then.
   The other reservations are cancelled, and the next request is registered.

A worker answers again when it has room, so a status of a worker wakes nobody. Once a second, and when decode workers
join, requests that wait ask workers which they have not asked, and those that refused. All of this runs in `_work`, in
slices of time, because a large fleet and a long queue take longer than a stream may be held up.

Requests also wait in the queue while a role has no workers, each for at most `worker_wait_s` seconds; then it fails
with Unavailable. A request that is suspected of killing workers waits outside the queue for workers of its own
(`isolation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
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

_TICK_S = 1.0
"""Seconds between two times at which requests that wait ask more workers."""

_SLICE_S = 0.001
"""Seconds of work after which the event loop gets its turn."""

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
        self._waiting: dict[Reservations, Waiter | None] = {}
        """Those of attempts without a placement; None instead of a waiter if the attempt is not in the queue."""
        self._by_waiter: dict[Waiter, Reservations] = {}
        self._changed: dict[Reservations, None] = {}
        """Those with news that `_work` has not handled yet."""
        self._tenants: dict[PrefillAssignment, str] = {}
        """Tenant of each assignment at a prefill worker that came from the queue."""
        self._usable: frozenset[str] = frozenset()
        """Addresses of the decode workers that take new requests."""
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._no_workers_since = math.inf
        self._breakers = Breakers(self._loop.time)
        self._isolation = Isolation(pool, wait_s=config.isolation_wait_s, worker_wait_s=config.worker_wait_s)
        pool.subscribe(self._on_update)
        self._on_update()

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
        """Fail all requests that wait with Unavailable."""
        for reservations in self._waiting:
            reservations.fail(Unavailable("the router is stopping"))

    @contextlib.asynccontextmanager
    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion] = lambda: Suspicion.NONE
    ) -> AsyncIterator[Placement]:
        """Wait for a placement and hold it until the block ends, which releases the assignment and the pages.

        `deliver` gets the events of the attempt. While `suspicion` returns more than NONE, the request gets workers of
        its own. Raises Overloaded at once if the queue is full or the deadline can't be met, Unavailable if no worker
        that can serve the request came in time, and InvalidRequest if no decode worker can ever hold it.
        """
        reservations = Reservations(self._pool, request, deliver, self._config.reserve_timeout_s, self._on_change)
        try:
            self._waiting[reservations] = None
            self._start_timer()
            try:
                placement = await self._isolate(reservations, suspicion) if suspicion() else None
                placement = placement or await self._wait_in_queue(reservations)
            finally:
                del self._waiting[reservations]
                self._changed.pop(reservations, None)
                reservations.ask_only("")
            PLACEMENTS.labels(
                "in_place" if placement.in_place else "transfer" if placement.decode is not None else "prefill_only"
            ).inc()
            yield placement
        finally:
            # Even if the task was cancelled before it saw its placement.
            if (held := reservations.placement) is not None:
                held.breakers.end()
                self._free(held.prefill)
                if held.decode is not None:
                    held.decode.close()
                if held.isolation is not None:
                    held.isolation.release()
                self._on_update()

    def release(self, assignment: PrefillAssignment) -> None:
        """Release the assignment, since the prompt is computed; idempotent."""
        self._free(assignment)
        self._schedule()

    async def _wait_in_queue(self, reservations: Reservations) -> Placement:
        """Wait in the queue until `_work` has made a placement."""
        request = reservations.request
        if not request.is_retry:
            self._check_workers(needs_decode=request.needs_decode)
        waiter = Waiter(request, self._loop.time())
        self.queue.push(waiter, self._pool.fleet, self._loop.time())
        self._waiting[reservations], self._by_waiter[waiter] = waiter, reservations
        try:
            self._schedule()
            while reservations.placement is None:
                await reservations.wait_for_change()
                if reservations.placement is None and self._is_too_large(reservations):
                    await self._wait_for_larger_worker(waiter, reservations)
            return reservations.placement
        finally:
            self.queue.remove(waiter)
            del self._by_waiter[waiter]
            self._free_place(reservations)
            self._schedule()

    def _on_change(self, reservations: Reservations) -> None:
        self._changed[reservations] = None
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Handle all news of reservations, and register waiters in the order of the queue while there is room."""
        self._scheduled = False
        until, passed = self._loop.time() + _SLICE_S, set[Waiter]()
        while True:
            handle = self._handle
            if (reservations := next(iter(self._changed), None)) is not None:
                del self._changed[reservations]
            elif (waiter := self.queue.next_to_register(self._pool.fleet, self._loop.time(), passed)) is not None:
                reservations, handle = self._by_waiter[waiter], self._register
                # If it finds no prefill worker, waiters behind it may still find one that it can't use.
                passed.add(waiter)
            else:
                return
            try:
                handle(reservations)
            except Exception as error:
                # It must end this attempt, and not the work for all others.
                reservations.fail(error)
            if len(passed - self.queue.registered) > _MAX_PASSED:
                return
            if self._loop.time() > until:
                self._schedule()
                return

    def _register(self, reservations: Reservations) -> None:
        """Ask the decode worker of the best pair for pages, if a prefill worker has room."""
        request, waiter, fleet = reservations.request, self._waiting[reservations], self._pool.fleet
        limit = self.queue.prefill_limit(request.tenant, fleet)
        pair = self._best(reservations, limit) if fleet.has_capacity(limit) else None
        if pair is None or waiter is None:
            return
        self.queue.register(waiter)
        reservations.place = self._assign(request, pair, queued=True)
        if request.needs_decode:
            request.lifecycle.enter(State.RESERVING, self._loop.time())
            waiter.waits = not fleet.decode[pair.decode].has_room(request.context_tokens)
            reservations.ask(pair.decode)
        else:
            self._on_change(reservations)

    def _handle(self, reservations: Reservations) -> None:
        """Handle an answer to a registered waiter, or another change: place it, or ask more workers."""
        waiter = self._waiting[reservations]
        if waiter not in self.queue.registered or self._is_too_large(reservations):
            reservations.changed.set()
        elif (placement := self._find_placement(reservations)) is not None:
            self.queue.pop(waiter, self._loop.time())
            reservations.placement = placement
            reservations.changed.set()
        else:
            self._ask_next(waiter, reservations)

    def _ask_next(self, waiter: Waiter, reservations: Reservations) -> None:
        """Ask more decode workers, if all that were asked have answered that the reservation must wait there.

        The best one is asked first, then others, and at last those that failed the request before. Workers with open
        breakers are asked only if no other one is there.
        """
        request, known, calls = reservations.request, reservations.known, reservations.calls
        if reservations.waiting:
            # The prompt may be computed long after others, which can use the place until then.
            self._free_place(reservations)
        most = reservations.asks_left if calls else min(reservations.asks_left, 1)
        if most and not reservations.unanswered and self._usable - known:
            excluded = (
                known.union(*(key for key in self._breakers.open_breakers() if len(key) == 1)) if calls else known
            )
            criteria = self._criteria(reservations, excluded)
            for pair in rank_pairs(self._pool.fleet, criteria, prefill_limit=math.inf, most=most):
                reservations.ask(pair.decode)
        unused = reservations.left_out | {decode for _, decode in request.avoided_pairs} - calls.keys()
        waiter.restricted = not unused.isdisjoint(self._pool.fleet.decode)
        waiter.waits = bool(reservations.waiting) or (bool(calls) and waiter.waits)

    def _find_placement(self, reservations: Reservations) -> Placement | None:
        """The placement, if a decode worker has granted pages or none is needed. The prefill worker is selected anew.

        If all prefill workers are full, the best one gets more than the limit: pages must not be idle.
        """
        request = reservations.request
        if not request.needs_decode and (place := reservations.place) is not None:
            reservations.place = None
            return self._placed(reservations, place)
        for address in list(reservations.granted):
            self._free_place(reservations)
            limit = self.queue.prefill_limit(request.tenant, self._pool.fleet)
            pair = self._best(reservations, limit, only=address) or self._best(reservations, math.inf, only=address)
            if pair is not None:
                return self._placed(reservations, self._assign(request, pair, queued=True), address)
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
        self._free_place(reservations)
        self._schedule()
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
        self._schedule()

    async def _isolate(self, reservations: Reservations, suspicion: Callable[[], Suspicion]) -> Placement | None:
        """A placement on workers of its own; None if the request may run among others."""
        request = reservations.request
        self._isolation.enter(request.request_id)
        try:
            while suspected := suspicion():
                step = self._isolation.next_step(
                    request.request_id,
                    self._criteria(reservations, reservations.too_small.keys()),
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
                        grant = self._isolation.grant(request.request_id, step.pair, suspected)
                        return self._placed(reservations, assignment, step.pair.decode, grant)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(None if math.isinf(step.until) else step.until):
                        await reservations.wait_for_change()
            reservations.ask_only("")
            return None
        finally:
            if reservations.placement is None:
                self._isolation.leave(request.request_id)
            self._on_update()

    def _placed(
        self,
        reservations: Reservations,
        assignment: PrefillAssignment,
        address: str = "",
        isolation: IsolationGrant | None = None,
    ) -> Placement:
        """The placement on workers that have given the attempt all that it needs."""
        prefill, request = assignment.link.address, reservations.request
        # The prompt goes there at once, so the worker will soon hold its blocks.
        expect = self._pool.prefixes.expect
        expect(prefill, request.digests, assignment.cached_tokens, writes=request.cache.writes)
        breakers = self._breakers.begin_attempt(prefill, address or None)
        if not address:
            reservations.placement = Placement(assignment, breakers, isolation=isolation)
            return reservations.placement
        call, answer = reservations.take(address)
        in_place, link = address == prefill, self._pool.decode_link(address)
        status = link.status if link is not None else None
        reservations.placement = Placement(
            prefill=assignment,
            breakers=breakers,
            decode=call,
            decode_address=address,
            decode_incarnation=status.identity.incarnation if status else "",
            consumer=link.consumer if link is not None else "",
            pinned_tokens=answer.cached_tokens,
            peer=self._peer(assignment, link) if link is not None and answer.cached_tokens and not in_place else None,
            in_place=in_place,
            isolation=isolation,
        )
        return reservations.placement

    def _peer(self, assignment: PrefillAssignment, decode: WorkerLink) -> Peer | None:
        """The decode worker as a source of KV; None if its block namespace differs, or if it refuses our KV tickets."""
        status = decode.status
        if status is None or decode.namespace != assignment.link.namespace or not self._pool.signs_for(status.identity):
            return None
        return Peer(status.identity.shards_at(decode.address), status.identity.incarnation)

    def _criteria(self, reservations: Reservations, excluded: Iterable[str]) -> SelectionCriteria:
        """The needs of a request, for the fleet and the known prefixes as they are now."""
        request, fleet, prefixes = reservations.request, self._pool.fleet, self._pool.prefixes
        views = (
            (each, fleet.prefill.get(each.address) or fleet.decode.get(each.address))
            for each in request.avoided_workers
        )
        avoided = {(each.address,) for each, view in views if view is not None and each.applies(view)}
        return SelectionCriteria(
            request.context_tokens,
            request.needs_decode,
            blame=Counter([*avoided, *request.avoided_pairs, *self._breakers.open_breakers()]),
            in_place_only=request.in_place_only,
            excluded_decodes=frozenset(excluded),
            prefill_match=prefixes.match_prefill(request.digests),
            decode_match=prefixes.match_decode(request.digests),
        )

    def _best(self, reservations: Reservations, limit: float, *, only: str | None = None) -> WorkerPair | None:
        """The best pair for a request, or with the decode worker `only`; None if there is none."""
        excluded = reservations.known if only is None else ()
        pairs = rank_pairs(
            self._pool.fleet,
            self._criteria(reservations, excluded),
            prefill_limit=limit,
            only=only,
        )
        return pairs[0] if pairs else None

    def _assign(self, request: PlacementRequest, pair: WorkerPair, *, queued: bool = False) -> PrefillAssignment:
        """An assignment at the prefill worker of the pair, which counts for the tenant if it comes from the queue."""
        match = self._pool.prefixes.match_prefill(request.digests)
        cached = min(match.tokens(pair.prefill), request.context_tokens)
        assignment = self._pool.prefill_link(pair.prefill).assign(request.context_tokens, cached)
        if queued:
            self._tenants[assignment] = request.tenant
            self.queue.begin_prefill(request.tenant)
        return assignment

    def _free_place(self, reservations: Reservations) -> None:
        if (place := reservations.place) is not None:
            reservations.place = None
            self._free(place)

    def _free(self, assignment: PrefillAssignment) -> None:
        if assignment.release() and (tenant := self._tenants.pop(assignment, None)) is not None:
            self.queue.end_prefill(tenant)

    def _on_update(self) -> None:
        """Handle a change of workers, or the end of a placement."""
        fleet = self._pool.fleet
        self._breakers.retain(fleet)
        workers, pairs = self._breakers.count_open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        before, self._usable = self._usable, compatible_decode_addresses(fleet) - fleet.isolated
        if joined := self._usable - before:
            self._ask_more(joined)
        for reservations, waiter in self._waiting.items():
            if waiter is None and self._isolation.is_first(reservations.request.request_id):
                reservations.changed.set()
        self._schedule()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Let all that wait go on, and fail those for which there were no workers for `worker_wait_s` seconds."""
        self._timer = None
        if not self._waiting:
            self._no_workers_since = math.inf
            return
        self._start_timer()
        self._ask_more(self._usable)
        fleet, now, wait_s = self._pool.fleet, self._loop.time(), self._config.worker_wait_s
        if can_serve(fleet, needs_decode=True):
            self._no_workers_since = math.inf
            return
        self._no_workers_since = min(self._no_workers_since, now)
        for waiter, reservations in self._by_waiter.items():
            if max(self._no_workers_since, waiter.queued_at) + wait_s <= now and not can_serve(
                fleet, needs_decode=waiter.request.needs_decode
            ):
                reservations.fail(Unavailable(self._pool.describe_missing(wait_s)))

    def _ask_more(self, addresses: frozenset[str]) -> None:
        """Let all that wait, but not those that have not asked yet, ask the workers at `addresses` again."""
        for reservations, waiter in self._waiting.items():
            if waiter is None or waiter in self.queue.registered or reservations.too_small:
                reservations.forget_refusals(addresses)
                self._on_change(reservations)


class Reservations:
    """The reservations of one attempt so far: a place at a prefill worker, and pages at decode workers, by address.

    A decode worker answers `granted` or a refusal, at once or after the answer `waiting`. A worker without an answer
    after `timeout_s` seconds counts as one that refuses. `on_change` is called at each answer.
    """

    def __init__(
        self,
        pool: WorkerPool,
        request: PlacementRequest,
        deliver: Deliver,
        timeout_s: float,
        on_change: Callable[[Reservations], None],
    ) -> None:
        self.request = request
        self._pool = pool
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._incarnations: dict[str, str] = {}
        self._error: Exception | None = None
        self.changed = asyncio.Event()
        """Set when the task of the attempt must go on."""
        self.place: PrefillAssignment | None = None
        """The place that is kept until decode workers have answered."""
        self.placement: Placement | None = None
        """The workers of the attempt, once it has all that it needs."""
        self.calls: dict[str, DecodeCall] = {}
        """Calls that have no answer yet, wait for pages, or have them."""
        self.waiting: set[str] = set()
        self.granted: dict[str, ReserveResult] = {}
        """Answers with pages that are not in use yet."""
        self.too_small: dict[str, str] = {}
        """The reason of each worker that can never hold the request."""
        self.left_out: set[str] = set()
        """Workers that have refused for another reason, or have not answered."""
        self.asks_left = ASKED_AT_MOST
        """Number of workers that may be asked before the next call of `forget_refusals`."""

    @property
    def known(self) -> set[str]:
        """Addresses of workers that are not asked for now."""
        return {*self.calls, *self.left_out, *self.too_small}

    @property
    def unanswered(self) -> bool:
        """Whether a worker has not answered yet, though it must answer at once."""
        return bool(self._timers)

    async def wait_for_change(self) -> None:
        """Wait until `changed` is set. Raises the error of `fail`."""
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
        request, link = self.request, self._pool.decode_link(address)
        if link is None or link.session is None or not link.session.open:
            return
        view = self._pool.fleet.decode[address]
        if view.has_room(request.context_tokens):
            # The worker will grant it, and no status tells so until then.
            link.subtract_free(request.context_tokens, len(request.choices))
        number = next(self._numbers)
        call = link.session.begin_call(request.request_id, request.attempt_number, number, self._deliver)
        self.calls[address] = call
        self.asks_left -= 1
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
        """The call and the answer of a worker that has granted pages; the caller must close the call.

        All other reservations are cancelled.
        """
        self.ask_only(address)
        call, answer = self.calls.pop(address), self.granted.pop(address)
        call.keep()
        return call, answer

    def leave_out(self, address: str) -> None:
        """End the reservation at a worker, and don't ask it again for now."""
        self._end(address)
        self.left_out.add(address)

    def forget_refusals(self, addresses: frozenset[str]) -> None:
        """Allow more questions, also to workers at `addresses` that have refused.

        A worker that is too small is asked again only if it is another one now.
        """
        self.asks_left = ASKED_AT_MOST
        self.left_out -= addresses
        fleet = self._pool.fleet.decode
        for address in [*self.too_small]:
            view = fleet.get(address)
            if view is None or view.incarnation != self._incarnations[address]:
                del self.too_small[address]

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
        self._on_change(self)

    def _on_silence(self, address: str) -> None:
        name = f"{self.request.request_id}/{self.request.attempt_number}"
        words = "reservation %s: decode worker at %s has not answered in %g s"
        _logger.warning(words, name, address, self._timeout_s, extra=about(name))
        self._on_answer(address, ReserveResult(False, "no answer"))

    def _end(self, address: str) -> None:
        """End the reservation at a worker."""
        if (timer := self._timers.pop(address, None)) is not None:
            timer.cancel()
        self.waiting.discard(address)
        self.granted.pop(address, None)
        self.calls.pop(address).close()
