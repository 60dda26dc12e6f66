"""Requests that need nearly all pages of a worker, beside small ones, at two routers, in simulated time.

The dispatchers and what grants reservations at the worker are the real ones. A place is held for a second.
"""

import asyncio
import contextlib
import itertools
import math
from typing import Any, cast

from baton.config.router import RouterConfig
from baton.engine.fake import FakeEngine
from baton.errors import OutOfPages, Overloaded
from baton.lifecycle import Lifecycle, State
from baton.request import ReserveResult
from decode_svc.admission import Admission, SlotForecast
from decode_svc.attempts import Attempts, DecodeAttempt
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.scheduler import BatchPages
from router.dispatcher import Dispatcher
from router.placement.waiter import PlacementRequest
from router.workers.pool import WorkerPool
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import FakeAttempt, FakePool

PAGES, PAGE, HOLD_S, LATENCY_S = 100, 4, 1.0, 0.001


class SharedWorker:
    """A decode worker that several routers share."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.engine = FakeEngine(page_size=PAGE, pages=PAGES, slots=PAGES, max_model_len=PAGES * PAGE)
        self.attempts = Attempts(self.engine)
        self.admission = Admission(self.engine, self.attempts, 1, SlotForecast(PAGES, 0.0), BatchPages(), lambda: False)
        self.routers: list[RouterPool] = []
        self.asked = 0

    def reserve(self, session: int, request: Reserve) -> DecodeAttempt | ReserveResult:
        self.asked += 1
        try:
            return self.admission.admit(session, request, self.loop.time())
        except OutOfPages as error:
            return ReserveResult(False, str(error), False, 1.0, reservable_tokens=self.admission.free_context_tokens())
        except Overloaded as error:
            return ReserveResult(False, str(error), False, 1.0)

    def end(self, attempt: DecodeAttempt) -> None:
        self.attempts.end(attempt, self.loop.time())
        for router in self.routers:
            self.loop.call_later(LATENCY_S, router.notify)


class RouterPool(FakePool):
    """The worker as a dispatcher knows it."""

    def __init__(self, worker: SharedWorker, number: int) -> None:
        super().__init__()
        self.worker, self.number = worker, number
        worker.routers.append(self)
        self.dispatcher = Dispatcher(
            cast(WorkerPool, self), RouterConfig(prefill=("p:1",), decode=("d:1",), prefill_limit=99)
        )

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(LATENCY_S)
        request = Reserve(AttemptKey(attempt.request_id, 0), asked["context_tokens"], asked["max_new_tokens"], 1)
        answer = self.worker.reserve(self.number, request)
        if isinstance(answer, DecodeAttempt):
            attempt.held, answer = answer, ReserveResult(True, "", False)
        return answer

    def close(self, attempt: FakeAttempt) -> None:
        if attempt.held is not None:
            self.worker.end(attempt.held)

    def cancel_claim(self, attempt: FakeAttempt) -> None:
        assert self.worker.admission.cancel_claim((self.number, AttemptKey(attempt.request_id, 0)))


class Town:
    """Two routers, and what was granted when."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.loop.run_until_complete(self._made())
        self.granted: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.numbers = itertools.count()

    async def _made(self) -> None:
        self.worker = SharedWorker(self.loop)
        self.routers = [RouterPool(self.worker, number) for number in range(2)]

    def ask(self, router: int, name: str, pages: int, tenant: str) -> asyncio.Task[None]:
        return self.loop.spawn(self._held(self.routers[router].dispatcher, name, pages * PAGE - 1, tenant))

    async def _held(self, dispatcher: Dispatcher, name: str, context: int, tenant: str) -> None:
        came = self.loop.time()
        life = Lifecycle(State.QUEUED, came)
        asked = PlacementRequest(name, 0, tenant, life, context, 1, (0,), False)
        async with dispatcher.place(asked, lambda event: None) as place:
            self.granted[name] = self.loop.time()
            self.waited[name] = self.loop.time() - came
            dispatcher.release(place.prefill)
            await asyncio.sleep(HOLD_S)

    def small(self, router: int) -> None:
        """More small ones than the worker has room for, of 2 to 5 pages."""
        number = next(self.numbers)
        self.ask(router, f"small{router}/{number}", 2 + number % 4, "small")

    def run(self, seconds: float, every_s: float = 0.02) -> None:
        for _ in range(round(seconds / every_s)):
            for router in range(2):
                if len(self.routers[router].dispatcher.scheduler) < 20:
                    self.small(router)
            self.loop.advance(every_s)

    def close(self) -> None:
        self.loop.finish()
        assert self.worker.engine.audit() == {}
        self.loop.close()


def test_large_requests_at_two_routers_are_granted_within_the_bound_and_small_ones_go_on_meanwhile() -> None:
    town = Town()
    town.run(3.0)
    before = [at for name, at in town.granted.items() if at >= 2.0]
    town.ask(0, "nearly all", 90, "large")
    town.ask(1, "half", 50, "large")
    town.run(12.0)
    # A generation is a second, after which a router hears of it and comes back; the second claim is behind the first.
    bound = HOLD_S * (1 + math.ceil(math.log2(PAGES / 10))) + 0.5
    assert town.waited["nearly all"] <= bound
    assert town.waited["half"] <= bound + 2 * HOLD_S + HOLD_S
    for router in range(2):
        times = sorted(at for name, at in town.granted.items() if name.startswith(f"small{router}"))
        waits = [town.waited[name] for name, at in town.granted.items() if at < 3.0 + town.waited["nearly all"]]
        gaps = [later - at for at, later in itertools.pairwise(times) if later <= town.granted["nearly all"]]
        assert max(gaps) <= HOLD_S, "a router's small requests stood still"
        assert max(waits) <= bound
    # In the first generation half of the pages at least went on to small ones.
    during = [at for name, at in town.granted.items() if 3.0 <= at < 4.0 and name.startswith("small")]
    assert len(during) >= 0.4 * len(before)
    town.close()


def test_a_request_for_all_pages_does_not_starve() -> None:
    town = Town()
    town.run(2.0)
    town.ask(0, "all", PAGES, "large")
    town.run(12.0)
    assert town.waited["all"] <= HOLD_S * (1 + math.ceil(math.log2(PAGES))) + 0.5
    town.close()


def test_pages_are_not_kept_for_a_request_that_was_cancelled() -> None:
    town = Town()
    town.ask(0, "first", PAGES // 2, "large")
    town.loop.advance(0.1)
    large = town.ask(0, "all", PAGES, "large")
    town.loop.advance(0.1)
    town.ask(1, "other", PAGES // 2, "other")
    town.loop.advance(0.1)
    assert "other" not in town.granted
    large.cancel()
    town.loop.advance(0.1)
    town.routers[1].notify()
    town.loop.advance(0.1)
    assert town.granted["other"] < 0.6
    with contextlib.suppress(asyncio.CancelledError):
        large.result()
    town.close()


def test_a_full_worker_is_asked_a_few_times_for_each_update() -> None:
    town = Town()
    town.run(2.0)
    town.ask(0, "nearly all", 90, "large")
    town.loop.advance(0.1)
    asked, granted, rounds = town.worker.asked, len(town.granted), town.routers[0].dispatcher.scheduler.fleet_epoch
    town.run(2.0)
    rounds = town.routers[0].dispatcher.scheduler.fleet_epoch - rounds
    # Each grant is one; besides, each router's first asks at every update, and a few others may be mistaken.
    assert town.worker.asked - asked <= len(town.granted) - granted + 2 * 3 * rounds
    town.close()
