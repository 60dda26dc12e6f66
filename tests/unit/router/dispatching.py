"""A dispatcher on a pool of workers that answer as a test says; no network."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from baton.config.router import RouterConfig
from baton.kv.format import KvFormat, KvPart
from baton.lifecycle import Lifecycle, State
from baton.request import ReserveResult
from router.dispatcher import Dispatcher, Placement
from router.placement.policy import DecodeView, FleetView, PrefillView
from router.placement.prefix_directory import PrefixDirectory
from router.placement.queue import PlacementRequest
from router.workers.failures import AvoidedWorker, Suspicion, WorkerLosses
from router.workers.pool import WorkerPool

KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=16)
GRANTED, REFUSED = ReserveResult(True), ReserveResult(False, "drains")
FULL = ReserveResult(False, "full", waiting=True)
TOO_LARGE = ReserveResult(False, "needs 9 pages, there are 4", True)


class FakeAssignment:
    cached_tokens = 0
    fingerprint = "f"
    incarnation = "incarnation-p"
    shards = ()
    consumer = ""

    def __init__(self, pool: FakePool, worker: str) -> None:
        self.link = SimpleNamespace(address=worker, name=f"{worker} at {worker}:1", namespace=None, channel=None)
        self._pool, self._worker, self._open = pool, worker, True
        self.lost = asyncio.Event()
        # A lost worker is not asked to abandon an export.
        self.lost.set()
        pool.open_requests[worker] += 1

    def add_suspect(self, request_id: str, deliver: object) -> None:
        return

    def remove_suspect(self) -> None:
        return

    def release(self) -> bool:
        was_open, self._open = self._open, False
        self._pool.open_requests[self._worker] -= was_open
        return was_open


class FakeAttempt:
    """An attempt at a decode worker; `held` is for the pool's own use."""

    def __init__(self, pool: FakePool, request_id: str, worker: str) -> None:
        self._pool, self.request_id, self.worker = pool, request_id, worker
        self.held: Any = None
        self.kept = self.closed = False
        self._answering: asyncio.Task[None] | None = None
        pool.running[worker] += 1

    def reserve(self, on_answer: Callable[[ReserveResult], None], **asked: Any) -> None:
        self._pool.asked += 1
        self.on_answer, self._asked = on_answer, asked
        self.answer()

    def answer(self) -> None:
        """Answer at once or, if the attempt waits, perhaps again."""
        self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        answer = await self._pool.reserve(self, **self._asked)
        waited = self in self._pool.waiting
        if not answer.waiting and waited:
            self._pool.waiting.remove(self)
        elif answer.waiting and not waited:
            self._pool.waiting.append(self)
        if not (answer.waiting and waited):
            self.on_answer(answer)

    def keep(self) -> None:
        self.kept = True

    def start(self, **started: Any) -> None:
        return

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        if self._answering is not None:
            self._answering.cancel()
        if self in self._pool.waiting:
            self._pool.waiting.remove(self)
        self._pool.running[self.worker] -= 1
        self._pool.closed += 1
        self._pool.close(self)


