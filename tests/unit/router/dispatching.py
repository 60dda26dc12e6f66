"""A dispatcher on a pool of workers that answer as a test says; no network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

from baton.config.router import RouterConfig
from baton.kv.format import KvFormat, KvPart
from baton.lifecycle import Lifecycle, State
from baton.worker.messages import Reserved
from router.dispatcher import Dispatcher
from router.placement.fleet import DecodeView, FleetView, PrefillView
from router.placement.policy import PlacementQuery
from router.placement.prefix_directory import PrefixDirectory
from router.placement.scheduler import PlacementRequest
from router.retries import AvoidedWorker
from router.workers.pool import Pool
from router.workers.reservation import Placement

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
GRANTED, FULL = Reserved(True, "", False), Reserved(False, "full", False)
NEVER = Reserved(False, "needs 9 pages, there are 4", True)


class FakeTicket:
    cached_tokens = 0

    def __init__(self, pool: FakePool) -> None:
        self._pool = self.link = pool
        self._open = True
        pool.tickets += 1

    def attach(self, request_id: str, deliver: object) -> None:
        return

    def detach(self) -> None:
        return

    def release(self) -> bool:
        was_open, self._open = self._open, False
        self._pool.tickets -= was_open
        return was_open


class FakeAttempt:
    def __init__(self, pool: FakePool) -> None:
        self._pool = pool

    async def reserve(self, **asked: object) -> Reserved:
        await asyncio.sleep(0)
        return self._pool.answer()

    def close(self) -> None:
        self._pool.closed += 1


class FakePool:
    """One prefill and one decode worker; stands for pool, link and session at once."""

    open = True
    name = "d at d:1"
    consumer = "incarnation-d"
    namespace = status = None

    def __init__(self) -> None:
        self.tickets = self.closed = self.asked = 0
        self.answers: Reserved = GRANTED
        self.there = True
        self.news: Callable[[], None] = lambda: None
        self.session = self
        self.order: list[str] = []
        self.prefixes = PrefixDirectory()
        self.kept: frozenset[str] = frozenset()

    @property
    def fleet(self) -> FleetView:
        prefill, decode = self.views()
        fleet = FleetView(prefill, decode)
        fleet.kept = self.kept
        return fleet

    def views(self) -> tuple[list[PrefillView], list[DecodeView]]:
        decode = [DecodeView("d", KV, free_tokens=1, free_slots=1)] if self.there else []
        return [PrefillView("p", KV, own_requests=self.tickets)], decode

    def keep(self, names: frozenset[str]) -> None:
        if names != self.kept:
            self.kept = names
            self.news()

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.news = listener

    def describe_missing(self, waited_s: float = 0.0) -> str:
        return "no decode worker is there" + (f" after a wait of {waited_s:g} s" if waited_s else "")

    def subtract_room(self, tokens: int, slots: int) -> None:
        return

    def prefill_link(self, name: str) -> FakePool:
        return self

    def decode_link(self, name: str) -> FakePool:
        return self

    def open_ticket(self, tokens: int, cached_tokens: int = 0) -> FakeTicket:
        return FakeTicket(self)

    def attempt(self, request_id: str, number: int, deliver: object) -> FakeAttempt:
        self.order.append(request_id)
        return FakeAttempt(self)

    def answer(self) -> Reserved:
        self.asked += 1
        return self.answers


class Held:
    """A request that takes a place and keeps it until told to go."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        name: str,
        *,
        again: bool = False,
        decodes: bool = True,
        alone: bool = False,
        deadline: float = math.inf,
        tokens: int = 8,
        tenant: str = "",
        request: str = "",
        avoid: tuple[str, ...] = (),
        choices: int = 1,
    ) -> None:
        self.placed = asyncio.Event()
        self.go = asyncio.Event()
        self.place: Placement | None = None
        query = PlacementQuery(tokens, decodes)
        self.suspected = alone
        self.life = Lifecycle(State.LINE, 0.0, request_deadline=deadline)
        avoided = frozenset(AvoidedWorker(worker, "") for worker in avoid)
        asked = PlacementRequest(
            request or name,
            int(again),
            tenant,
            self.life,
            query,
            tokens,
            4,
            tuple(range(choices)),
            again,
            avoided=avoided,
        )
        self.task = asyncio.create_task(self._run(dispatcher, asked))

    async def _run(self, dispatcher: Dispatcher, asked: PlacementRequest) -> None:
        async with dispatcher.place(asked, lambda event: None, lambda: self.suspected) as self.place:
            self.placed.set()
            await self.go.wait()

    async def end(self) -> None:
        self.go.set()
        await self.task


def dispatcher(pool: FakePool, **settings: Any) -> Dispatcher:
    config = RouterConfig(prefill=("p:1",), decode=("d:1",), **settings)
    return Dispatcher(cast(Pool, pool), config)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Workers(FakePool):
    """One prefill worker and decode workers by name, each with its answers; counts who is where."""

    def __init__(self, **answers: Reserved) -> None:
        super().__init__()
        self.by_name = answers
        self.running = dict.fromkeys(answers, 0)
        self._name = ""

    def views(self) -> tuple[list[PrefillView], list[DecodeView]]:
        decode = [DecodeView(name, KV, free_slots=1, own_requests=self.running[name]) for name in self.by_name]
        return [PrefillView("p", KV, own_requests=self.tickets)], decode

    def decode_link(self, name: str) -> FakePool:
        self._name = name
        return self

    def attempt(self, request_id: str, number: int, deliver: object) -> FakeAttempt:
        self.order.append(f"{request_id} {self._name}")
        return WorkersAttempt(self, self._name)


class WorkersAttempt(FakeAttempt):
    def __init__(self, workers: Workers, name: str) -> None:
        super().__init__(workers)
        self._workers, self._name = workers, name
        workers.running[name] += 1

    async def reserve(self, **asked: object) -> Reserved:
        await asyncio.sleep(0)
        return self._workers.by_name[self._name]

    def close(self) -> None:
        self._workers.running[self._name] -= 1
