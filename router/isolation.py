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
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baton.errors import Unavailable
from router.events import Deliver
from router.placement.demand import Choice, Demand
from router.placement.policy import quietest, servable
from router.workers.breaker import Breakers
from router.workers.link import Seat
from router.workers.pool import Pool
from router.workers.reservation import Answers, Application, Place, Reserver, Turn


class Isolation:
    """Hands out such places; `leave` gives a seat back, `freed` is called when workers are kept no longer."""

    def __init__(
        self,
        pool: Pool,
        reserver: Reserver,
        breakers: Breakers,
        *,
        wait_s: float,
        worker_wait_s: float,
        leave: Callable[[Seat], None],
        freed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._reserver = reserver
        self._breakers = breakers
        self._wait_s = wait_s
        self._worker_wait_s = worker_wait_s
        self._leave = leave
        self._freed = freed
        self._turns: dict[str, int] = {}
        """Requests in the order of their turns, and how many of their attempts take part."""
        self._pair: Choice | None = None
        """Where the attempts of the request whose turn it is run."""
        self._empty_by: float | None = None
        self._event = asyncio.Event()
        self._version = self._news = 0
        self._loop = asyncio.get_running_loop()

    def moved(self, *, news: bool) -> None:
        """Something was given back; `news` when a worker that refused may have changed its mind."""
        self._news += news
        self._version += 1
        self._event.set()

    async def place(self, asked: Application, deliver: Deliver, suspected: Callable[[], bool]) -> Place | None:
        """A place where nothing else runs, with the turn that is to be ended; None to run among others.

        That is so when the request is no longer suspected, when no pair became empty in time, and when no worker that
        is there can hold the request. Raises Unavailable when there were no workers for `worker_wait_s`.
        """
        name = asked.request_id
        self._turns[name] = self._turns.get(name, 0) + 1
        turn, place = Turn(partial(self._end, name)), None
        try:
            asked = replace(asked, demand=replace(asked.demand, alone=True))
            place = await self._place(asked, deliver, suspected)
        finally:
            if place is None:
                turn.end()
        return place and replace(place, turn=turn)

    def _end(self, name: str) -> None:
        first = self._has_turn(name)
        self._turns[name] -= 1
        if self._turns[name]:
            return
        del self._turns[name]
        if first:
            self._pair = self._empty_by = None
            self.moved(news=False)
            self._keep(None)

    def _has_turn(self, name: str) -> bool:
        return next(iter(self._turns)) == name

    async def _place(self, asked: Application, deliver: Deliver, suspected: Callable[[], bool]) -> Place | None:
        answers, refused, gone_since = Answers(), None, None
        while suspected():
            seen, now, until = self._version, self._loop.time(), math.inf
            if not servable(self._pool.fleet(), decodes=asked.demand.decodes):
                gone_since = now if gone_since is None else gone_since
                until = gone_since + self._worker_wait_s
                if now >= until:
                    raise Unavailable(self._pool.missing(self._worker_wait_s))
                # The time in which a pair must become empty counts only while there is one.
                if self._has_turn(asked.request_id):
                    self._empty_by = None
            elif self._has_turn(asked.request_id):
                gone_since = None
                demand = self._reserver.located(asked, answers)
                found = self._choose(demand)
                if found is None:
                    return None
                choice, empty = found
                self._keep(choice)
                until = self._empty_by = self._empty_by or now + self._wait_s
                if empty and refused != (choice, self._news):
                    refused = choice, self._news
                    if (place := await self._take(asked, demand, choice, deliver, answers)) is not None:
                        self._pair = choice
                        # Other choices of the request may follow.
                        self.moved(news=False)
                        return place
                    continue
                if now >= until:
                    return None
            else:
                gone_since = None
            await self._moved_since(seen, until)
        return None

    def _choose(self, demand: Demand) -> tuple[Choice, bool] | None:
        """The pair to be kept, and whether nothing but other choices of the request runs there."""
        fleet = self._pool.fleet()
        if self._pair is not None and all(name in fleet for name in (self._pair.prefill, *self._pair.decode)):
            return self._pair, True
        return quietest(fleet, demand, self._breakers.shut(self._loop.time()))

    async def _take(
        self, asked: Application, demand: Demand, choice: Choice, deliver: Deliver, answers: Answers
    ) -> Place | None:
        seat, place = self._reserver.seat(choice, demand), None
        try:
            place = await self._reserver.reserve(asked, seat, choice, deliver, answers)
        finally:
            if place is None:
                self._leave(seat)
        return place

    async def _moved_since(self, seen: int, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if math.isinf(until) else until):
                while self._version == seen:
                    self._event.clear()
                    await self._event.wait()

    def _keep(self, choice: Choice | None) -> None:
        """Give the workers of a choice to nobody else."""
        names = frozenset() if choice is None else frozenset((choice.prefill, *choice.decode))
        if names != self._reserver.held:
            self._reserver.held = names
            self._freed()
