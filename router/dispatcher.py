"""From the queue to a placement: a prefill worker's ticket, and pages reserved on a decode worker.

    queue ── turn: some prefill worker has room ── reserve ── granted ── placement
      ▲                                               └─ refused by all: back to the head of the queue

Selections are late: a request gets its turn only when a prefill worker has room for it, and the selection is made from
what is known then. After a refusal by all, the one that was refused waits for news of a worker, or until the time is
over after which a worker said that another try makes sense, and then tries before all others. Those behind it wait as
well where the workers lack slots; where they lack the pages for a large context, those whose context finds room go on
in their turns. `placement/refusals.py` says who may ask.

When no worker of a role is there, requests wait in the queue too, each for `worker_wait_s`, and go on in order.

A request that must run alone waits beside the queue: see `isolation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from baton.config.router import RouterConfig
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.telemetry.metrics import BREAKERS_OPEN, LINE_LENGTH
from router.isolation import Isolation
from router.placement.policy import Selection, matching_decodes, select_workers, servable
from router.placement.queue import SHORTEST_RETRY_S, RequestQueue
from router.placement.refusals import Ask, RefusalGate, Try
from router.request import Deliver
from router.workers.failures import Breakers
from router.workers.pool import Pool
from router.workers.prefill import PrefillTicket
from router.workers.reservation import Placement, PlacementRequest, Refusal, Reserver

_PROBE_S = 1.0
"""After a refusal without a hint: news could get lost, and the queue must not stand for ever."""

_LOOK = 64
"""Of those who wait, the first of each tenant and so many more are looked at for one that would find room."""

_WITHOUT_ROOM = 8
"""So many that no prefill worker has room for are passed over in one go."""

_SHORTEST_PROBE_S, _LONGEST_PROBE_S = 0.05, 5.0


class _Hopeless(Exception):
    """Every decode worker that is there says that it can never hold the request."""


class _Waiter:
    def __init__(self, request: PlacementRequest) -> None:
        self.request = request
        self.refusal = Refusal()
        """The latest one."""
        self.since = asyncio.get_running_loop().time()
        self.try_ = Try()
        self.turn = self._new_turn()

    def ask(self, kept: frozenset[str] = frozenset()) -> Ask:
        """What it asks decode workers for."""
        request, never = self.request, self.refusal.never
        return Ask(request.context_tokens, len(request.choices), kept.union(never) if never else kept)

    def renew(self) -> None:
        """Wait for another turn."""
        self.turn = self._new_turn()

    def _new_turn(self) -> asyncio.Future[tuple[PrefillTicket, Selection]]:
        return asyncio.get_running_loop().create_future()


class Dispatcher:
    """Hands out placements; lives on the event loop and is woken by news alone."""

    def __init__(self, pool: Pool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._in_flight: Counter[str] = Counter()
        self._tenants: dict[PrefillTicket, str] = {}
        """Tenants by their tickets, and how many each has."""
        self._queue: RequestQueue[_Waiter] = RequestQueue(config.line_capacity, lambda name: self._in_flight[name])
        self._loop = asyncio.get_running_loop()
        self._breakers = Breakers(self._loop.time)
        self._changed = asyncio.Event()
        self._gate: RefusalGate[_Waiter] = RefusalGate()
        self._next_probe: asyncio.TimerHandle | None = None
        self._gone_since: float | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._reserver = Reserver(pool, self._breakers, config.reserve_timeout_s)
        self._isolation = Isolation(
            pool,
            self._reserver,
            self._breakers,
            wait_s=config.isolation_wait_s,
            worker_wait_s=config.worker_wait_s,
        )
        pool.subscribe(self._on_news)

    def check(self, tenant: str, *, decodes: bool) -> None:
        """Refuse now what a full queue would refuse, and, if nobody is to wait for a worker, an absent fleet.

        Raises Overloaded or Unavailable.
        """
        if not self._config.worker_wait_s and not servable(self._pool.fleet, decodes=decodes):
            raise Unavailable(self._pool.describe_missing())
        self._queue.check(tenant)

    def close(self) -> None:
        """Fail all that wait."""
        for waiter in self._queue:
            self._dismiss(waiter, Unavailable("the router stops"))
        self._watch_fleet()
        if self._next_probe is not None:
            self._next_probe.cancel()

    @contextlib.asynccontextmanager
    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspected: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Placement]:
        """Wait for a placement and hold it until the block ends; an unfinished decode attempt is then cancelled.

        A request that is `suspected` of killing workers gets a pair of its own, as long as it is. Raises Overloaded at
        once when the queue is full or the deadline can't be met, Unavailable when no worker came that can serve it, and
        InvalidRequest when it is larger than any decode worker's memory.
        """
        placement = await self._isolation.place(request, deliver, suspected) if suspected() else None
        if placement is None:
            placement = await self._wait(request, deliver)
        try:
            yield placement
        finally:
            placement.health.end()
            self.release(placement.prefill)
            if placement.decode is not None:
                placement.decode.close()
            if placement.isolation is not None:
                placement.isolation.release()
            self._on_news()

    def release(self, ticket: PrefillTicket) -> None:
        """The prefill worker is done with the request; idempotent."""
        if self._free(ticket):
            self._pump()

    def _free(self, ticket: PrefillTicket) -> bool:
        if not ticket.release():
            return False
        if (tenant := self._tenants.pop(ticket, None)) is not None:
            self._in_flight[tenant] -= 1
            if not self._in_flight[tenant]:
                del self._in_flight[tenant]
        return True

    async def _wait(self, request: PlacementRequest, deliver: Deliver) -> Placement:
        waiter = _Waiter(request)
        if request.again:
            self._queue.push_front(waiter, tenant=request.tenant, deadline=request.deadline)
        else:
            self._admit(request)
            self._queue.push(waiter, tenant=request.tenant, deadline=request.deadline, now=self._loop.time())
        self._pump()
        try:
            while True:
                try:
                    ticket, selection = await self._turn(waiter)
                except _Hopeless:
                    await self._wait_for_larger_worker(waiter)
                else:
                    if (placement := await self._reserve(waiter, ticket, selection, deliver)) is not None:
                        return placement
        finally:
            self._gate.forget(waiter)

    def _admit(self, request: PlacementRequest) -> None:
        """Refuse what the queue has no room for, or what can't be in time."""
        self.check(request.tenant, decodes=request.query.decodes)
        if not servable(self._pool.fleet, decodes=request.query.decodes):
            # The pace of the queue tells nothing of when a worker will come.
            return
        now = self._loop.time()
        left_s, wait_s = request.deadline - now, self._queue.expected_wait_s(request.tenant, now)
        if 0 < left_s < wait_s:
            problem = f"the deadline is in {left_s:.1f} s, the queue is expected to take {wait_s:.1f} s"
            raise Overloaded(problem, self._queue.retry_after())
        if 0 < self._config.line_wait_s < wait_s:
            problem = f"the queue is expected to take {wait_s:.1f} s, {self._config.line_wait_s:g} s are allowed"
            raise Overloaded(problem, max(wait_s - self._config.line_wait_s, SHORTEST_RETRY_S))

    async def _turn(self, waiter: _Waiter) -> tuple[PrefillTicket, Selection]:
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._end_turn(waiter, waiter.turn.result()[0])
            raise
        finally:
            if self._queue.remove(waiter):
                self._pump()

    async def _reserve(
        self, waiter: _Waiter, ticket: PrefillTicket, selection: Selection, deliver: Deliver
    ) -> Placement | None:
        """Use a turn; None when the waiter is back in the queue."""
        request, answer = waiter.request, None
        try:
            answer = await self._reserver.reserve(request, ticket, selection, deliver, waiter.refusal.never)
            if isinstance(answer, Placement):
                self._queue.record_departure(self._loop.time())
                if request.query.decodes:
                    self._gate.record_grant(waiter.try_, waiter.ask())
                    self._queue.hint_s = 0.0
                return answer
            waiter.refusal = answer
            self._put_back(waiter)
            return None
        finally:
            self._end_turn(waiter, None if isinstance(answer, Placement) else ticket)

    def _put_back(self, waiter: _Waiter) -> None:
        """Return a refused request to the queue, and note what its refusal says to others."""
        refusal, request, now = waiter.refusal, waiter.request, self._loop.time()
        ask = Ask(request.context_tokens, len(request.choices), refusal.closed)
        # Others may have more workers to ask than one that is narrowed, or no further choices.
        self._push_again(waiter, first=not (refusal.lacks_forks or refusal.closed))
        if refusal.lacks_forks:
            self._gate.record_fork_refusal(waiter.try_, waiter)
        elif refusal.closed:
            self._gate.record_narrow_refusal(waiter.try_, waiter, ask, refusal.room_tokens, now)
        else:
            self._gate.record_refusal(waiter.try_, waiter, ask, refusal.room_tokens)
            self._queue.hint_s = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else 0.0
        if self._next_probe is None:
            hint = refusal.retry_after_s if math.isfinite(refusal.retry_after_s) else _PROBE_S
            delay = min(max(hint, _SHORTEST_PROBE_S), _LONGEST_PROBE_S)
            self._next_probe = self._loop.call_later(delay, self._probe)

    def _push_again(self, waiter: _Waiter, *, first: bool) -> None:
        request = waiter.request
        waiter.renew()
        push = self._queue.push_first if first else self._queue.push_front
        push(waiter, tenant=request.tenant, deadline=request.deadline)
        if waiter is self._queue.first:
            self._gate.record_first(waiter, self._loop.time())

    def _end_turn(self, waiter: _Waiter, unused: PrefillTicket | None) -> None:
        """A turn is over, whatever came of it."""
        self._gate.end(waiter)
        if unused is not None:
            self._free(unused)
        self._pump()

    async def _wait_for_larger_worker(self, waiter: _Waiter) -> None:
        """Wait for a decode worker that may hold what those that are there never can, and return to the queue.

        Only what was accepted before waits: it ran on such a worker. Raises InvalidRequest, or Unavailable after
        `worker_wait_s`.
        """
        request, said = waiter.request, "; ".join(waiter.refusal.never.values())
        problem = (
            f"{request.context_tokens} tokens of context and {request.max_new_tokens} of output need more KV memory "
            f"than any decode worker has (--kv-memory): {said}"
        )
        if not request.again:
            raise InvalidRequest("max_tokens", problem)
        try:
            async with asyncio.timeout(self._config.worker_wait_s):
                while self._is_hopeless(waiter):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            waited = f"after a wait of {self._config.worker_wait_s:g} s"
            message = f"no decode worker is there any more that could hold the request, {waited}: {problem}"
            raise Unavailable(message) from None
        self._push_again(waiter, first=True)
        self._pump()

    def _is_hopeless(self, waiter: _Waiter) -> bool:
        if not waiter.refusal.never:
            return False
        matching = matching_decodes(self._pool.fleet)
        # What comes back under a name may be larger than what left.
        never = {name: reason for name, reason in waiter.refusal.never.items() if name in matching}
        waiter.refusal = replace(waiter.refusal, never=never)
        return bool(never) and never.keys() >= matching

    def _on_news(self) -> None:
        self._gate.record_news()
        self._isolation.wake(news=True)
        self._breakers.retain(self._pool.fleet)
        workers, pairs = self._breakers.count_open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        self._pump()

    def _probe(self) -> None:
        """Have those that were refused try again though there is no news."""
        self._next_probe = None
        self._on_news()

    def _pump(self) -> None:
        """Give turns, in the order of the queue, as long as prefill workers have room."""
        self._changed.set()
        self._isolation.wake(news=False)
        without_room: set[_Waiter] = set()
        while self._give_turn(without_room):
            pass
        LINE_LENGTH.set(len(self._queue))
        self._watch_fleet()

    def _give_turn(self, without_room: set[_Waiter]) -> bool:
        """Give the next one its turn; False when nobody can use one. Those that find no room are noted.

        One pass over the queue, whose work is linear in the number of tenants that wait.
        """
        tenants = len(self._in_flight.keys() | self._queue.tenants)
        for waiter in self._candidates(tenants + _LOOK):
            if waiter in without_room:
                continue
            if waiter.turn.done():
                # It was cancelled, and its task has yet to wake up and leave the queue.
                self._queue.remove(waiter)
                return True
            if self._is_hopeless(waiter):
                self._dismiss(waiter, _Hopeless())
                return True
            if (found := self._select(waiter, tenants)) is not None:
                ticket, _ = found
                self._queue.pop(waiter)
                self._tenants[ticket] = waiter.request.tenant
                self._in_flight[waiter.request.tenant] += 1
                if waiter.request.query.decodes:
                    waiter.try_ = self._gate.begin(waiter)
                waiter.turn.set_result(found)
                return True
            # Others may go on: there is no prefill worker that it could use.
            without_room.add(waiter)
            if len(without_room) > _WITHOUT_ROOM:
                return False
        return False

    def _candidates(self, most: int) -> Iterator[_Waiter]:
        """Those of the first `most` that may use a turn, in the order of their turns."""
        now, kept = self._loop.time(), self._pool.fleet.kept
        narrowed = self._gate.narrowed
        if (
            narrowed is not None
            and narrowed in self._queue
            and narrowed.request.deadline > now
            and self._gate.narrowed_may_try(narrowed.ask(kept), self._queue.first)
        ):
            yield narrowed
        # Whoever decodes waits for workers, and hides nobody who does not.
        decodes = servable(self._pool.fleet, decodes=True)
        waiting = self._queue.candidates(now)
        if not decodes:
            waiting = (waiter for waiter in waiting if not waiter.request.query.decodes)
        for waiter in itertools.islice(waiting, most):
            if not waiter.request.query.decodes or self._gate.may_try(waiter, waiter.ask(kept), self._queue.first):
                yield waiter

    def _select(self, waiter: _Waiter, tenants: int) -> tuple[PrefillTicket, Selection] | None:
        """A ticket at the best prefill worker, and decode workers to ask; None without room, or such a pair."""
        fleet = self._pool.fleet
        limit = self._limit(waiter.request.tenant, tenants)
        if not fleet.has_room(limit):
            return None
        query = self._reserver.query(waiter.request, waiter.refusal.never)
        excluded = self._breakers.excluded()
        selection = select_workers(fleet, query, prefill_limit=limit, excluded=excluded)
        return None if selection is None else (self._reserver.open_ticket(selection, query), selection)

    def _limit(self, tenant: str, tenants: int) -> int:
        """Requests that a prefill worker may have before it gets the tenant's next one.

        Twice as many for a tenant that has less than its share of what prefill workers take, so that it need not wait
        for the long prompts of another that has it all; a worker computes the shortest of its prompts first.
        """
        limit = self._config.prefill_limit
        share = limit * len(self._pool.fleet.prefill) // tenants
        return 2 * limit if tenants > 1 and self._in_flight[tenant] < max(share, 1) else limit

    def _watch_fleet(self) -> None:
        """Let each of those who wait for a fleet that is gone do so for a limited time."""
        gone = len(self._queue) > 0 and not servable(self._pool.fleet, decodes=True)
        if not gone:
            self._gone_since = None
            if self._giving_up is not None:
                self._giving_up.cancel()
                self._giving_up = None
            return
        if self._gone_since is None:
            self._gone_since = self._loop.time()
        if self._giving_up is None:
            self._giving_up = self._loop.call_later(self._config.worker_wait_s, self._give_up)

    def _give_up(self) -> None:
        """Dismiss those who have waited long enough for a worker."""
        self._giving_up = None
        if self._gone_since is None:
            return
        wait_s, now, next_at = self._config.worker_wait_s, self._loop.time(), math.inf
        for waiter in self._queue:
            until = max(self._gone_since, waiter.since) + wait_s
            if until > now:
                next_at = min(next_at, until)
            elif not servable(self._pool.fleet, decodes=waiter.request.query.decodes):
                self._dismiss(waiter, Unavailable(self._pool.describe_missing(wait_s)))
        if math.isfinite(next_at):
            self._giving_up = self._loop.call_at(next_at, self._give_up)

    def _dismiss(self, waiter: _Waiter, error: Exception) -> None:
        self._queue.remove(waiter)
        if not waiter.turn.done():
            waiter.turn.set_exception(error)
