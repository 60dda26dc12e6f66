"""What the prefix cache saves: time to the first token of one long prompt, cold and from each tier, against the floors.

    python -m bench.checkpoint DIR
    python -m bench.prefix --model DIR [--tokens 4096] [--rounds 4] [--repeats 5]

Real processes: two fleets of one prefill and one decode worker, of which only one serves at a time, one with all tiers
of the cache and one with none. All in one run, in turns, on the client's clock:

    cold    a new prompt: on the fleet without a cache, with the cache told off, and with the cache on
    pool    the same prompt again
    redis   after pages and host memory were dropped (Admin.ClearCache), on prefill and on decode
    host    after another prompt took the pages: the pool has room for one

A sample counts for a tier only if the request's own usage says that nine tenths of its tokens came from there. Every
warm prompt is a whole-prompt hit, of which the last token is computed.

The floor of a tier is what its bytes take at the bandwidth that this run measured, with nothing else (host: a copy in
memory by one thread; Redis: the best plain client for values of this size, see bench.prefix_redis), plus one decode
step at this context, measured on the decode worker. For the pool no bytes move, and the floor is the step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from redis import Redis

from baton import AsyncClient
from baton.bench.stats import percentile
from baton.kv.embedded import embedded_valkey
from baton.request import CachedTokens
from bench.common import save
from bench.prefix_redis import Throughput, kv_format
from bench.prefix_redis import table as redis_table
from bench.services import Services, Worker

TIERS = ("pool", "host", "redis")
BARS = {"pool": 80.0, "redis": 40.0}
MOST_OFF = 1.01
FLOOR_AIM = 2.0
FROM_TIER = 0.9
STEP_TOKENS = 12
SPARE_TOKENS = 64
SHORT_TOKENS = 16
THREADS = 2
CHUNK_TOKENS = 512
"""Fixed, or one slow chunk would make the later ones of its fleet smaller, and the comparison one of chunk sizes."""
PATIENCE_S = 60.0
"""A machine that others load as well may need long for a chunk, and a second attempt would count as a cold start."""


@dataclass
class Fleets:
    """Clients of the fleet with the cache and of the one without, and the workers of the first."""

    on: AsyncClient
    off: AsyncClient
    workers: list[Worker]
    redis: Redis


@dataclass
class Samples:
    """Seconds to the first token, by what was asked; `strays` are warm ones that came from elsewhere."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        """One more."""
        self.ttft.setdefault(name, []).append(seconds)


async def ask(
    client: AsyncClient, prompt: Sequence[int], cache: str = "read_write", tokens: int = 1
) -> tuple[list[float], CachedTokens]:
    """Seconds from the call to each token, and where the prompt's KV came from."""
    began, arrivals, usage = time.perf_counter(), list[float](), None
    async for delta in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, cache=cache):
        arrivals += [time.perf_counter() - began] * len(delta.tokens)
        usage = delta.usage or usage
    if len(arrivals) != tokens or usage is None:
        raise RuntimeError(f"{len(arrivals)} tokens instead of {tokens}")
    return arrivals, usage.cached


