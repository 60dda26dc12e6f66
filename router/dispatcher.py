"""The life of a placement: a prefill worker for an attempt, and pages at a decode worker.

1. `place` puts the request into the queue (`placement/queue.py`), which has the order of tenants and limits.
2. `_register` is called in the order of the queue, while prefill workers have room. It asks the decode worker of the
   best pair (`placement/policy.py`) for pages. A place at the prefill worker is kept until the answer.
3. If that decode worker has no room, the reservation waits there, and `_ask_next` asks others too: ASKED_AT_MOST at
   most, and as many each second.
4. The first worker that grants pages wins. `_place_granted` selects the prefill worker anew, by what is known then.
   The other reservations are cancelled, and the next request is registered.

A worker answers again when it has room, so a status of a worker wakes nobody. Once a second, and when decode workers
join, requests that wait ask workers which they have not asked, and those that refused. All of this runs in `_work`, in
slices of time, because a large fleet and a long queue take longer than a stream may be held up.

Requests also wait while a role has no workers, and retries while no worker is large enough, for at most
`worker_wait_s` seconds; then they fail with Unavailable. A request that is suspected of killing workers waits outside
the queue for workers of its own (`isolation.py`), and looks for them once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from baton.config.router import RouterConfig
from baton.errors import InvalidRequest, Unavailable
from baton.lifecycle import State
from baton.request import ReserveResult
from baton.telemetry.logs import about
from baton.telemetry.metrics import BREAKERS_OPEN, PLACEMENTS
from baton.worker.status import WorkerIdentity
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
class Placement:
    """The workers of an attempt; `decode` is None if the attempt needs no decode worker.

    `consumer` is the decode worker's name in KV tickets. `breakers` count faults and successes of the
    workers. The decode worker has pinned the KV of the first `pinned_tokens` tokens. `peer` is the decode worker if
    prefill can fetch that KV from it, else None.
    """

    prefill: PrefillAssignment
    breakers: AttemptBreakers
    decode: DecodeCall | None = None
    decode_address: str = ""
    decode_incarnation: str = ""
    consumer: str = ""
    pinned_tokens: int = 0
    peer: WorkerIdentity | None = None
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
        self.queue: PlacementQueue[Reservations] = PlacementQueue(
            capacity=config.queue_capacity, prefill_limit=config.prefill_limit, max_wait_s=config.queue_wait_s
        )
        self._waiting: dict[Reservations, None] = {}
        """Reservations of attempts without a placement, in the queue or not."""
        self._changed: OrderedDict[Reservations, None] = OrderedDict()
        """Reservations with news that `_work` has not handled yet."""
        self._tenants: dict[PrefillAssignment, str] = {}
        self._members: tuple[object, object] | None = None
        """The groups of workers, and those that are isolated, at the latest change of them."""
        self._usable: frozenset[str] = frozenset()
        """Addresses of the decode workers that take new requests."""
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._breakers = Breakers(self._loop.time)
        self._isolation = Isolation(pool, wait_s=config.isolation_wait_s)
        pool.subscribe(self._on_update)
        self._on_update()

    def check_admission(self, tenant: str, *, needs_decode: bool) -> None:
        """Raise Overloaded if the queue is full for the tenant.

        Raises Unavailable if no worker can serve the request and `worker_wait_s` is 0.
        """
        if not self._config.worker_wait_s and not can_serve(self._pool.fleet, needs_decode=needs_decode):
            raise Unavailable(self._pool.describe_missing())
        self.queue.check_capacity(tenant)

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
        reservations = Reservations(request, self._pool, deliver, suspicion, self._on_change)
        try:
            self._waiting[reservations] = None
            if self._timer is None:
                self._timer = self._loop.call_later(_TICK_S, self._tick)
            try:
                if suspicion():
                    self._isolation.enter(request.request_id)
                    reservations.isolating = True
                    self._on_change(reservations)
                else:
                    self._join_queue(reservations)
                placement = await reservations.placed
            finally:
                self._leave(reservations)
            PLACEMENTS.labels(
                "in_place" if placement.in_place else "transfer" if placement.decode is not None else "prefill_only"
            ).inc()
            yield placement
        finally:
            # Even if the task was cancelled before it saw its placement.
            if (held := reservations.placement) is not None:
                held.breakers.end()
                self.release(held.prefill)
                if held.decode is not None:
                    held.decode.close()
                if held.isolation is not None:
                    held.isolation.release()
                self._on_update()

    def release(self, assignment: PrefillAssignment) -> None:
        """Release the assignment, since the prompt is computed; idempotent."""
        self._free(assignment)
        self._schedule()

    def _join_queue(self, reservations: Reservations) -> None:
        self.queue.push(reservations, self._pool.fleet, self._loop.time())
        self._schedule()

    def _leave(self, reservations: Reservations) -> None:
        """Forget an attempt that has a placement or gives up, and all that it has besides the placement."""
        del self._waiting[reservations]
        self._changed.pop(reservations, None)
        self.queue.remove(reservations)
        self._free_place(reservations)
        reservations.ask_only("")
        if reservations.isolating:
            self._isolation.leave(reservations.request.request_id)
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
        until, passed = self._loop.time() + _SLICE_S, set[Reservations]()
        while True:
            if self._changed:
                (reservations, _), handle = self._changed.popitem(last=False), self._handle
            elif (found := self.queue.next_to_register(self._pool.fleet, self._loop.time(), passed)) is not None:
                reservations, handle = found, self._register
                # If it finds no prefill worker, waiters behind it may still find one that it can't use.
                passed.add(found)
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
        request, fleet = reservations.request, self._pool.fleet
        limit = self.queue.prefill_limit(request.tenant, fleet)
        has_capacity = any(view.open_requests < limit for view in fleet.usable_prefills)
        pair = self._best(reservations, limit) if has_capacity else None
        if pair is None:
            return
        self.queue.registered.add(reservations)
        assignment = self._assign(reservations, pair)
        if not request.needs_decode:
            self._placed(reservations, assignment)
            return
        request.lifecycle.enter(State.RESERVING, self._loop.time())
        reservations.waits = not fleet.decode[pair.decode].has_room(request.context_tokens)
        reservations.ask(pair.decode)

    def _handle(self, reservations: Reservations) -> None:
        """Handle an answer or another change: place the attempt, or ask more workers. Raises InvalidRequest."""
        if reservations.isolating:
            self._isolate(reservations)
        elif reservations in self.queue.registered and not self._place_granted(reservations):
            if self._is_too_large(reservations) and not reservations.request.is_retry:
                raise InvalidRequest("max_tokens", reservations.describe_too_large())
            self._ask_next(reservations)

    def _ask_next(self, reservations: Reservations) -> None:
        """Ask more decode workers, if all that were asked have answered that the reservation must wait there.

        The best one is asked first, then others, and at last those that failed the request before. Workers with open
        breakers are asked only if no other one is there.
        """
        known, asked = reservations.known, reservations.asked
        most = reservations.asks_left if asked else min(reservations.asks_left, 1)
        if most and not reservations.unanswered and not self._usable <= known:
            open_workers = (key for key in self._breakers.open_breakers() if len(key) == 1)
            criteria = self._criteria(reservations, known.union(*open_workers) if asked else known)
            for pair in rank_pairs(self._pool.fleet, criteria, prefill_limit=math.inf, most=most):
                reservations.ask(pair.decode)
        if reservations.waiting or not reservations.unanswered:
            # The prompt may be computed long after others, which can use the place until then.
            self._free_place(reservations)
        reservations.waits = reservations.waiting or (bool(asked) and reservations.waits)

    def _place_granted(self, reservations: Reservations) -> bool:
        """Place the attempt if a decode worker has granted pages. The prefill worker is selected anew.

        If all prefill workers are full, the best one gets more than the limit: pages must not be idle.
        """
        request = reservations.request
        for address in reservations.granted:
            self._free_place(reservations)
            limit = self.queue.prefill_limit(request.tenant, self._pool.fleet)
            pair = self._best(reservations, limit, only=address) or self._best(reservations, math.inf, only=address)
            if pair is not None:
                self._placed(reservations, self._assign(reservations, pair), address)
                return True
            # It drains, or another request has it for itself.
            reservations.leave_out(address, ReserveResult(False, "it takes no requests"))
        return False

    def _is_too_large(self, reservations: Reservations) -> bool:
        """Whether the request is too large for every decode worker that is there, and there is one."""
        too_small = reservations.too_small
        present = compatible_decode_addresses(self._pool.fleet) if too_small else frozenset()
        return bool(present) and too_small >= present

    def _isolate(self, reservations: Reservations) -> None:
        """Place an attempt on workers of its own, or let it join the queue if it may run among others."""
        request, suspected, waits, pair = reservations.request, reservations.suspicion(), False, None
        if suspected:
            criteria = self._criteria(reservations, reservations.too_small)
            # One that is granted waits no longer, even if the time to wait is over.
            waits_at = reservations.asked.keys() - reservations.granted
            waits, pair = self._isolation.select(request.request_id, criteria, suspected, waits_at, self._loop.time())
        if not waits:
            reservations.isolating = False
            reservations.ask_only("")
            self._isolation.leave(request.request_id)
            self._join_queue(reservations)
        else:
            # Without a pair, a reservation of its own could keep a worker from being empty.
            reservations.ask_only(pair.decode if pair is not None else "")
            if pair is not None and (not pair.decode or pair.decode in reservations.granted):
                assignment = self._assign(reservations, pair)
                grant = self._isolation.grant(request.request_id, pair, suspected)
                self._placed(reservations, assignment, pair.decode, grant)

    def _placed(
        self,
        reservations: Reservations,
        assignment: PrefillAssignment,
        address: str = "",
        isolation: IsolationGrant | None = None,
    ) -> None:
        """Place an attempt on workers that have given it all that it needs."""
        prefill, request = assignment.link, reservations.request
        reservations.isolating = False
        if reservations in self.queue.registered:
            self.queue.pop(reservations, self._loop.time())
        # The prompt goes there at once, so the worker will soon hold its blocks.
        self._pool.prefixes.expect(
            prefill.address, prefill.namespace, request.digests, assignment.cached_tokens, writes=request.cache.writes
        )
        breakers = self._breakers.begin_attempt(prefill.address, address or None)
        placement = Placement(assignment, breakers, isolation=isolation)
        if address:
            ask, link = reservations.asked.pop(address), self._pool.decode_link(address)
            ask.call.keep()
            placement = replace(
                placement,
                decode=ask.call,
                decode_address=address,
                decode_incarnation=ask.incarnation,
                consumer=link.consumer if link is not None else "",
                pinned_tokens=ask.answer.cached_tokens,
                peer=self._peer(assignment, link),
                in_place=address == prefill.address,
            )
        reservations.place, reservations.placement = None, placement
        if not reservations.placed.done():
            reservations.placed.set_result(placement)

    def _peer(self, assignment: PrefillAssignment, decode: WorkerLink | None) -> WorkerIdentity | None:
        """The decode worker as a source of KV for another worker.

        None if its block namespace differs, or if it refuses our KV tickets.
        """
        prefill = assignment.link
        if decode is None or decode is prefill or decode.namespace != prefill.namespace or decode.status is None:
            return None
        identity = decode.status.identity
        return identity if self._pool.signs_for(identity) else None

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
        criteria = self._criteria(reservations, excluded)
        return next(iter(rank_pairs(self._pool.fleet, criteria, prefill_limit=limit, only=only)), None)

    def _assign(self, reservations: Reservations, pair: WorkerPair) -> PrefillAssignment:
        """Give the attempt a place at the prefill worker of the pair, which counts for the tenant."""
        request = reservations.request
        match = self._pool.prefixes.match_prefill(request.digests)
        cached = min(match.tokens(pair.prefill), request.context_tokens)
        assignment = self._pool.prefill_link(pair.prefill).assign(request.context_tokens, cached)
        reservations.place = assignment
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
        """Handle news of workers, or the end of a placement."""
        fleet = self._pool.fleet
        self._breakers.retain(fleet)
        workers, pairs = self._breakers.count_open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        if (members := (fleet.compatible_groups, fleet.isolated)) == self._members:
            # Their load alone lets no waiter ask.
            return
        self._members = members
        before, self._usable = self._usable, compatible_decode_addresses(fleet) - fleet.isolated
        if self._usable - before:
            # New requests must not overtake requests that have waited for a worker.
            self._look_again(isolating=False)
        self._schedule()

    def _look_again(self, *, isolating: bool) -> None:
        """Let all that have asked workers ask more, and those that have refused again.

        Requests that are isolated only look once a second, because they change the workers of others.
        """
        for reservations in self._waiting:
            if isolating or not reservations.isolating:
                reservations.forget_refusals()
                self._on_change(reservations)

    def _tick(self) -> None:
        """Let all that wait go on, and fail those that no worker could serve for `worker_wait_s` seconds."""
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self._waiting else None
        fleet, now, wait_s = self._pool.fleet, self._loop.time(), self._config.worker_wait_s
        served = {needs_decode: can_serve(fleet, needs_decode=needs_decode) for needs_decode in (False, True)}
        problem = "" if all(served.values()) else self._pool.describe_missing(wait_s)
        self._look_again(isolating=True)
        for reservations in self._waiting:
            reservations.end_silent(now - self._config.reserve_timeout_s)
            too_large = self._is_too_large(reservations)
            if served[reservations.request.needs_decode] and not too_large:
                reservations.unserved_since = math.inf
                continue
            reservations.unserved_since = min(reservations.unserved_since, now)
            if now - reservations.unserved_since >= wait_s:
                why = f"no decode worker is left that could hold the request, after a wait of {wait_s:g} s: "
                reservations.fail(Unavailable(why + reservations.describe_too_large() if too_large else problem))


_NO_ANSWER = ReserveResult(False, "no answer")


@dataclass(slots=True)
class _Ask:
    """A reservation at an incarnation of a decode worker, asked for at `at` seconds, and the latest answer."""

    call: DecodeCall
    worker: str
    """The worker's name in logs and errors."""
    incarnation: str
    at: float
    answer: ReserveResult = _NO_ANSWER


