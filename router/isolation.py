"""A place of its own for a request that was present at two worker deaths.

    wait for the turn ── keep the quietest pair ── wait until it is empty ── reserve ── place ── end: the pair is free

There is one such request at a time. While a pair is kept for it, others are placed elsewhere, or wait where there is
nowhere else; the time until it runs is bounded, and so is its run, by its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.errors import EngineError, Unavailable
from router.breaker import Breakers
from router.demand import Choice
from router.events import Deliver
from router.place import Answers, Application, Place, Reserver
from router.policy import quietest, servable
from router.pool import Pool
from router.worker import Seat


class Isolation:
    """Hands out such places; `leave` gives a seat back, `freed` is called when workers are kept no longer."""

    def __init__(
        self,
        pool: Pool,
        reserver: Reserver,
        breakers: Breakers,
        *,
        wait_s: float,
        leave: Callable[[Seat], None],
        freed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._reserver = reserver
        self._breakers = breakers
        self._wait_s = wait_s
        self._leave = leave
        self._freed = freed
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()
        self._news = 0
        self._loop = asyncio.get_running_loop()

    def moved(self, *, news: bool) -> None:
        """Something was given back; `news` when a worker that refused may have changed its mind."""
        self._news += news
        self._moved.set()

    async def place(self, asked: Application, deliver: Deliver) -> Place:
        """Wait for a place, which must be followed by `end`.

        Raises EngineError when no workers could be cleared in time, Unavailable when there are none at all.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
                try:
                    return await self._cleared(asked, deliver)
                except BaseException:
                    self.end()
                    raise
        except TimeoutError:
            if not servable(self._pool.fleet(), decodes=asked.demand.decodes):
                raise Unavailable(self._pool.missing()) from None
            raise EngineError(
                "the request was present at two worker deaths, and must run alone; no workers were free of other "
                f"requests within {self._wait_s:g} s"
            ) from None

    def end(self) -> None:
        """The request has left its place: let others use the workers."""
        self._turn.release()
        self._keep(frozenset())

    async def _cleared(self, asked: Application, deliver: Deliver) -> Place:
        """Keep a pair of workers free of new requests until it is empty, and take it."""
        answers = Answers()
        refused: tuple[Choice, int] | None = None
        while True:
            self._moved.clear()
            demand = self._reserver.located(asked, answers)
            found = quietest(self._pool.fleet(), demand, self._breakers.shut(self._loop.time()))
            self._keep(frozenset() if found is None else frozenset((found[0].prefill, *found[0].decode)))
            if found is not None and found[1] and refused != (asking := (found[0], self._news)):
                refused, place = asking, None
                seat = self._reserver.seat(found[0], demand)
                try:
                    place = await self._reserver.reserve(asked, seat, found[0], deliver, answers)
                finally:
                    if place is None:
                        self._leave(seat)
                if place is not None:
                    return place
            await self._moved.wait()

    def _keep(self, names: frozenset[str]) -> None:
        if names != self._reserver.held:
            self._reserver.held = names
            self._freed()
