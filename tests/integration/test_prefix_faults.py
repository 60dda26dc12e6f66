"""Redis goes away under load: no request fails or waits for long, the counters say why, and hits come back."""

import asyncio
import random
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
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
AT_A_TIME = 3
SHARED, TAIL, TOKENS = 96, 16, 3
ENOUGH = 24
"""Requests: some of each beginning."""

Felt = Callable[[], Awaitable[None]]
"""Returns once requests have been answered while the fault lasts. Had they waited for its end, none would be."""
Fault = Callable[[Server, Felt], Awaitable[None]]


async def killed(server: Server, felt: Felt) -> None:
    server.kill()
    await felt()
    await asyncio.to_thread(server.start)


async def stalled(server: Server, felt: Felt) -> None:
    with server.stalled():
        await felt()


async def flushed(server: Server, felt: Felt) -> None:
    with server.client() as client:
        client.flushall()
    await felt()


@dataclass(slots=True)
class Seen:
    """One request: whether its tokens were right, and the tokens that came from Redis."""

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
        self.news = asyncio.Event()

    async def ask(self) -> Seen:
        """One request, which must not fail."""
        self._next += 1
        prompt = self._beginnings[self._next % len(self._beginnings)] + self._some(TAIL)
        done = await self._client.complete(prompt, max_tokens=TOKENS, temperature=0, timeout=60)
        right = done.token_ids == expected_tokens(prompt, TOKENS)
        self.seen.append(Seen(right, done.usage.cached.redis))
        self.news.set()
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
    settings: dict[str, Any] = {"cache_budget_s": BUDGET_S}
    with running("valkey", tmp_path) as server:
        async with Fleet(bundled.path(), **settings) as fleet:
            # Chunks take their time, or nothing would be worth fetching; pages are few, or Redis would not be asked.
            engine = FakeEngine(pages=32, chunk_time=0.01)
            prefill = await fleet.prefill(engine=engine, redis=server.url, chunk_size=16)
            decode = await fleet.decode(engine=FakeEngine(pages=64))
            load = Load(await fleet.router([prefill], [decode]))
            await load.until(lambda: len(load.seen) >= ENOUGH and bool(load.seen[-1].redis))
            before = counts("baton_prefix_faults_total", "reason")
            undisturbed = len(load.seen)

            async def felt() -> None:
                async with asyncio.timeout(60):
                    while not (
                        len(load.seen) >= undisturbed + ENOUGH
                        and any(not seen.redis for seen in load.seen[undisturbed:])
                        and gained(before, counts("baton_prefix_faults_total", "reason")) >= reasons
                    ):
                        load.news.clear()
                        await load.news.wait()

            faulting = asyncio.create_task(fault(server, felt))
            await load.until(faulting.done)
            await faulting
            async with asyncio.timeout(60):  # hits come back
                await load.until(lambda: bool(load.seen[-1].redis))
    assert all(seen.right for seen in load.seen)


async def test_names_that_do_not_resolve_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentinels by name, and a resolver that hangs: transfers and page copies have threads of their own."""
    look_up, hanging, over = socket.getaddrinfo, threading.Event(), threading.Event()

    def getaddrinfo(host: Any, *args: Any, **kind: Any) -> Any:
        if str(host).endswith(".invalid"):
            hanging.set()
            over.wait()
        return look_up(host, *args, **kind)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    # One thread: a single look-up that hangs takes all that other work could have.
    names = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(names)
    url = "redis+sentinel://one.invalid:1,two.invalid:2,three.invalid:3/primary"
    try:
        async with Fleet(bundled.path(), cache_budget_s=0.05) as fleet:
            prefill = await fleet.prefill(engine=FakeEngine(pages=64), redis=url)
            decode = await fleet.decode(engine=FakeEngine(pages=64), redis=url)
            load = Load(await fleet.router([prefill], [decode]))
            for _ in range(4):
                assert (await load.ask()).right
        assert hanging.is_set()
    finally:
        over.set()
