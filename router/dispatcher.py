"""From the waiting line to a place: a prefill worker's seat, and pages reserved on a decode worker.

    line ── turn: some prefill worker has a seat ── reserve ── granted ── place
      ▲                                                └─ refused by all: back to the head of the line

Choices are late: a request gets its turn only when a prefill worker has a seat for it, and the choice is made from
what is known then. After a refusal by all, the line stands still until there is news of a worker; then its head alone
tries again, so that a full fleet is asked once per news, and a large request is not starved by small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.telemetry.metrics import LINE_LENGTH
from router.config import RouterConfig
from router.events import Deliver
from router.line import WaitingLine
from router.policy import Choice, Demand, choose, servable
from router.pool import Pool
from router.session import DecodeAttempt, Reserved
from router.worker import Seat, WorkerLink

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Application:
    """What one attempt asks for. `again` is set when the request was accepted before and goes to the head."""

    request_id: str
    attempt: int
    tenant: str
    deadline: float
    demand: Demand
    context_tokens: int
    max_new_tokens: int
    choices: tuple[int, ...]
    again: bool


@dataclass(frozen=True, slots=True)
class Place:
    """What an attempt was given; `decode` is None when nothing is to be decoded."""

    seat: Seat
    decode: DecodeAttempt | None
    decode_name: str | None

    @property
    def prefill(self) -> WorkerLink:
        """The prefill worker."""
        return self.seat.link


class _Waiter:
    def __init__(self, application: Application) -> None:
        self.application = application
        self.seen = 0
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
        self._line: WaitingLine[_Waiter] = WaitingLine(config.line_capacity)
        self._loop = asyncio.get_running_loop()
        self._version = 0
        self._refused_at: int | None = None
        self._probe: _Waiter | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        pool.on_news(self._on_news)

    def check(self, tenant: str, *, decodes: bool) -> None:
        """Refuse now what a full line or an absent fleet would refuse; raises Overloaded or Unavailable."""
        if not servable(self._pool.fleet(), decodes=decodes):
            raise Unavailable(self._pool.missing())
        self._line.check(tenant)

    def close(self) -> None:
        """Fail all that wait."""
        for waiter in self._line:
            self._dismiss(waiter, Unavailable("the router stops"))
        self._mind_fleet()

    @contextlib.asynccontextmanager
    async def place(self, asked: Application, deliver: Deliver) -> AsyncIterator[Place]:
        """Wait for a place and hold it until the block ends; an unfinished decode attempt is then cancelled.

        Raises Overloaded at once when the line is full, Unavailable when no worker can serve it, and InvalidRequest
        when it is larger than any decode worker's memory.
        """
        place = await self._wait(asked, deliver)
        try:
            yield place
        finally:
            self.leave(place.seat)
            if place.decode is not None:
                place.decode.close()
                self._on_news()

    def leave(self, seat: Seat) -> None:
        """Give a seat back: the prefill worker is done with the request; idempotent."""
        if seat.release():
            self._pool.forget_snapshot()
            self._pump()

    async def _wait(self, asked: Application, deliver: Deliver) -> Place:
        waiter = _Waiter(asked)
        if asked.again:
            self._line.push_front(waiter, tenant=asked.tenant, deadline=asked.deadline)
        else:
            self.check(asked.tenant, decodes=asked.demand.decodes)
            self._line.push(waiter, tenant=asked.tenant, deadline=asked.deadline, now=self._loop.time())
        self._pump()
        while True:
            seat, choice = await self._turn(waiter)
            granted: bool | None = None
            try:
                if not asked.demand.decodes:
                    return Place(seat, None, None)
                place = await self._reserve(asked, seat, choice, deliver)
                granted = place is not None
                if place is not None:
                    return place
                waiter.renew()
                self._line.push_front(waiter, tenant=asked.tenant, deadline=asked.deadline)
            finally:
                self._settled(waiter, granted)
                if granted is not True and asked.demand.decodes:
                    self.leave(seat)

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

    async def _reserve(self, asked: Application, seat: Seat, choice: Choice, deliver: Deliver) -> Place | None:
        """Ask the decode workers in turn; None when all refuse for now."""
        never: list[str] = []
        for name in choice.decode:
            link = self._pool.decode(name)
            if link is None or link.session is None or not link.session.open:
                continue
            attempt = link.session.attempt(asked.request_id, asked.attempt, deliver)
            answer = await self._ask(attempt, asked)
            if answer.granted:
                return Place(seat, attempt, name)
            if answer.never:
                never.append(f"decode worker {link.name}: {answer.reason}")
        if never and len(never) == len(choice.decode):
            raise InvalidRequest(
                "max_tokens",
                f"{len(asked.choices)} x ({asked.context_tokens} tokens of context + {asked.max_new_tokens} to "
                f"generate) can never fit: {'; '.join(never)}",
            )
        return None

    async def _ask(self, attempt: DecodeAttempt, asked: Application) -> Reserved:
        """One worker's answer; one that doesn't come in time, or for a lost session, is a refusal."""
        answer = Reserved(False, "no answer", False)
        try:
            async with asyncio.timeout(self._config.reserve_timeout_s):
                answer = await attempt.reserve(
                    context_tokens=asked.context_tokens,
                    max_new_tokens=asked.max_new_tokens,
                    choices=asked.choices,
                )
        except (TimeoutError, BatonError) as error:
            _logger.warning("reservation %s/%d failed: %r", asked.request_id, asked.attempt, error)
        finally:
            if not answer.granted:
                attempt.close()
        return answer

    def _on_news(self) -> None:
        self._version += 1
        self._pump()

    def _pump(self) -> None:
        """Give turns, in the order of the line, as long as there are seats."""
        while (waiter := self._line.head(self._loop.time())) is not None:
            if waiter.turn.done():
                # It was cancelled, and its task has yet to wake up and leave the line.
                self._line.remove(waiter)
                continue
            demand = waiter.application.demand
            stands = demand.decodes and self._refused_at is not None
            if stands and (self._probe is not None or self._refused_at == self._version):
                break
            choice = choose(self._pool.fleet(), demand, prefill_limit=self._config.prefill_limit)
            if choice is None:
                break
            self._line.pop(self._loop.time())
            if stands:
                self._probe = waiter
            waiter.seen = self._version
            seat = self._pool.prefill(choice.prefill).seat(demand.tokens)
            self._pool.forget_snapshot()
            waiter.turn.set_result((seat, choice))
        LINE_LENGTH.set(len(self._line))
        self._mind_fleet()

    def _settled(self, waiter: _Waiter, granted: bool | None) -> None:
        """A turn is over: pages were granted, refused by all, or (None) nobody answered for want of a request."""
        if self._probe is waiter:
            self._probe = None
        if granted is not None:
            self._refused_at = None if granted else waiter.seen
        self._pump()

    def _mind_fleet(self) -> None:
        """Let those who wait for a fleet that is gone do so for a limited time."""
        gone = len(self._line) > 0 and not servable(self._pool.fleet(), decodes=True)
        if gone and self._giving_up is None:
            self._giving_up = self._loop.call_later(self._config.worker_wait_s, self._give_up)
        elif not gone and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        for waiter in self._line:
            if not servable(self._pool.fleet(), decodes=waiter.application.demand.decodes):
                self._dismiss(waiter, Unavailable(self._pool.missing()))

    def _dismiss(self, waiter: _Waiter, error: Unavailable) -> None:
        self._line.remove(waiter)
        if not waiter.turn.done():
            waiter.turn.set_exception(error)
