"""Requests that `bench.versions` measures; runs with the interpreter and the client of the version that serves.

    python bench/version_requests.py HOST:PORT

Each line of its input is `{"NAME": {"turn": N}}` with a name of WORKLOADS; the answer is `{"s": seconds}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

from baton import AsyncClient

VOCABULARY = 4000
Requests = Callable[[AsyncClient, int], Awaitable[object]]


def prompt(name: str, turn: int, number: int, tokens: int) -> list[int]:
    """Token ids that no other turn has."""
    seed = sum(name.encode()) * 7919 + turn * 104729 + number * 1299709
    return [3 + (seed + index * (seed % 97 + 5)) % (VOCABULARY - 3) for index in range(tokens)]


async def complete(client: AsyncClient, ids: list[int], outputs: int) -> None:
    await client.complete(ids, max_tokens=outputs, temperature=0.0, ignore_eos=True)


async def decode(client: AsyncClient, turn: int) -> None:
    await asyncio.gather(*(complete(client, prompt("decode", turn, each, 16), 32) for each in range(8)))


async def prefill(client: AsyncClient, turn: int) -> None:
    await complete(client, prompt("prefill", turn, 0, 256), 1)


async def prefix(client: AsyncClient, turn: int) -> None:
    await complete(client, prompt("prefix", 0, 0, 2048) + prompt("prefix", turn, 1, 32), 1)


async def router(client: AsyncClient, turn: int) -> None:
    await asyncio.gather(*(complete(client, prompt("router", turn, each, 16), 4) for each in range(128)))


async def transfer(client: AsyncClient, turn: int) -> None:
    await asyncio.gather(*(complete(client, prompt("transfer", turn, each, 256), 1) for each in range(4)))


WORKLOADS: dict[str, Requests] = {each.__name__: each for each in (decode, prefill, prefix, router, transfer)}


async def serve(address: str) -> None:
    async with AsyncClient(address) as client:
        for line in iter(sys.stdin.readline, ""):
            ((name, given),) = json.loads(line).items()
            began = time.perf_counter()
            await WORKLOADS[name](client, given["turn"])
            print(json.dumps({"s": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
