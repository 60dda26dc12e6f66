"""A router in simulated time before workers that are killed: by chance, or by one of the requests.

Workers work by themselves: a prefill worker computes one prompt at a time, a decode worker takes a step of all its
sequences at a time, and who was killed is there again after a while, as another incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.config.router import RouterConfig
from baton.engine.fake import expected_tokens
from baton.errors import BatonError
from baton.request import SamplingParams
from baton.worker.status import WorkerRole
from router.dispatcher import Dispatcher
from router.output import OutputProcessor
from router.request import Request
from router.request_runner import RequestRunner
from router.serving.threads import TenantThreads
from router.workers import link as link_module
from router.workers.pool import WorkerPool
from tests.property.fleet import SimulatedFleet, Worker
from tests.property.virtual import VirtualLoop


@dataclass(eq=False)
class Stream:
    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    error: BatonError | None = None
    over: bool = False

    @property
    def right(self) -> bool:
        request = self.request
        return self.error is None and all(
            len(tokens) == request.max_tokens
            and tokens == expected_tokens(request.prompt_ids, len(tokens), params=request.params, choice_index=choice)
            for choice, tokens in self.tokens.items()
        )


class Storm:
    def __init__(
        self,
        loop: VirtualLoop,
        *,
        prefills: int = 2,
        decodes: int = 2,
        mixed: int = 0,
        step_s: float = 0.05,
        back_s: float = 2.0,
    ) -> None:
        self.loop = loop
        self.fleet = SimulatedFleet(prefills, decodes, mixed)
        self.streams: list[Stream] = []
        self.deaths = 0
        self.paused = False
        """Whether workers compute nothing just now."""
        self.back_s = back_s
        self.kills_prefill: Callable[[Any], bool] = lambda asked: False
        """Whether a prompt kills the worker that computes it."""
        self.computes_slowly: Callable[[Any], bool] = lambda asked: False
        """Whether a prompt takes as long as the test wants."""
        self.kills_decode: Callable[[Any, int], bool] = lambda asked, index: False
        """Whether a sequence kills the worker that computes its token of that index."""
        self._step_s = step_s
        self._first = 0

    def beside(self) -> Storm:
        """Another router with the same workers, and with clients of its own; only `routing` and `stream` are for it."""
        other = copy.copy(self)
        other.streams, other._first = [], 100
        return other

    @contextlib.asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[None]:
        async with self.routing(**settings):
            work = [asyncio.create_task(self._prefill(worker)) for worker in self.fleet.prefills]
            work += [asyncio.create_task(self._decode(worker)) for worker in self.fleet.decodes]
            await asyncio.sleep(1.0)
            try:
                yield
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def routing(self, **settings: Any) -> AsyncIterator[None]:
        config = RouterConfig(
            prefill=self.fleet.addresses(WorkerRole.PREFILL),
            decode=self.fleet.addresses(WorkerRole.DECODE),
            mixed=self.fleet.addresses(WorkerRole.MIXED),
            served_model_name="m",
            **settings,
        )
        self.pool = WorkerPool(config, "router", "t")
        async with self.pool.run():
            self.dispatcher = Dispatcher(self.pool, config)
            self.request_runner = RequestRunner(self.pool, self.dispatcher, config, TenantThreads(1))
            try:
                yield
            finally:
                self.dispatcher.close()
                await self.request_runner.wait_stopped()

    def stream(self, *, max_tokens: int, n: int = 1, within_s: float = 3600.0, prompt: int = 3) -> asyncio.Task[None]:
        """Send a request with so many prompt tokens."""
        number, now = self._first + len(self.streams), self.loop.now
        params = SamplingParams(max_tokens=max_tokens, seed=7, n=n)
        request = Request(f"r{number}", [number + 1, *range(2, prompt + 1)], params, max_tokens, now, now + within_s)
        stream = Stream(request, {choice: [] for choice in range(n)})
        self.streams.append(stream)
        return asyncio.create_task(self._read(stream))

    async def _read(self, stream: Stream) -> None:
        output = OutputProcessor(stream.request, self.loop.time)
        serving = asyncio.create_task(self.request_runner.run(stream.request, output))
        try:
            usage = None
            while usage is None:
                news = await output.queue.take()
                for choice, delta in news.deltas.items():
                    stream.tokens[choice] += [token.token_id for token in delta.tokens]
                usage = news.usage
        except BatonError as error:
            stream.error = error
        finally:
            stream.over = True
            await serving

    def kill(self, worker: Worker) -> None:
        """End a worker; it comes back by itself."""
        if worker.up:
            self.deaths += 1
            worker.die()
            self.loop.call_later(self.back_s, worker.live)

    async def until(self, true: Callable[[], object]) -> None:
        for _ in range(100_000):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never comes to that")

    def busy(self) -> list[Worker]:
        return [worker for worker in self.fleet.decodes if worker.held]

    def break_session(self, worker: Worker) -> None:
        """End what is open at a worker but its watch."""
        for call in {held.session for held in worker.held.values()}:
            call.end()

    async def _prefill(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for job in worker.jobs[:1] if not self.paused else ():
                if self.kills_prefill(job.request):
                    self.kill(worker)
                elif not self.computes_slowly(job.request):
                    worker.finish(job)

    async def _decode(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            if self.paused:
                continue
            for held in list(worker.held.values()):
                asked = self.fleet.prefilled.get(held.start.source.transfer_id) if held.start else None
                if asked is None:
                    continue
                first = len(asked.output_token_ids) + 1
                if any(self.kills_decode(asked, held.said.get(c, first)) for c in asked.choice_indexes):
                    self.kill(worker)
                    break
            else:
                for held in list(worker.held.values()):
                    worker.step(held)

    async def kills(self, rng: random.Random, count: int, every_s: tuple[float, float]) -> None:
        """Kill whoever is up, again and again."""
        for _ in range(count):
            await asyncio.sleep(rng.uniform(*every_s))
            if up := [worker for worker in self.fleet.workers.values() if worker.up]:
                self.kill(rng.choice(up))


@contextlib.contextmanager
def simulated(**settings: Any) -> Iterator[Storm]:
    """A storm on a loop of its own."""
    loop = VirtualLoop()
    storm = Storm(loop, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_module, "control_channel", storm.fleet.channel)
        try:
            yield storm
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.settle()
            loop.close()
