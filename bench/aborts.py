"""How long memory outlives its request: from a client's cancel until no process lists the request any more.

Requests are cancelled in each state in turn; then the ledgers of router, prefill and decode are asked again and again
until none of them lists the request. What is measured includes the question itself, a few milliseconds.

    python -m bench.aborts [--times 100]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from baton import AsyncClient
from baton.pb import admin_pb2, admin_pb2_grpc
from bench.common import percentile, save
from bench.fakes import FakeFleet, fake_fleet

LIMIT_S = 30.0
LONG = 300
"""Tokens of a request that does not end by itself while it is looked at."""


class Books:
    """The ledgers of a fleet."""

    def __init__(self, channels: dict[str, grpc.aio.Channel]) -> None:
        self._stubs: dict[str, Any] = {name: admin_pb2_grpc.AdminStub(channel) for name, channel in channels.items()}

    async def states(self) -> dict[str, set[str]]:
        """By request, the states in which any process lists it, each as "role:state"."""
        found: dict[str, set[str]] = {}
        answers = await asyncio.gather(*(stub.Ledger(admin_pb2.LedgerRequest()) for stub in self._stubs.values()))
        for name, answer in zip(self._stubs, answers, strict=True):
            if answer.violation:
                raise RuntimeError(f"{name}: {answer.violation}")
            for entry in answer.entries:
                found.setdefault(entry.owner.partition("/")[0], set()).add(f"{name}:{entry.state}")
        return found

    async def until(self, others: set[str], state: str) -> str:
        """Wait until a request that is not one of `others` is in `state`; its id."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for request, states in (await self.states()).items():
                    if request not in others and state in states:
                        return request

    async def gone(self, request: str) -> float:
        """Wait until no process lists the request; seconds."""
        began = time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            while request in await self.states():
                pass
        return time.perf_counter() - began


@contextlib.asynccontextmanager
async def asked(client: AsyncClient, chosen: random.Random) -> AsyncIterator[asyncio.Task[None]]:
    """A request under way, cancelled at the end of the block at the latest."""

    async def consume(stream: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(stream) as deltas:
            async for _ in deltas:
                pass

    prompt = [chosen.randrange(1000) for _ in range(200)]
    task = asyncio.create_task(consume(client.generate(prompt, max_tokens=LONG, temperature=0.0)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cancelled_in(books: Books, client: AsyncClient, state: str, blockers: int, chosen: random.Random) -> float:
    """Seconds until the memory of a request that was cancelled in `state` was back; `blockers` others run meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        others: set[str] = set()
        for _ in range(blockers):
            await stack.enter_async_context(asked(client, chosen))
            others.add(await books.until(others, "decode:decoding"))
        task = await stack.enter_async_context(asked(client, chosen))
        request = await books.until(others, state)
        await asyncio.sleep(chosen.uniform(0, 0.05))
        task.cancel()
        took = await books.gone(request)
    for other in others:
        await books.gone(other)
    return took


async def measure(times: int, fleets: dict[str, tuple[FakeFleet, int]]) -> dict[str, Any]:
    chosen, results = random.Random(1), {}
    for state, (fleet, blockers) in fleets.items():
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(fleet.router))
            addresses = {"router": fleet.router, "prefill": fleet.prefill, "decode": fleet.decode}
            channels = {
                name: await stack.enter_async_context(grpc.aio.insecure_channel(address))
                for name, address in addresses.items()
            }
            books = Books(channels)
            took = [await cancelled_in(books, client, state, blockers, chosen) for _ in range(times)]
        results[state] = {f"p{share}_ms": round(1e3 * percentile(took, share / 100), 1) for share in (50, 99, 100)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    times = parser.parse_args().times
    slow = ["--chunk-time", "0.1", "--chunk-size", "32", "--pages", "1024"]
    step = ["--step-time", "0.02"]
    with (
        fake_fleet(prefill_flags=slow, decode_flags=[*step, "--slots", "2", "--pages", "1024"]) as roomy,
        fake_fleet(
            prefill_flags=slow, decode_flags=[*step, "--slots", "4", "--pages", "36", "--reserve-tokens", "16"]
        ) as tight,
    ):
        fleets = {
            "router:line": (roomy, 2),
            "prefill:prefilling": (roomy, 0),
            "router:transferring": (roomy, 0),
            "decode:decoding": (roomy, 0),
            "decode:paused": (tight, 1),
        }
        save("aborts", asyncio.run(measure(times, fleets)))


if __name__ == "__main__":
    main()