class Reservations(Waiter):
    """A waiter and its reservations so far: a place at a prefill worker, and pages at decode workers, by address.

    A decode worker answers `granted` or a refusal, at once or after the answer `waiting`. `on_change` is called at each
    answer.
    """

    def __init__(
        self,
        request: PlacementRequest,
        pool: WorkerPool,
        deliver: Deliver,
        suspicion: Callable[[], Suspicion],
        on_change: Callable[[Reservations], None],
    ) -> None:
        super().__init__(request)
        self._pool = pool
        self._deliver = deliver
        self.suspicion = suspicion
        self._on_change = on_change
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[Placement] = self._loop.create_future()
        """Future that gets the placement, or an error."""
        self.placement: Placement | None = None
        """The placement, also if `placed` was cancelled before."""
        self.isolating = False
        """Whether it waits for workers of its own, outside the queue."""
        self.unserved_since = math.inf
        """Time since which no worker could serve it; infinite if one can."""
        self.place: PrefillAssignment | None = None
        """A place that is not a part of a placement: it is kept until decode workers have answered."""
        self.asked: dict[str, _Ask] = {}
        """Reservations that have no answer yet, wait for pages, or have them."""
        self.refused: dict[str, _Ask] = {}
        """Reservations that were refused, or have got no answer in time."""
        self.asks_left = ASKED_AT_MOST
        """Number of workers that may be asked before the next call of `forget_refusals`."""

    @property
    def known(self) -> set[str]:
        """Addresses of workers that are not asked for now."""
        return {*self.asked, *self.refused}

    @property
    def too_small(self) -> set[str]:
        """Addresses of workers that can never hold the request."""
        return {address for address, ask in self.refused.items() if ask.answer.too_small}

    @property
    def unanswered(self) -> bool:
        """Whether a worker has not answered yet, though it must answer at once."""
        return any(each.answer is _NO_ANSWER for each in self.asked.values())

    @property
    def waiting(self) -> bool:
        """Whether a reservation waits at a worker."""
        return any(each.answer.waiting for each in self.asked.values())

    @property
    def granted(self) -> list[str]:
        """Addresses of workers with pages that are not in use yet."""
        return [address for address, each in self.asked.items() if each.answer.granted]

    def describe_too_large(self) -> str:
        """An error text for clients if no decode worker can hold the request."""
        request, asks = self.request, self.refused.values()
        reasons = [f"decode worker {ask.worker}: {ask.answer.reason}" for ask in asks if ask.answer.too_small]
        return (
            f"{request.context_tokens} tokens of context and {request.max_new_tokens} of output need more than any "
            f"decode worker can hold (--kv-memory, --max-model-len): {'; '.join(reasons)}"
        )

    def fail(self, error: Exception) -> None:
        """End the wait for `placed` with an error."""
        if not self.placed.done():
            self.placed.set_exception(error)
            # Without this, asyncio warns if the task is cancelled before it sees the error.
            self.placed.exception()

    def ask(self, address: str) -> None:
        """Ask a worker for pages, if it has a session."""
        request, link = self.request, self._pool.decode_link(address)
        if link is None or link.session is None or not link.session.open:
            return
        view = self._pool.fleet.decode[address]
        if view.has_room(request.context_tokens):
            # The worker will grant it, and no status tells so until then.
            link.subtract_free(request.context_tokens, len(request.choices))
        number, now = next(self._numbers), self._loop.time()
        call = link.session.begin_call(request.request_id, request.attempt_number, number, self._deliver)
        self.asked[address] = _Ask(call, link.name, view.incarnation, now)
        self.asks_left -= 1
        left = request.deadline - now
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
        for other in [each for each in self.asked if each != address]:
            self.asked.pop(other).call.close()
        if address and address not in self.known:
            self.ask(address)

    def leave_out(self, address: str, answer: ReserveResult) -> None:
        """End the reservation at a worker, and don't ask it again for now."""
        ask = self.refused[address] = self.asked.pop(address)
        ask.call.close()
        ask.answer = answer

    def end_silent(self, asked_by: float) -> None:
        """Leave out workers that were asked at or before `asked_by` and have not answered."""
        for address, ask in list(self.asked.items()):
            if ask.answer is not _NO_ANSWER or ask.at > asked_by:
                continue
            name = f"{self.request.request_id}/{self.request.attempt_number}"
            words = "reservation %s: decode worker %s has not answered in time"
            _logger.warning(words, name, ask.worker, extra=about(name))
            self._on_answer(address, _NO_ANSWER)

    def forget_refusals(self) -> None:
        """Allow more questions, also to workers that have refused, except those that are still too small."""
        self.asks_left, fleet = ASKED_AT_MOST, self._pool.fleet.decode
        self.refused = {
            address: ask
            for address, ask in self.refused.items()
            if ask.answer.too_small and address in fleet and fleet[address].incarnation == ask.incarnation
        }

    def _on_answer(self, address: str, answer: ReserveResult) -> None:
        if answer.granted or answer.waiting:
            self.asked[address].answer = answer
        else:
            self.leave_out(address, answer)
        self._on_change(self)
