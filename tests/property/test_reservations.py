"""Several routers that share decode workers, in simulated time: who waits for pages, and for how long.

The dispatchers are the real ones. The workers are small ones that keep reservations as decode workers do: sessions take
turns, and half of the pages that come free are set aside for the first reservation that lacks pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.router import RouterConfig
from baton.lifecycle import Lifecycle, State
from baton.request import ReserveResult
from router.dispatcher import Dispatcher
from router.placement.policy import DecodeView, FleetView, PrefillView
from router.placement.queue import PlacementRequest
from router.workers.pool import WorkerPool
from tests.effort import effort
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import KV, FakeAttempt, FakePool

PAGES, PAGE, HOLD_S, LATENCY_S = 100, 4, 1.0, 0.001
GRANTED, WAITS = ReserveResult(True), ReserveResult(False, "lacks pages", waiting=True)


@dataclass(eq=False)
class Reservation:
    router: int
    attempt: FakeAttempt
    pages: int
    granted: bool = False


class SharedWorker:
    """A decode worker that several routers share."""

    def __init__(self, town: Town, name: str, pages: int) -> None:
        self.town, self.name, self.pages, self.free = town, name, pages, pages
        self.waiting: list[Reservation] = []
        self.aside = 0
        self._first: Reservation | None = None
        self._turns: dict[int, int] = dict.fromkeys(range(2), 0)

    def reserve(self, reservation: Reservation) -> None:
        if reservation.pages > self.pages:
            answer = ReserveResult(False, f"needs {reservation.pages} pages, there are {self.pages}", True)
            self.town.tell(reservation, answer)
            return
        self.waiting.append(reservation)
        self.grant(0)
        if not reservation.granted:
            self.town.tell(reservation, WAITS)

    def end(self, reservation: Reservation) -> None:
        if reservation.granted:
            self.free += reservation.pages
        elif reservation in self.waiting:
            self.waiting.remove(reservation)
        self.grant(reservation.pages if reservation.granted else 0)

    def grant(self, freed: int) -> None:
        """Grant all that may be, in turn."""
        self.aside += freed // 2 if self._first in self.waiting else 0
        while True:
            order = sorted(self.waiting, key=lambda each: self._turns[each.router])
            if self._first not in self.waiting:
                self._first = next((each for each in order if each.pages > self.free), None)
                self.aside = self.free // 2 if self._first else 0
            found = next((each for each in order if each.pages <= self.room(each)), None)
            if found is None:
                return
            self.waiting.remove(found)
            self._turns[found.router] = next(self.town.numbers)
            self.free -= found.pages
            found.granted = True
            self.town.tell(found, GRANTED)

    def room(self, reservation: Reservation) -> int:
        return self.free - (0 if reservation is self._first else min(self.aside, self.free))


class RouterPool(FakePool):
    """The workers as the dispatcher of one router knows them; what it is told of them is a while old."""

    def __init__(self, town: Town, number: int, prefill_limit: int) -> None:
        super().__init__(("p", "q"))
        self.town, self.number = town, number
        self.known = {worker.name: worker.free for worker in town.workers}
        config = RouterConfig(prefill=("p:1",), decode=("d:1",), prefill_limit=prefill_limit)
        self.dispatcher = Dispatcher(cast(WorkerPool, self), config)

    @property
    def fleet(self) -> FleetView:
        prefill = [PrefillView(name, KV, open_requests=own) for name, own in self.open_requests.items()]
        return FleetView(
            prefill,
            [DecodeView(name, KV, free_tokens=free * PAGE, free_slots=1) for name, free in self.known.items()],
        )

    def hear(self, worker: SharedWorker) -> None:
        """Get a status of a worker."""
        self.known[worker.name] = worker.free
        self.notify()

    def subtract_free(self, tokens: int, slots: int) -> None:
        self.known[self._worker] = max(self.known[self._worker] - math.ceil(tokens / PAGE), 0)

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        worker = self.town.named[attempt.worker]
        attempt.held = reservation = Reservation(self.number, attempt, math.ceil(asked["context_tokens"] / PAGE))
        self.town.loop.call_later(LATENCY_S, self._reserve, worker, reservation)
        # The answers come from the worker.
        return await self.town.loop.create_future()

    def _reserve(self, worker: SharedWorker, reservation: Reservation) -> None:
        if not reservation.attempt.closed:
            worker.reserve(reservation)

    def close(self, attempt: FakeAttempt) -> None:
        self.town.loop.call_later(LATENCY_S, self._end, attempt)

    def _end(self, attempt: FakeAttempt) -> None:
        worker = self.town.named[attempt.worker]
        worker.end(attempt.held)
        for router in self.town.routers:
            self.town.loop.call_later(LATENCY_S, router.hear, worker)


class Town:
    """Two routers and their workers, and what was granted when."""

    def __init__(self, *pages: int, prefill_limit: int = 99) -> None:
        self.loop = VirtualLoop()
        self.numbers = itertools.count(1)
        self.workers = [SharedWorker(self, f"d{number}", each) for number, each in enumerate(pages or (PAGES,))]
        self.named = {worker.name: worker for worker in self.workers}
        self.granted: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.asked: dict[str, tuple[int, int]] = {}
        """Router and pages of each request that waits."""
        self._answers: deque[tuple[Reservation, ReserveResult]] = deque()
        self.loop.run_until_complete(self._made(prefill_limit))

    async def _made(self, prefill_limit: int) -> None:
        self.routers = [RouterPool(self, number, prefill_limit) for number in range(2)]

    def tell(self, reservation: Reservation, answer: ReserveResult) -> None:
        # Timers of one moment go off in any order, but answers come in the order in which they were given.
        self._answers.append((reservation, answer))
        self.loop.call_later(LATENCY_S, self._hear)

    def _hear(self) -> None:
        reservation, answer = self._answers.popleft()
        if not reservation.attempt.closed:
            reservation.attempt.on_answer(answer)

    def ask(self, router: int, name: str, pages: int, tenant: str, *, again: bool = False) -> asyncio.Task[None]:
        return self.loop.spawn(self._held(router, name, pages, tenant, again))

    async def _held(self, router: int, name: str, pages: int, tenant: str, again: bool) -> None:
        came = self.loop.time()
        life, dispatcher = Lifecycle(State.QUEUED, came), self.routers[router].dispatcher
        request = PlacementRequest(name, 0, tenant, life, pages * PAGE - 1, 1, (0,), again)
        self.asked[name] = router, pages
        try:
            async with dispatcher.place(request, lambda event: None) as place:
                # No prompt goes to a prefill worker before its pages are reserved.
                assert cast(FakeAttempt, place.decode).held.granted
                del self.asked[name]
                self.granted[name] = self.loop.time()
                self.waited[name] = self.loop.time() - came
                await asyncio.sleep(HOLD_S / 2)
                dispatcher.release(place.prefill)
                await asyncio.sleep(HOLD_S / 2)
        finally:
            self.asked.pop(name, None)

    def small(self, router: int) -> None:
        """More small ones than the worker has room for, of 2 to 5 pages."""
        number = next(self.numbers)
        self.ask(router, f"small{router}/{number}", 2 + number % 4, "small")

    def run(self, seconds: float, every_s: float = 0.02) -> None:
        for _ in range(round(seconds / every_s)):
            for router in range(2):
                if len(self.routers[router].dispatcher.queue) < 20:
                    self.small(router)
            self.loop.advance(every_s)

    def check_idle(self) -> None:
        """Nothing that fits waits while pages are free that are not set aside."""
        self.loop.advance(8 * LATENCY_S)
        for name, (router, pages) in self.asked.items():
            if not any(router.open_requests[worker] < 99 for router in self.routers for worker in ("p", "q")):
                continue
            for worker in self.workers:
                assert pages > worker.free - worker.aside, f"{name} of router {router} fits {worker.name}"


@contextlib.contextmanager
def town_of(*pages: int, **settings: Any) -> Iterator[Town]:
    town = Town(*pages, **settings)
    yield town
    town.loop.finish()
    town.loop.advance(1.0)
    assert all(worker.free == worker.pages and not worker.waiting for worker in town.workers)
    assert all(router.assignments == 0 and router.running.total() == 0 for router in town.routers)
    town.loop.close()


def test_large_requests_at_two_routers_are_granted_within_the_bound_and_small_ones_go_on_meanwhile() -> None:
    with town_of() as town:
        town.run(3.0)
        before = [at for name, at in town.granted.items() if at >= 2.0]
        town.ask(0, "nearly all", 90, "large")
        town.ask(1, "half", 50, "large")
        town.run(12.0)
        # A generation is a second; the second large one is behind the first.
        bound = HOLD_S * (1 + math.ceil(math.log2(PAGES / 10))) + 0.5
        assert town.waited["nearly all"] <= bound
        assert town.waited["half"] <= bound + 3 * HOLD_S
        for router in range(2):
            times = sorted(at for name, at in town.granted.items() if name.startswith(f"small{router}"))
            gaps = [later - at for at, later in itertools.pairwise(times) if later <= town.granted["nearly all"]]
            # A generation, and the messages that tell of an end and of the next grant.
            assert max(gaps) <= HOLD_S + 2 * LATENCY_S + 1e-9, "a router's small requests stood still"
        # In the first generation half of the pages at least went on to small ones.
        during = [at for name, at in town.granted.items() if 3.0 <= at < 4.0 and name.startswith("small")]
        assert len(during) >= 0.4 * len(before)


def test_a_request_for_all_pages_does_not_starve() -> None:
    with town_of() as town:
        town.run(2.0)
        town.ask(0, "all", PAGES, "large")
        town.run(12.0)
        assert town.waited["all"] <= HOLD_S * (1 + math.ceil(math.log2(PAGES))) + 0.5


def test_pages_are_not_kept_for_a_request_that_was_cancelled() -> None:
    with town_of() as town:
        town.ask(0, "first", PAGES // 2, "large")
        town.loop.advance(0.1)
        large = town.ask(0, "all", PAGES, "large")
        town.loop.advance(0.1)
        town.ask(1, "other", PAGES // 2, "other")
        town.loop.advance(0.1)
        assert "other" not in town.granted
        large.cancel()
        town.loop.advance(0.1)
        assert town.granted["other"] < 0.6
        with contextlib.suppress(asyncio.CancelledError):
            large.result()


def test_two_routers_share_a_worker() -> None:
    with town_of() as town:
        town.run(5.0)
        shares = [sum(name.startswith(f"small{router}") for name in town.granted) for router in range(2)]
        assert min(shares) >= 0.4 * sum(shares), shares


@pytest.mark.parametrize("limit", [99, 1])
def test_a_full_worker_is_asked_once_for_each_request(limit: int) -> None:
    with town_of(prefill_limit=limit) as town:
        town.run(4.0)
        # Those that wait now have asked, or were cancelled; no others have.
        assert sum(router.asked for router in town.routers) <= len(town.granted) + 2 * 4


@given(st.integers(0, 2**32), st.sampled_from([(40,), (40, 40), (60, 20), (30, 30, 30)]))
@effort(25)
def test_no_page_is_idle_while_a_request_that_fits_waits_and_nobody_starves(seed: int, pages: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    with town_of(*pages) as town:
        tasks = []
        for number in range(60):
            large = rng.random() < 0.2
            size = rng.randint(8, max(pages)) if large else rng.randint(1, 7)
            tenant, again = rng.choice("abc"), rng.random() < 0.1
            tasks.append(town.ask(rng.randrange(2), f"{number}", size, tenant, again=again))
            if rng.random() < 0.1:
                tasks[rng.randrange(len(tasks))].cancel()
            town.loop.advance(rng.choice([0.0, 0.0, 0.01, 0.1, 0.5]))
            if rng.random() < 0.3:
                town.check_idle()
        for _ in range(100):
            town.loop.advance(1.0)
            town.check_idle()
        assert not town.asked
        assert all(task.done() for task in tasks)