class Run:
    """One run; `length` tokens of prompt."""

    def __init__(self, fleets: Fleets, length: int, vocabulary: int, seed: int) -> None:
        self._fleets = fleets
        self._length = length
        self._chosen = random.Random(seed)
        self._vocabulary = vocabulary
        self._other: list[int] = []
        self.samples = Samples()

    async def warm_up(self) -> None:
        """Everything once, and the prompt that takes the pages from others."""
        for client in (self._fleets.off, self._fleets.on):
            await ask(client, self._fresh(256), tokens=4)
        self._other = self._fresh(self._length)
        await ask(self._fleets.on, self._other)
        await self._settled()

    async def round(self, number: int, repeats: int) -> None:
        """One sample of each cold way, and `repeats` from each tier."""
        prompt = await self._cold(number)
        for _ in range(repeats):
            await self._warm("pool", prompt)
        for _ in range(repeats):
            await self._clear()
            await self._warm("redis", prompt)
        await self._clear()
        # Both are in host memory from here on, and each takes the pages from the other.
        await ask(self._fleets.on, prompt)
        await ask(self._fleets.on, self._other)
        await self._settled()
        for _ in range(repeats):
            await self._warm("host", prompt)
            await self._settled()
            await ask(self._fleets.on, self._other)
            await self._settled()
        await self._steps(prompt, repeats)
        self.samples.copies += [copy_seconds(self._bytes()) for _ in range(repeats)]

    async def _cold(self, number: int) -> list[int]:
        """Cold in three ways, in another order each round; returns the prompt that is cached now."""
        ways = [("cold, no cache", "read_write"), ("cold, cache off", "off"), ("cold, cache on", "read_write")]
        prompts = {}
        for turn in range(3):
            name, policy = ways[(turn + number) % 3]
            prompts[name] = self._fresh(self._length)
            client = self._fleets.off if name == "cold, no cache" else self._fleets.on
            arrivals, cached = await ask(client, prompts[name], policy)
            if cached.total:
                raise RuntimeError(f"{name}: {cached.total} tokens were cached")
            self.samples.add(name, arrivals[0])
            await self._settled()
        return prompts["cold, cache on"]

    async def _warm(self, tier: str, prompt: list[int]) -> None:
        arrivals, cached = await ask(self._fleets.on, prompt)
        if getattr(cached, tier) < FROM_TIER * len(prompt):
            self.samples.strays.append(f"{tier}: {cached}")
        else:
            self.samples.add(tier, arrivals[0])

    async def _steps(self, prompt: list[int], repeats: int) -> None:
        """Times between tokens at this context, and what the way through the fleet takes without a long prompt."""
        arrivals, _ = await ask(self._fleets.on, prompt, tokens=STEP_TOKENS)
        # The first gap is the handoff.
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals[1:])]
        self.samples.steps.append(statistics.median(gaps))
        for _ in range(repeats):
            arrivals, _ = await ask(self._fleets.on, self._fresh(SHORT_TOKENS), "off")
            self.samples.add("short prompt", arrivals[0])

    async def _clear(self) -> None:
        await self._settled()
        for worker in self._fleets.workers:
            async with AsyncClient(worker.control) as client:
                await client.clear_cache(redis=False)

    async def _settled(self) -> None:
        """Wait until no blocks are being written: Redis is what is written last."""
        before, same = -1, 0
        while same < 4:
            now = int(self._fleets.redis.dbsize())
            before, same = now, same + 1 if now == before else 0
            await asyncio.sleep(0.05)

    def _fresh(self, length: int) -> list[int]:
        return [self._chosen.randrange(1, self._vocabulary) for _ in range(length)]

    def _bytes(self) -> int:
        return self._length * kv_format().token_bytes


def copy_seconds(size: int) -> float:
    """Seconds in which one thread copies `size` bytes in memory."""
    source = numpy.ones(size, dtype=numpy.uint8)
    target = numpy.zeros(size, dtype=numpy.uint8)
    began = time.perf_counter()
    numpy.copyto(target, source)
    return time.perf_counter() - began


def report(run: Run, length: int, redis_seconds: float) -> dict[str, Any]:
    """Medians in ms, floors and ratios; `redis_seconds` is what a plain client takes for the prefix."""
    samples = run.samples
    ttft = {name: statistics.median(values) for name, values in samples.ttft.items()}
    cold, step = ttft["cold, cache on"], statistics.median(samples.steps)
    moving = {"pool": 0.0, "host": statistics.median(samples.copies), "redis": redis_seconds}
    warm = {}
    for tier in (tier for tier in TIERS if tier in ttft):
        floor = moving[tier] + step
        warm[tier] = {
            **_spread(samples.ttft[tier]),
            "floor_ms": _ms(floor),
            "moving_ms": _ms(moving[tier]),
            "cold_over_warm": round(cold / ttft[tier], 1),
            "warm_over_floor": round(ttft[tier] / floor, 2),
            **({"bar": BARS[tier], "reached": cold / ttft[tier] >= BARS[tier]} if tier in BARS else {}),
        }
    cold_names = [name for name in ttft if name.startswith("cold")]
    return {
        "prompt_tokens": length,
        "prefix_bytes": length * kv_format().token_bytes,
        "cold": {name.partition(", ")[2]: _spread(samples.ttft[name]) for name in cold_names},
        "cold_tokens_per_s": round(length / cold, 1),
        "cold_on_over_no_cache": _ratios(samples, "cold, cache on", "cold, no cache"),
        "cold_on_over_cache_off": _ratios(samples, "cold, cache on", "cold, cache off"),
        "warm": warm,
        "strays": samples.strays,
        "one_step_ms": _ms(step),
        "short_prompt": _spread(samples.ttft["short prompt"]),
        "copy_gb_per_s": round(length * kv_format().token_bytes / moving["host"] / 1e9, 2),
    }


