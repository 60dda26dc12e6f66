"""Time to the first token of one long prompt: cold, and again from each tier of the prefix cache, against the floors.

    python -m bench.checkpoint DIR
    python -m bench.prefix --model DIR [--tokens 4096] [--rounds 4] [--repeats 4]

One prefill and one decode worker, with an embedded Valkey. Each round asks a new prompt (cold), and then the same
prompt with another last token, so that all of it but the last block is cached:

    pool    at once
    redis   after pages and host memory were cleared (Admin.ClearCache)
    host    after another prompt took the pages: the pool has room for one

A sample counts for a tier only if the request's usage says that nine tenths of its tokens came from there. The speed of
a machine may change within a minute, so a warm prompt is compared with the cold one of its own round.

The floor of a tier is one decode step at this context, plus the prefix's bytes at the measured speed of what moves
them: a copy in memory by one thread (host), or pipelined GETs by a plain redis-py client (redis).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from typing import Any

import numpy
from redis import Redis

from baton import AsyncClient
from baton.kv.embedded import embedded_valkey
from baton.kv.format import KvFormat, KvPart
from baton.request import CachedTokens
from bench.checkpoint import HEAD_DIM, KV_HEADS, LAYERS
from bench.common import save
from bench.services import Services, Worker

TIERS = ("pool", "host", "redis")
FROM_TIER = 0.9
STEP_TOKENS = 12
SPARE_TOKENS = 64
THREADS = 2
FORMAT = KvFormat(tuple(KvPart(name, "bfloat16", (KV_HEADS, HEAD_DIM)) for name in ("k", "v")), LAYERS, 16)


class PrefixRun:
    """The samples of one run, in seconds to the first token; `ratios` are cold over warm, one a round."""

    def __init__(self, client: AsyncClient, workers: list[Worker], redis: Redis, length: int, seed: int) -> None:
        self._client, self._workers, self._redis, self._length = client, workers, redis, length
        self._random = random.Random(seed)
        self._other: list[int] = []
        self.ttft: dict[str, list[float]] = {name: [] for name in ("cold", *TIERS)}
        self.ratios: dict[str, list[float]] = {tier: [] for tier in TIERS}
        self.steps: list[float] = []
        self.moving: dict[str, list[float]] = {tier: [] for tier in TIERS}
        self.strays: list[str] = []

    async def warm_up(self) -> None:
        """Run each shape once, with the prompt that takes the pages from others later."""
        self._other = self._fresh()
        await self._ask(self._other, STEP_TOKENS)

    async def round(self, repeats: int) -> None:
        """One cold prompt, then `repeats` samples of each tier."""
        prompt = self._fresh()
        cold, _ = await self._ask(prompt)
        self.ttft["cold"].append(cold[0])
        for tier in TIERS:
            before = len(self.ttft[tier])
            for _ in range(repeats):
                await self._prepare(tier, prompt)
                await self._warm(tier, prompt)
            if new := self.ttft[tier][before:]:
                self.ratios[tier].append(cold[0] / statistics.median(new))
        arrivals, _ = await self._ask(prompt, STEP_TOKENS)
        # The first gap holds the rest of the handoff.
        self.steps += [later - earlier for earlier, later in itertools.pairwise(arrivals[1:])]
        self.moving["pool"].append(0.0)
        self.moving["host"].append(self._copy_seconds())
        self.moving["redis"].append(self._get_seconds())

    async def _prepare(self, tier: str, prompt: list[int]) -> None:
        await self._written()
        if tier == "redis":
            for worker in self._workers:
                async with AsyncClient(worker.control) as client:
                    await client.clear_cache(redis=False)
        elif tier == "host":
            # Both prompts are in host memory now, and each takes the pages from the other.
            await self._ask(prompt)
            await self._ask(self._other)
            await self._written()

    async def _warm(self, tier: str, prompt: list[int]) -> None:
        arrivals, cached = await self._ask([*prompt[:-1], self._random.randrange(1, 32000)])
        if getattr(cached, tier) < FROM_TIER * len(prompt):
            self.strays.append(f"{tier}: {cached}")
        else:
            self.ttft[tier].append(arrivals[0])

    async def _ask(self, prompt: list[int], tokens: int = 1) -> tuple[list[float], CachedTokens]:
        """Seconds from the call to each token, and where the prompt's KV came from."""
        began, arrivals, usage = time.perf_counter(), list[float](), None
        async for delta in self._client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            arrivals += [time.perf_counter() - began] * len(delta.tokens)
            usage = delta.usage or usage
        if len(arrivals) != tokens or usage is None:
            raise RuntimeError(f"{len(arrivals)} tokens instead of {tokens}")
        return arrivals, usage.cached

    async def _written(self) -> None:
        """Wait until the number of blocks in Redis, which are written last, stands still."""
        before, same = -1, 0
        while same < 4:
            now = int(self._redis.dbsize())
            before, same = now, same + 1 if now == before else 0
            await asyncio.sleep(0.05)

    def _fresh(self) -> list[int]:
        return [self._random.randrange(1, 32000) for _ in range(self._length)]

    def _copy_seconds(self) -> float:
        source = numpy.ones(self._length * FORMAT.token_bytes, dtype=numpy.uint8)
        target = numpy.zeros_like(source)
        began = time.perf_counter()
        numpy.copyto(target, source)
        return time.perf_counter() - began

    def _get_seconds(self) -> float:
        keys, size = [f"bench:{n}" for n in range(self._length // FORMAT.block_size)], FORMAT.block_bytes
        for key in keys:
            self._redis.set(key, os.urandom(size))
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        began = time.perf_counter()
        pipeline.execute()
        took = time.perf_counter() - began
        self._redis.delete(*keys)
        return took

    def results(self) -> dict[str, Any]:
        """Medians in milliseconds, and the ratios of each round."""
        step = statistics.median(self.steps)
        results: dict[str, Any] = {
            "prompt_tokens": self._length,
            "prefix_bytes": self._length * FORMAT.token_bytes,
            "cold_ms": _ms(statistics.median(self.ttft["cold"])),
            "step_ms": _ms(step),
            "strays": self.strays,
        }
        for tier in (tier for tier in TIERS if self.ttft[tier]):
            warm, floor = statistics.median(self.ttft[tier]), step + statistics.median(self.moving[tier])
            results[tier] = {
                "ttft_ms": _ms(warm),
                "each_ms": [_ms(each) for each in self.ttft[tier]],
                "cold_over_warm": round(statistics.median(self.ratios[tier]), 1),
                "cold_over_warm_each": [round(each, 1) for each in self.ratios[tier]],
                "floor_ms": _ms(floor),
                "warm_over_floor": round(warm / floor, 2),
            }
        return results


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the fleet, run all rounds, and return the results."""
    page_bytes = (arguments.tokens + SPARE_TOKENS) * FORMAT.token_bytes
    common = {"dtype": "bfloat16", "threads": THREADS, "max_model_len": 2 * arguments.tokens, "stall_s": 60.0}
    async with embedded_valkey(2 << 30) as server:
        with Services(model=arguments.model, redis=server, **common) as services:
            prefill = services.worker(
                "prefill", kv_memory=page_bytes, chunk_size=512, kv_home="device", host_memory="1GiB"
            )
            decode = services.worker("decode", slots=2, kv_memory=2 * page_bytes)
            router = services.router([prefill], [decode], prefill_silence_s=60.0)
            async with AsyncClient(router) as client:
                redis = Redis.from_url(server, protocol=2)
                run = PrefixRun(client, [prefill, decode], redis, arguments.tokens, arguments.seed)
                await run.warm_up()
                for _ in range(arguments.rounds):
                    await run.round(arguments.repeats)
            return run.results()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory that bench.checkpoint wrote")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    save("prefix", asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
