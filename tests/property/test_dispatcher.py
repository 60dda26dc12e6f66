"""The dispatcher with requests that run isolated and others, and workers that change their minds, drain and go.

Whatever happens: once all workers serve again, each request gets its placement, and in the end nothing is held, nothing
is isolated, and no error is one of the router itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError
from router.placement.policy import FleetView
from router.workers.failures import Suspicion
from tests.effort import effort
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import FULL, GRANTED, REFUSED, TOO_LARGE, FakePool, Held, dispatcher

SUSPICIONS = [Suspicion.NONE, Suspicion.NONE, Suspicion.PREFILL, Suspicion.PAIR]
MOST_TURNS = 10_000
"""Turns of the event loop without a pause after which it is busy for ever."""


class Fleet(FakePool):
    """Workers of which some drain or are gone; those named m are mixed."""

    drains: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()

    @property
    def fleet(self) -> FleetView:
        fleet = super().fleet
        for prefill in list(fleet.prefill.values()):
            view = replace(prefill, draining=prefill.address in self.drains)
            fleet.set_prefill(prefill.address, None if prefill.address in self.gone else view)
        for decode in list(fleet.decode.values()):
            seen = replace(decode, draining=decode.address in self.drains)
            fleet.set_decode(decode.address, None if decode.address in self.gone else seen)
        return fleet

    def some(self, draw: random.Random) -> frozenset[str]:
        return frozenset(name for name in sorted({*self.by_name, *self.open_requests}) if draw.random() < 0.2)

    def lose(self, names: frozenset[str]) -> None:
        """Lose these workers, and no others; what waits there is refused."""
        self.gone = names
        self.notify()
        self.answer(**dict.fromkeys(sorted(names & self.by_name.keys()), REFUSED))

    def serve(self) -> None:
        self.drains = self.gone = frozenset()
        self.answer_all(GRANTED)


class Story:
    """Requests and workers, as a seed says."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        prefill = draw.choice([("p",), ("p", "q"), ("p", "m")])
        decode = draw.choice([("d",), ("d", "e"), ("d", "m"), ("d", "e", "m")])
        mixed = ("m",) if "m" in decode and "m" not in prefill else ()
        self.pool = Fleet((*prefill, *mixed), **dict.fromkeys(decode, GRANTED))
        wait_s, limit = draw.choice([2.0, 30.0]), draw.choice([1, 2])
        self.dispatcher = dispatcher(self.pool, prefill_limit=limit, isolation_wait_s=wait_s, queue_capacity=50)
        self.requests: list[Held] = []

    def arrive(self) -> None:
        draw, number = self.draw, len(self.requests)
        suspicion = draw.choice(SUSPICIONS)
        held = Held(
            self.dispatcher,
            f"r{number}",
            again=bool(suspicion) or draw.random() < 0.3,
            isolated=suspicion,
            needs_decode=draw.random() < 0.75,
            tokens=draw.choice([1, 8, 50]),
            output=draw.choice([1, 4, 100]),
            tenant=draw.choice("ab"),
            request=f"suspected {draw.randrange(3)}" if suspicion else "",
            choices=draw.choice([1, 1, 2]),
        )
        self.requests.append(held)

    def change_request(self) -> None:
        held, chance = self.draw.choice(self.requests), self.draw.random()
        if held.task.done() or held.place is None:
            if chance < 0.4:
                held.task.cancel()
            elif chance < 0.6:
                held.suspected = Suspicion.NONE
        elif chance < 0.5:
            held.go.set()
        else:
            self.dispatcher.release(held.place.prefill)
            if held.place.isolation is not None:
                held.place.isolation.release()

    def change_workers(self) -> None:
        draw, pool, chance = self.draw, self.pool, self.draw.random()
        if chance < 0.5:
            pool.answer(**{draw.choice(sorted(pool.by_name)): draw.choice([GRANTED, FULL, FULL, REFUSED, TOO_LARGE])})
        elif chance < 0.8:
            pool.drains = pool.some(draw)
            pool.notify()
        else:
            pool.lose(pool.some(draw))

    async def run(self) -> None:
        for _ in range(self.draw.randint(5, 60)):
            chance = self.draw.random()
            if chance < 0.4 or not self.requests:
                self.arrive()
            elif chance < 0.65:
                self.change_request()
            elif chance < 0.95:
                self.change_workers()
            else:
                await asyncio.sleep(self.draw.choice([0.1, 1.0, 5.0, 40.0]))
            await asyncio.sleep(self.draw.choice([0.0, 0.01]))
        self.pool.serve()
        for _ in range(200):
            for held in self.requests:
                if held.placed.is_set():
                    held.go.set()
            await asyncio.sleep(1.0)
        assert [held.task for held in self.requests if not held.task.done()] == [], "they never end"
        errors = [held.task.exception() for held in self.requests if not held.task.cancelled()]
        assert [error for error in errors if error is not None and not isinstance(error, BatonError)] == []
        assert (self.pool.assignments, self.pool.running.total(), self.pool.isolated) == (0, 0, frozenset())
        assert (len(self.dispatcher.queue), self.dispatcher.queue.registered) == (0, set())


class BoundedLoop(VirtualLoop):
    """A loop that fails if it is busy for ever, so that no time passes."""

    turns = 0
    last = -1.0

    def _run_once(self) -> None:
        self.turns, self.last = (self.turns + 1 if self.last == self.now else 0), self.now
        assert self.turns < MOST_TURNS, "the loop is busy for ever"
        super()._run_once()  # type: ignore[misc]


@given(st.integers(0, 2**32))
@effort(100)
def test_every_request_is_placed_in_the_end_and_nothing_is_held(seed: int) -> None:
    with contextlib.closing(BoundedLoop()) as loop:

        async def run() -> None:
            await Story(seed).run()

        loop.run_until_complete(run())
