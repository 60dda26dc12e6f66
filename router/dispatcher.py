"""From the queue to a placement: a prefill worker's assignment, and pages reserved on a decode worker.

    queue ── turn: some prefill worker has room ── reserve ── granted ── placement
      ▲                                               └─ refused by all: back to the head of the queue

`placement/scheduler.py` decides whose turn it is and where; here its decisions are carried out. News of workers, places
that are given back and timers wake it.

When no worker of a role is there, requests wait in the queue too, each for `worker_wait_s`, and go on in order.

A request that must run alone waits beside the queue: see `isolation.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

from baton.config.router import RouterConfig
from baton.errors import InvalidRequest, Unavailable
from baton.telemetry.metrics import BREAKERS_OPEN, QUEUE_LENGTH
from router.isolation import Isolation
from router.placement.policy import Selection, can_serve
from router.placement.scheduler import PlacementRequest, PlacementScheduler, Waiter
from router.request import Deliver, Suspicion
from router.workers.failures import Breakers
from router.workers.pool import Pool
from router.workers.prefill import PrefillAssignment
from router.workers.reservation import Placement, Reserver


class _Hopeless(Exception):
    """Every decode worker that is there says that it can never hold the request."""


class Dispatcher:
    """Hands out placements; lives on the event loop and is woken by news alone."""

    def __init__(self, pool: Pool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.scheduler = PlacementScheduler(
            pool.prefixes,
            capacity=config.queue_capacity,
            prefill_limit=config.prefill_limit,
            max_wait_s=config.queue_wait_s,
        )
        self._turns: dict[Waiter, asyncio.Future[tuple[PrefillAssignment, Selection]]] = {}
        """The future of each waiting request, which gets its turn."""
        self._tenants: dict[PrefillAssignment, str] = {}
        """Tenants of the requests at prefill workers."""
        self._breakers = Breakers(self._loop.time)
        self._changed = asyncio.Event()
        self._next_probe: asyncio.TimerHandle | None = None
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
        if not self._config.worker_wait_s and not can_serve(self._pool.fleet, decodes=decodes):
            raise Unavailable(self._pool.describe_missing())
        self.scheduler.check(tenant)

    def close(self) -> None:
        """Fail all that wait."""
        for waiter in self.scheduler:
            self._dismiss(waiter, Unavailable("the router is stopping"))
        self._watch_fleet()
        if self._next_probe is not None:
            self._next_probe.cancel()

    @contextlib.asynccontextmanager
    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion] = lambda: Suspicion.NONE
    ) -> AsyncIterator[Placement]:
        """Wait for a placement and hold it until the block ends; an unfinished decode attempt is then cancelled.

        A request that is suspected of killing workers gets workers of its own as long as it is. Raises Overloaded at
        once when the queue is full or the deadline can't be met, Unavailable when no worker came that can serve it, and
        InvalidRequest when it is larger than any decode worker can hold.
        """
        try:
            placement = await self._isolation.place(request, deliver, suspicion) if suspicion() else None
            if placement is None:
                placement = await self._wait(request, deliver)
        finally:
            self._reserver.withdraw(request)
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

    def release(self, assignment: PrefillAssignment) -> None:
        """The prefill worker is done with the request; idempotent."""
        if self._free(assignment):
            self._pump()

    def _free(self, assignment: PrefillAssignment) -> bool:
        if not assignment.release():
            return False
        if (tenant := self._tenants.pop(assignment, None)) is not None:
            self.scheduler.release_prefill(tenant)
        return True

    async def _wait(self, request: PlacementRequest, deliver: Deliver) -> Placement:
        """From the queue to a placement, in as many turns as it takes."""
        now = self._loop.time()
        waiter = Waiter(request, now)
        if not request.again:
            self.check(request.tenant, decodes=request.query.decodes)
        self.scheduler.push(waiter, self._pool.fleet, now)
        self._turns[waiter] = self._loop.create_future()
        self._pump()
        try:
            while True:
                try:
                    assignment, selection = await self._turn(waiter)
                except _Hopeless:
                    await self._wait_for_larger_worker(waiter)
                else:
                    if (placement := await self._reserve(waiter, assignment, selection, deliver)) is not None:
                        return placement
        finally:
            # No waiter may stay in the queue without a future for its turn, whatever was raised here.
            self.scheduler.remove(waiter)
            del self._turns[waiter]
            self.scheduler.forget(waiter)

    async def _turn(self, waiter: Waiter) -> tuple[PrefillAssignment, Selection]:
        """Wait in the queue for a turn."""
        turn = self._turns[waiter]
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._end_turn(waiter, turn.result()[0])
            raise
        finally:
            if self.scheduler.remove(waiter):
                self._pump()

    async def _reserve(
        self, waiter: Waiter, assignment: PrefillAssignment, selection: Selection, deliver: Deliver
    ) -> Placement | None:
        """Use a turn; None when the waiter is back in the queue."""
        answer = None
        try:
            answer = await self._reserver.reserve(waiter.request, assignment, selection, deliver, waiter.refusal.never)
            if isinstance(answer, Placement):
                self.scheduler.grant(waiter, self._loop.time())
                return answer
            self._turns[waiter] = self._loop.create_future()
            probe_s = self.scheduler.refuse(waiter, answer, self._loop.time())
            if self._next_probe is None:
                self._next_probe = self._loop.call_later(probe_s, self._probe)
            return None
        finally:
            self._end_turn(waiter, None if isinstance(answer, Placement) else assignment)

    def _end_turn(self, waiter: Waiter, unused: PrefillAssignment | None) -> None:
        """A turn is over, whatever came of it."""
        self.scheduler.end(waiter)
        if unused is not None:
            self._free(unused)
        self._pump()

    async def _wait_for_larger_worker(self, waiter: Waiter) -> None:
        """Wait for a decode worker that may hold what those that are there never can, and return to the queue.

        Only what was accepted before waits: it ran on such a worker. Raises InvalidRequest, or Unavailable after
        `worker_wait_s`.
        """
        request, said = waiter.request, "; ".join(waiter.refusal.never.values())
        problem = (
            f"{request.context_tokens} tokens of context and {request.max_new_tokens} of output need more than any "
            f"decode worker can hold (--kv-memory, --max-model-len): {said}"
        )
        if not request.again:
            raise InvalidRequest("max_tokens", problem)
        try:
            async with asyncio.timeout(self._config.worker_wait_s):
                while self.scheduler.is_hopeless(waiter, self._pool.fleet):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            waited = f"after a wait of {self._config.worker_wait_s:g} s"
            message = f"no decode worker is there any more that could hold the request, {waited}: {problem}"
            raise Unavailable(message) from None
        self._turns[waiter] = self._loop.create_future()
        self.scheduler.push_again(waiter, self._loop.time(), first=True)
        self._pump()

    def _on_news(self) -> None:
        self.scheduler.record_news()
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
        without_room: set[Waiter] = set()
        while self._give_turn(without_room):
            pass
        QUEUE_LENGTH.set(len(self.scheduler))
        self._watch_fleet()

    def _give_turn(self, without_room: set[Waiter]) -> bool:
        """Give the next one its turn; False when nobody can use one."""
        excluded = self._breakers.excluded()
        next_ = self.scheduler.next_turn(self._pool.fleet, excluded, self._loop.time(), without_room)
        if next_ is None:
            return False
        waiter, turn = next_.waiter, self._turns[next_.waiter]
        if turn.done():
            # It was cancelled, and its task has yet to wake up and leave the queue.
            self.scheduler.remove(waiter)
        elif next_.selection is None:
            self._dismiss(waiter, _Hopeless())
        else:
            assignment = self._reserver.assign(next_.selection, next_.query)
            self.scheduler.begin(waiter)
            self._tenants[assignment] = waiter.request.tenant
            turn.set_result((assignment, next_.selection))
        return True

    def _watch_fleet(self) -> None:
        """Let each of those who wait for a fleet that is gone do so for a limited time."""
        stranded = self.scheduler.is_stranded(self._pool.fleet, self._loop.time())
        if stranded and self._giving_up is None:
            self._giving_up = self._loop.call_later(self._config.worker_wait_s, self._give_up)
        elif not stranded and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        """Dismiss those who have waited long enough for a worker."""
        self._giving_up, wait_s = None, self._config.worker_wait_s
        late, next_at = self.scheduler.overdue(self._pool.fleet, self._loop.time(), wait_s)
        for waiter in late:
            self._dismiss(waiter, Unavailable(self._pool.describe_missing(wait_s)))
        if math.isfinite(next_at):
            self._giving_up = self._loop.call_at(next_at, self._give_up)

    def _dismiss(self, waiter: Waiter, error: Exception) -> None:
        self.scheduler.remove(waiter)
        if not (turn := self._turns[waiter]).done():
            turn.set_exception(error)