class FakePool:
    """Workers that answer as a test says; stands for pool, link and session at once.

    `open_requests` has the number of requests at each prefill worker, `by_name` the answers of decode workers. `order`
    tells who asked, and whom it asked where decode workers are named. `waiting` are the attempts that wait at decode
    workers; these answer again when a test changes the answers.
    """

    open = True
    name = "d at d:1"
    consumer = "incarnation-d"
    fingerprint = "f"
    namespace = status = None

    def __init__(self, prefill: tuple[str, ...] = ("p",), **answers: ReserveResult) -> None:
        self.open_requests = dict.fromkeys(prefill, 0)
        self.by_name = answers or {"d": GRANTED}
        self._names = bool(answers)
        self.running: Counter[str] = Counter()
        self.closed = self.asked = 0
        self.there = True
        self.notify: Callable[[], None] = lambda: None
        self.session = self
        self.order: list[str] = []
        self.waiting: list[FakeAttempt] = []
        self.prefixes = PrefixDirectory()
        self.losses = WorkerLosses()
        self.namespaces = frozenset[Any]()
        self.serving = True
        self.isolated: frozenset[str] = frozenset()
        self.incarnations: dict[str, str] = {}
        self._worker = ""
        self.numbers: list[int] = []
        """Number of the reservation of each call."""

    @property
    def assignments(self) -> int:
        return sum(self.open_requests.values())

    @property
    def fleet(self) -> FleetView:
        prefill = [PrefillView(name, KV, open_requests=own) for name, own in self.open_requests.items()]
        decode = [
            DecodeView(
                name,
                KV,
                free_tokens=0 if answer.waiting else 10**6,
                free_slots=1,
                open_requests=self.running[name],
                incarnation=self.incarnations.get(name, ""),
            )
            for name, answer in self.by_name.items()
        ]
        fleet = FleetView(prefill, decode if self.there else [])
        fleet.isolated = self.isolated
        return fleet

    def answer_all(self, answer: ReserveResult) -> None:
        self.answer(**dict.fromkeys(self.by_name, answer))

    def answer(self, **answers: ReserveResult) -> None:
        """Change the answers of these decode workers, also to attempts that wait, and tell that something changed."""
        self.by_name |= answers
        self.notify()
        self.answer_again()

    def answer_again(self) -> None:
        for attempt in self.waiting:
            attempt.answer()

    async def reserve(self, attempt: FakeAttempt, **asked: Any) -> ReserveResult:
        await asyncio.sleep(0)
        return self.by_name[attempt.worker]

    def close(self, attempt: FakeAttempt) -> None:
        return

    def isolate(self, addresses: frozenset[str]) -> None:
        if addresses != self.isolated:
            self.isolated = addresses
            self.notify()

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.notify = listener

    def describe_missing(self, waited_s: float = 0.0) -> str:
        return "no decode worker is there" + (f" after a wait of {waited_s:g} s" if waited_s else "")

    def subtract_free(self, tokens: int, slots: int) -> None:
        return

    def prefill_link(self, address: str) -> FakePool:
        self._worker = address
        return self

    def decode_link(self, address: str) -> FakePool:
        self._worker = address
        return self

    def assign(self, tokens: int, cached_tokens: int = 0) -> FakeAssignment:
        return FakeAssignment(self, self._worker)

    def begin_call(self, request_id: str, number: int, reservation: int, deliver: object) -> FakeAttempt:
        self.order.append(f"{request_id} {self._worker}" if self._names else request_id)
        self.numbers.append(reservation)
        return FakeAttempt(self, request_id, self._worker)


class Held:
    """A request that takes a place and keeps it until told to go."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        name: str,
        *,
        again: bool = False,
        needs_decode: bool = True,
        isolated: Suspicion = Suspicion.NONE,
        deadline: float = math.inf,
        tokens: int = 8,
        tenant: str = "",
        request: str = "",
        avoid: tuple[str, ...] = (),
        choices: int = 1,
        output: int = 4,
    ) -> None:
        self.placed = asyncio.Event()
        self.go = asyncio.Event()
        self.place: Placement | None = None
        self.suspected = isolated
        self.lifecycle = Lifecycle(State.QUEUED, 0.0, request_deadline=deadline)
        avoided = frozenset(AvoidedWorker(worker, "") for worker in avoid)
        asked = PlacementRequest(
            request or name,
            int(again),
            tenant,
            self.lifecycle,
            tokens,
            output,
            tuple(range(choices)),
            again,
            needs_decode,
            avoided_workers=avoided,
        )
        self.task = asyncio.create_task(self._run(dispatcher, asked))

    async def _run(self, dispatcher: Dispatcher, asked: PlacementRequest) -> None:
        async with dispatcher.place(asked, lambda event: None, lambda: self.suspected) as self.place:
            self.placed.set()
            await self.go.wait()

    async def end(self) -> None:
        self.go.set()
        await self.task

    async def until_placed(self) -> None:
        async with asyncio.timeout(60):
            await self.placed.wait()

    async def finish(self) -> None:
        """Wait for the place, and give it back."""
        await self.until_placed()
        await self.end()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def dispatcher(pool: FakePool, **settings: Any) -> Dispatcher:
    config = RouterConfig(prefill=("p:1",), decode=("d:1",), **settings)
    return Dispatcher(cast(WorkerPool, pool), config)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def ask(dispatcher: Dispatcher, name: str, **asked: Any) -> Held:
    """A request that has asked all workers that it can: if all lack room, it waits there."""
    held = Held(dispatcher, name, **asked)
    await settle()
    return held


async def place(dispatcher: Dispatcher, name: str, **asked: Any) -> Held:
    """A request that has its place."""
    held = Held(dispatcher, name, **asked)
    await held.until_placed()
    return held
