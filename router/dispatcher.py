"""From the waiting line to a place: a prefill worker's seat, and pages reserved on a decode worker.

    line ── turn: some prefill worker has a seat ── reserve ── granted ── place
      ▲                                                └─ refused by all: back to the head of the line

Choices are late: a request gets its turn only when a prefill worker has a seat for it, and the choice is made from
what is known then. After a refusal by all, the one that was refused waits for news of a worker, or until the time is
over after which a worker said that another try makes sense, and then tries before all others. Those behind it wait as
well where the workers lack slots; where they lack the pages for a large context, those whose context finds room go on
in their turns (`standstill`).

Some requests can use only some of the decode workers: the others are too small, failed them, or are kept. The first of
these that is refused tries again at news as well, before or after the first of all, whichever has waited longer, so
that neither takes all places from the other. Its answer counts for those behind it that could ask nobody else.

When no worker of a role is there, requests wait in the line too, each for `worker_wait_s`, and go on in order.

A request that must run alone waits beside the line: see `isolation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.telemetry.metrics import BREAKERS_OPEN, LINE_LENGTH
from router.config import RouterConfig
from router.events import Deliver
from router.isolation import Isolation
from router.placement.chains import Form
from router.placement.demand import Choice
from router.placement.fleet import Fleet
from router.placement.policy import choose, matching_decodes, servable
from router.placement.queue import SHORTEST_RETRY_S, WaitingLine
from router.placement.standstill import Asked, Standstill
from router.workers.breaker import Breakers
from router.workers.link import Seat
from router.workers.losses import Losses
from router.workers.pool import Pool
from router.workers.reservation import Answers, Application, Place, Reserver

_PROBE_S = 1.0
"""After a refusal without a hint: news could get lost, and the line must not stand for ever."""

_LOOK = 64
"""Of those who wait, the first of each tenant and so many more are looked at for one that would find room."""

_SEATLESS = 8
"""So many that there is no seat for are passed over in one go."""

_SHORTEST_PROBE_S, _LONGEST_PROBE_S = 0.05, 5.0


class _Hopeless(Exception):
    """Every decode worker that is there says that it can never hold the request."""


class _Waiter:
    def __init__(self, application: Application) -> None:
        self.application = application
        self.answers = Answers()
        self.since = asyncio.get_running_loop().time()
        self.asked = Asked()
        self.refused_at = -1
        """The news that were known when workers refused it that do not speak for all of them."""
        self.head_since = math.inf
        """Since when it is the first of all, or the first of those whose choice of workers is narrowed."""
        self.turn = self._new_turn()

    def renew(self) -> None:
        """Wait for another turn."""
        self.turn = self._new_turn()

    def _new_turn(self) -> asyncio.Future[tuple[Seat, Choice]]:
        return asyncio.get_running_loop().create_future()


class Dispatcher:
    """Hands out places; lives on the event loop and is woken by news alone."""

    def __init__(self, pool: Pool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._seats: Counter[str] = Counter()
        self._owners: dict[Seat, str] = {}
        """Tenants by their seats, and how many each has."""
        self._line: WaitingLine[_Waiter] = WaitingLine(config.line_capacity, lambda tenant: self._seats[tenant])
        self._breakers = Breakers()
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._standstill: Standstill[_Waiter] = Standstill()
        self._narrowed_asks = False
        """Whether it has its turn."""
        self._narrow_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """What was told last to one whose choice is narrowed: the news then, workers closed to it, and the room."""
        self._choices_refused_at = -1
        """The news that were known when workers refused further choices for which a context is kept."""
        self._narrowed: _Waiter | None = None
        """The first of those whose choice of workers is narrowed, one at a time, whichever was refused first."""
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
            leave=self.leave,
            freed=self._pump,
        )
        pool.on_news(self._on_news)

    @property
    def losses(self) -> Losses:
        """The connections with workers that were lost."""
        return self._pool.losses

    def lacking(self) -> str:
        """In words, which workers lack; empty when a pair is there."""
        return "" if self._pool.serving else self._pool.missing()

    @property
    def forms(self) -> Collection[Form]:
        """How the workers that are there name the blocks of a prompt."""
        return self._pool.forms

    def check(self, tenant: str, *, decodes: bool) -> None:
        """Refuse now what a full line would refuse, and, if nobody is to wait for a worker, an absent fleet.

        Raises Overloaded or Unavailable.
        """
        if not self._config.worker_wait_s and not servable(self._pool.fleet(), decodes=decodes):
            raise Unavailable(self._pool.missing())
        self._line.check(tenant)

    def close(self) -> None:
        """Fail all that wait."""
        for waiter in self._line:
            self._dismiss(waiter, Unavailable("the router stops"))
        self._mind_fleet()
        if self._next_probe is not None:
            self._next_probe.cancel()

    @contextlib.asynccontextmanager
    async def place(
        self, asked: Application, deliver: Deliver, suspected: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Place]:
        """Wait for a place and hold it until the block ends; an unfinished decode attempt is then cancelled.

        A request that is `suspected` of killing workers gets a place of its own, as long as it is. Raises Overloaded at
        once when the line is full or the deadline can't be met, Unavailable when no worker came that can serve it, and
        InvalidRequest when it is larger than any decode worker's memory.
        """
        place = await self._isolation.place(asked, deliver, suspected) if suspected() else None
        if place is None:
            place = await self._wait(asked, deliver)
        try:
            yield place
        finally:
            place.course.end()
            self.leave(place.seat)
            if place.decode is not None:
                place.decode.close()
            if place.turn is not None:
                place.turn.end()
            self._on_news()

    def leave(self, seat: Seat) -> None:
        """Give a seat back: the prefill worker is done with the request; idempotent."""
        if seat.release():
            if (tenant := self._owners.pop(seat, None)) is not None:
                self._seats[tenant] -= 1
                if not self._seats[tenant]:
                    del self._seats[tenant]
            self._pump()

    async def _wait(self, asked: Application, deliver: Deliver) -> Place:
        waiter = _Waiter(asked)
        if asked.again:
            self._line.push_front(waiter, tenant=asked.tenant, deadline=asked.deadline)
        else:
            self._admit(asked)
            self._line.push(waiter, tenant=asked.tenant, deadline=asked.deadline, now=self._loop.time())
        self._pump()
        try:
            while True:
                try:
                    seat, choice = await self._turn(waiter)
                except _Hopeless:
                    await self._larger_worker(waiter)
                else:
                    if (place := await self._take(waiter, seat, choice, deliver)) is not None:
                        return place
        finally:
            self._forget_narrowed(waiter)

    def _forget_narrowed(self, waiter: _Waiter) -> None:
        """It is no longer the first of those whose choice is narrowed."""
        if self._narrowed is waiter:
            self._narrowed, self._narrowed_asks = None, False

    def _admit(self, asked: Application) -> None:
        """Refuse what the line has no room for, or what can't be in time."""
        self.check(asked.tenant, decodes=asked.demand.decodes)
        if not servable(self._pool.fleet(), decodes=asked.demand.decodes):
            # The pace of the line tells nothing of when a worker will come.
            return
        now = self._loop.time()
        left_s, wait_s = asked.deadline - now, self._line.wait_s(asked.tenant, now)
        if 0 < left_s < wait_s:
            problem = f"the deadline is in {left_s:.1f} s, the line is expected to take {wait_s:.1f} s"
            raise Overloaded(problem, self._line.retry_after())
        if 0 < self._config.line_wait_s < wait_s:
            problem = f"the line is expected to take {wait_s:.1f} s, {self._config.line_wait_s:g} s are allowed"
            raise Overloaded(problem, max(wait_s - self._config.line_wait_s, SHORTEST_RETRY_S))

    async def _turn(self, waiter: _Waiter) -> tuple[Seat, Choice]:
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._settled(waiter, None)
                self.leave(waiter.turn.result()[0])
            raise
        finally:
            if self._line.remove(waiter):
                self._pump()

    async def _take(self, waiter: _Waiter, seat: Seat, choice: Choice, deliver: Deliver) -> Place | None:
        """Use a turn; None when the waiter is back in the line."""
        asked, place, granted = waiter.application, None, None
        try:
            place = await self._reserver.reserve(asked, seat, choice, deliver, waiter.answers)
            if place is not None:
                self._line.departed(self._loop.time())
                granted = True if asked.demand.decodes else None
            elif (lacks_forks := self._reserver.lacks_forks(asked, waiter.answers)) or self._reserver.narrowed(
                asked, choice, waiter.answers
            ):
                # Others may have more workers to ask than this one, or no further choices.
                self._return(waiter, first=False)
                waiter.refused_at = waiter.asked.version
                if lacks_forks:
                    self._choices_refused_at = waiter.asked.version
                else:
                    self._refused_narrowed(waiter, choice)
                self._probe_later(waiter)
            else:
                self._forget_narrowed(waiter)
                self._return(waiter)
                granted = False
            return place
        finally:
            self._settled(waiter, granted)
            if place is None:
                self.leave(seat)

    def _refused_narrowed(self, waiter: _Waiter, choice: Choice) -> None:
        closed = self._reserver.closed(waiter.application, choice, waiter.answers)
        self._narrow_refusal = waiter.asked.version, closed, waiter.answers.room_tokens
        if self._narrowed is None:
            self._narrowed, waiter.head_since = waiter, min(waiter.head_since, self._loop.time())

    def _return(self, waiter: _Waiter, *, first: bool = True) -> None:
        asked = waiter.application
        waiter.renew()
        back = self._line.put_back if first else self._line.push_front
        back(waiter, tenant=asked.tenant, deadline=asked.deadline)
        if waiter is self._line.first:
            waiter.head_since = min(waiter.head_since, self._loop.time())

    async def _larger_worker(self, waiter: _Waiter) -> None:
        """Wait for a decode worker that may hold what those that are there never can, and return to the line.

        Only what was accepted before waits: it ran on such a worker. Raises InvalidRequest, or Unavailable after
        `worker_wait_s`.
        """
        asked, said = waiter.application, "; ".join(waiter.answers.never.values())
        problem = (
            f"{asked.context_tokens} tokens of context and {asked.max_new_tokens} of output need more KV memory than "
            f"any decode worker has (--kv-memory): {said}"
        )
        if not asked.again:
            raise InvalidRequest("max_tokens", problem)
        try:
            async with asyncio.timeout(self._config.worker_wait_s):
                while self._hopeless(waiter):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            waited = f"after a wait of {self._config.worker_wait_s:g} s"
            message = f"no decode worker is there any more that could hold the request, {waited}: {problem}"
            raise Unavailable(message) from None
        self._return(waiter)
        self._pump()

    def _hopeless(self, waiter: _Waiter) -> bool:
        answers = waiter.answers
        if not answers.never:
            return False
        matching = matching_decodes(self._pool.fleet())
        # What comes back under a name may be larger than what left.
        answers.never = {name: reason for name, reason in answers.never.items() if name in matching}
        return bool(answers.never) and answers.never.keys() >= matching

    def _on_news(self) -> None:
        self._standstill.news()
        self._isolation.moved(news=True)
        self._breakers.keep(self._pool.fleet())
        workers, pairs = self._breakers.open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        self._pump()

    def _pump(self) -> None:
        """Give turns, in the order of the line, as long as there are seats."""
        self._moved.set()
        self._isolation.moved(news=False)
        seatless: set[_Waiter] = set()
        while len(seatless) <= _SEATLESS and (waiter := self._next(seatless)) is not None:
            if waiter.turn.done():
                # It was cancelled, and its task has yet to wake up and leave the line.
                self._line.remove(waiter)
                continue
            if self._hopeless(waiter):
                self._dismiss(waiter, _Hopeless())
                continue
            tenant = waiter.application.tenant
            if (seat_and_choice := self._seat(waiter)) is None:
                # Others may go on: there is no seat that it could use.
                seatless.add(waiter)
                continue
            seat, _ = seat_and_choice
            self._line.take(waiter)
            self._owners[seat] = tenant
            self._seats[tenant] += 1
            if waiter.application.demand.decodes:
                waiter.asked = self._standstill.ask(waiter)
                self._narrowed_asks = self._narrowed_asks or waiter is self._narrowed
            waiter.turn.set_result(seat_and_choice)
        LINE_LENGTH.set(len(self._line))
        self._mind_fleet()

    def _seat(self, waiter: _Waiter) -> tuple[Seat, Choice] | None:
        """A seat at the best prefill worker, and decode workers to ask; None without a seat, or such a pair."""
        fleet = self._pool.fleet()
        limit = self._limit(fleet, waiter.application.tenant)
        if not fleet.seats(limit):
            return None
        demand = self._reserver.located(waiter.application, waiter.answers)
        shut = self._breakers.shut(self._loop.time())
        choice = choose(fleet, demand, prefill_limit=limit, shut=shut, held=self._reserver.held)
        return None if choice is None else (self._reserver.seat(choice, demand), choice)

    def _next(self, but: Collection[_Waiter]) -> _Waiter | None:
        """Whose turn it is, if anybody's, but those that there is no seat for."""
        if (narrowed := self._narrowed_turn()) is not None and narrowed not in but:
            return narrowed
        most, candidates = len(self._line.tenants) + _LOOK, self._line.candidates(self._loop.time())
        if not servable(self._pool.fleet(), decodes=True):
            # Whoever decodes waits for workers, and hides nobody who does not.
            candidates = (waiter for waiter in candidates if not waiter.application.demand.decodes)
        looked_at = itertools.islice(candidates, most)
        return next((waiter for waiter in looked_at if waiter not in but and self._may_try(waiter)), None)

    def _narrowed_turn(self) -> _Waiter | None:
        """The first of those whose choice is narrowed, if it may try now, and the first of all has not waited longer.

        The first of all could use any place, and would take those that alone the other one can use.
        """
        waiter, first = self._narrowed, self._line.first
        if waiter is None or waiter not in self._line or waiter.application.deadline <= self._loop.time():
            return None
        if waiter.refused_at == self._standstill.version or (
            first is not None and first.head_since < waiter.head_since
        ):
            return None
        return waiter if self._standstill.may_ask(waiter, waiter.application.context_tokens, None) else None

    def _may_try(self, waiter: _Waiter) -> bool:
        asked = waiter.application
        if waiter.refused_at == self._standstill.version:
            return False
        if len(asked.choices) > 1 and self._choices_refused_at == self._standstill.version:
            return False
        if self._refused_for(waiter):
            return False
        return not asked.demand.decodes or self._standstill.may_ask(waiter, asked.context_tokens, self._line.first)

    def _refused_for(self, waiter: _Waiter) -> bool:
        """Whether it could ask none but workers that have just refused, or are being asked by, one with more choice."""
        asked, (version, closed, room) = waiter.application, self._narrow_refusal
        if not asked.demand.decodes or asked.context_tokens <= room:
            return False
        known = self._narrowed_asks or version == self._standstill.version
        return known and closed <= waiter.answers.never.keys() | self._reserver.held

    def _limit(self, fleet: Fleet, tenant: str) -> int:
        """Requests that a prefill worker may have before it gets the tenant's next one.

        Twice as many for a tenant that has less than its share of the seats, so that it need not wait for the long
        prompts of another that has them all; a worker computes the shortest of its prompts first.
        """
        limit = self._config.prefill_limit
        tenants = len(self._seats.keys() | self._line.tenants)
        share = limit * len(fleet.prefill) // tenants
        return 2 * limit if tenants > 1 and self._seats[tenant] < max(share, 1) else limit

    def _settled(self, waiter: _Waiter, granted: bool | None) -> None:
        """A turn is over: pages were granted, refused by all, or (None) nobody answered for want of a request."""
        self._standstill.ended(waiter)
        if waiter is self._narrowed:
            self._narrowed_asks = False
        if granted is not None:
            context, room = waiter.application.context_tokens, waiter.answers.room_tokens
            self._standstill.answered(waiter.asked, context, granted=granted, room=room)
            self._line.hint_s = 0.0 if math.isinf(waiter.answers.retry_after_s) else waiter.answers.retry_after_s
        if granted is False:
            self._probe_later(waiter)
        self._pump()

    def _probe_later(self, waiter: _Waiter) -> None:
        """Have those that were refused try again though there is no news."""
        if self._next_probe is None:
            hint = waiter.answers.retry_after_s if math.isfinite(waiter.answers.retry_after_s) else _PROBE_S
            delay = min(max(hint, _SHORTEST_PROBE_S), _LONGEST_PROBE_S)
            self._next_probe = self._loop.call_later(delay, self._probe_by_time)

    def _probe_by_time(self) -> None:
        self._next_probe = None
        self._on_news()

    def _mind_fleet(self) -> None:
        """Let each of those who wait for a fleet that is gone do so for a limited time."""
        gone = len(self._line) > 0 and not servable(self._pool.fleet(), decodes=True)
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
        for waiter in self._line:
            until = max(self._gone_since, waiter.since) + wait_s
            if until > now:
                next_at = min(next_at, until)
            elif not servable(self._pool.fleet(), decodes=waiter.application.demand.decodes):
                self._dismiss(waiter, Unavailable(self._pool.missing(wait_s)))
        if math.isfinite(next_at):
            self._giving_up = self._loop.call_at(next_at, self._give_up)

    def _dismiss(self, waiter: _Waiter, error: Exception) -> None:
        self._line.remove(waiter)
        if not waiter.turn.done():
            waiter.turn.set_exception(error)