def _ratios(samples: Samples, above: str, below: str) -> dict[str, Any]:
    """Of the pairs of each round."""
    pairs = zip(samples.ttft[above], samples.ttft[below], strict=True)
    ratios = [one / other for one, other in pairs]
    median = statistics.median(ratios)
    return {
        "median": round(median, 4),
        "each": [round(ratio, 4) for ratio in ratios],
        "of_medians": round(statistics.median(samples.ttft[above]) / statistics.median(samples.ttft[below]), 4),
        "bar": MOST_OFF,
        "reached": median <= MOST_OFF,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "ttft_ms": _ms(statistics.median(values)),
        "least_ms": _ms(min(values)),
        "p90_ms": _ms(percentile(values, 0.9)),
        "samples": len(values),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


@contextlib.contextmanager
def fleets(arguments: argparse.Namespace) -> Iterator[tuple[str, str, list[Worker], str]]:
    """Addresses of the routers with and without a cache, the workers of the first, and the server."""
    page_bytes = (arguments.tokens + SPARE_TOKENS) * kv_format().token_bytes
    common = {"dtype": "bfloat16", "threads": THREADS, "max_model_len": 2 * arguments.tokens, "stall_s": PATIENCE_S}
    with embedded_valkey(2 << 30) as server, Services(model=arguments.model, **common) as services:
        on = {"redis": server, "cache_memory": "1GiB"}
        none = {"redis": "none", "cache_memory": 0}
        decode = {"slots": 2, "kv_memory": 2 * page_bytes}
        workers = [
            services.worker("prefill", kv_memory=page_bytes, chunk_size=CHUNK_TOKENS, **on),
            services.worker("decode", **decode, **on),
        ]
        without = [
            services.worker("prefill", kv_memory=page_bytes, chunk_size=CHUNK_TOKENS, **none),
            services.worker("decode", **decode, **none),
        ]
        routers = [
            services.router([prefill], [decode], prefill_silence_s=PATIENCE_S) for prefill, decode in (workers, without)
        ]
        yield routers[0], routers[1], workers, server


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with fleets(arguments) as (on, off, workers, server):
        throughput = Throughput(server, arguments.tokens // kv_format().block_size)
        async with AsyncClient(on) as with_cache, AsyncClient(off) as without:
            vocabulary = (await with_cache.get_model()).vocab_size
            found = Fleets(with_cache, without, workers, Redis.from_url(server, protocol=2))
            run = Run(found, arguments.tokens, vocabulary, arguments.seed)
            await run.warm_up()
            for number in range(arguments.rounds):
                await run.round(number, arguments.repeats)
                for _ in range(2):
                    await throughput.round()
        results = report(run, arguments.tokens, throughput.best_seconds("get"))
        await throughput.close()
        return {**results, "redis": throughput.results()}


def table(results: dict[str, Any]) -> str:
    """The whole on one screen."""
    lines = [f"{results['prompt_tokens']} tokens, {results['prefix_bytes'] / 1e6:.1f} MB of KV"]
    lines += [f"cold, {name:10} {cold['ttft_ms']:9.1f} ms" for name, cold in results["cold"].items()]
    for name in ("cold_on_over_no_cache", "cold_on_over_cache_off"):
        lines += [f"{name:24} {results[name]['median']:.4f} (bar {MOST_OFF}) of {results[name]['each']}"]
    for tier, warm in results["warm"].items():
        bar = f" (bar {warm['bar']:g})" if "bar" in warm else ""
        lines.append(
            f"{tier:6} {warm['ttft_ms']:8.1f} ms  cold/warm {warm['cold_over_warm']:6.1f}{bar}  "
            f"floor {warm['floor_ms']:7.1f} ms  warm/floor {warm['warm_over_floor']:.2f} (aim {FLOOR_AIM:g})  "
            f"n={warm['samples']}"
        )
    lines.append(f"one step {results['one_step_ms']} ms, short prompt {results['short_prompt']['ttft_ms']} ms")
    lines.append(f"strays: {len(results['strays'])} {results['strays'][:2]}")
    return "\n".join([*lines, redis_table(results["redis"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory that bench.checkpoint wrote")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    results = asyncio.run(measure(parser.parse_args()))
    save("prefix", results)
    print(table(results))


if __name__ == "__main__":
    main()
