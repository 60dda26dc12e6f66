"""Redis goes away under load: no request fails or waits for long, the counters say why, and hits come back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from baton import AsyncClient, bundled
from baton.engine.fake import FakeEngine, expected_tokens
from tests.fleet import Fleet
from tests.redis_server import Server, running

BUDGET_S = 0.4
MOST_BUDGETS = 5
FAULT_S = 2.5
"""Longer than a request may be held up, so that one that waits for the end of the fault is seen."""
AT_A_TIME = 3
SHARED, TAIL, TOKENS = 96, 16, 3
BACK_S = 20.0
"""More than the longest pause between two tries at a server that was gone, and a try."""

Fault = Callable[[Server], Awaitable[None]]


async def killed(server: Server) -> None:
    server.kill()
    await asyncio.sleep(FAULT_S)
    await asyncio.to_thread(server.start)


async def stalled(server: Server) -> None:
    with server.client() as client:
        client.client_pause(int(FAULT_S * 1e3))
    await asyncio.sleep(FAULT_S)


async def flushed(server: Server) -> None:
    with server.client() as client:
        client.flushall()


@dataclass(slots=True)
class Seen:
    """One request: seconds it took, whether its tokens were right, tokens that came from Redis."""

    took: float
    right: bool
    redis: int


class Load:
    """Requests with a few beginnings, too many for the worker's pages; each has an end of its own."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._chosen = random.Random(1)
        self._beginnings = [self._some(SHARED) for _ in range(8)]
        self._next = 0
        self.seen: list[Seen] = []

    async def ask(self) -> Seen:
        """One request, which must not fail."""
        self._next += 1
        prompt = self._beginnings[self._next % len(self._beginnings)] + self._some(TAIL)
        began = time.perf_counter()
        done = await self._client.complete(prompt, max_tokens=TOKENS, temperature=0, timeout=60)
        assert done.usage is not None
        right = done.token_ids == expected_tokens(prompt, TOKENS)
        self.seen.append(Seen(time.perf_counter() - began, right, done.usage.cached.redis))
        return self.seen[-1]

    async def until(self, over: Callable[[], bool]) -> None:
        """Some at a time, until it is over."""

        async def one_by_one() -> None:
            while not over():
                await self.ask()

        await asyncio.gather(*(one_by_one() for _ in range(AT_A_TIME)))

    def _some(self, length: int) -> list[int]:
        return [self._chosen.randrange(1000) for _ in range(length)]


def counts(name: str, label: str) -> dict[str, float]:
    """A counter of this process by one label."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name)
    return {sample.labels[label]: sample.value for sample in samples}


def gained(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {key for key, value in after.items() if value > before.get(key, 0.0)}


@pytest.mark.parametrize(("fault", "reasons"), [(killed, {"connection"}), (stalled, {"timeout"}), (flushed, set())])
async def test_no_request_fails_when_redis_does(fault: Fault, reasons: set[str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache_memory": 0, "cache_budget_s": BUDGET_S}
    with running("valkey", tmp_path) as server:
        async with Fleet(bundled.path(), **settings) as fleet:
            # Chunks take their time, or nothing would be worth fetching; pages are few, or Redis would not be asked.
            engine = FakeEngine(pages=32, chunk_time=0.01)
            prefill = await fleet.prefill(engine=engine, redis=server.url, chunk_size=16)
            decode = await fleet.decode(engine=FakeEngine(pages=64))
            load = Load(await fleet.router([prefill], [decode]))
            await load.until(lambda: len(load.seen) >= 24)
            assert load.seen[-1].redis or load.seen[-2].redis, "nothing comes from Redis to begin with"
            before = counts("baton_prefix_faults_total", "reason")
            undisturbed = len(load.seen)
            faulting = asyncio.create_task(fault(server))
            await load.until(lambda: faulting.done() and len(load.seen) >= undisturbed + 24)
            await faulting
            during = load.seen[undisturbed:]
            assert gained(before, counts("baton_prefix_faults_total", "reason")) >= reasons
            end = time.monotonic() + BACK_S
            await load.until(lambda: bool(load.seen[-1].redis) or time.monotonic() > end)
            assert load.seen[-1].redis, "hits do not come back"
    assert all(seen.right for seen in load.seen)
    assert max(seen.took for seen in during) <= MOST_BUDGETS * BUDGET_S
    assert any(not seen.redis for seen in during), "the fault was not felt"
