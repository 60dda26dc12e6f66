"""What the prefix cache saves: time to the first token of one long prompt, cold and from each tier, against the floors.

    python -m bench.checkpoint DIR
    python -m bench.prefix --model DIR [--tokens 4096] [--rounds 4] [--repeats 5] [--short-rounds 30] [--cold-only]

Real processes: two fleets of one prefill and one decode worker, of which only one serves at a time, one with all tiers
of the cache and one with none. All in one run, in turns, on the client's clock:

    cold    a new prompt: on the fleet without a cache, with the cache on, and with the cache told off
    pool    the same prompt again
    redis   after pages and host memory were dropped (Admin.ClearCache), on prefill and on decode
    host    after another prompt took the pages: the pool has room for one

A machine's speed may change by half within a minute. So cold prompts go in the order none, on, off, off, on, none, and
each is compared with its neighbour alone: two pairs a round of each comparison, one in either order. What counts is the
median of the pairs' ratios, with its interval (see bench.prefix_cold): the bar of 1.01 is reached if all of it is
below, missed if all of it is above, and else nothing is shown. Beside the clock stands the CPU time of the fleet's
processes, and of Redis: until the first token, and from then on until everything was written.

Few long prompts say little about 1%. So there are two more witnesses: many pairs of short prompts (SHORT_COLD tokens,
where what does not grow with the prompt, as the look-up's round trip, weighs more), and the account of what the cache
adds before the first token, counted by itself (see bench.prefix_account). --cold-only leaves out all that is warm, and
writes prefix-cold.json instead of prefix.json.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from redis import Redis

from baton import AsyncClient
from baton.kv.embedded import embedded_valkey
from baton.request import CachedTokens
from bench.common import save
from bench.prefix_account import Ready, accounts, beside, busiest, thread_seconds, until_ready
from bench.prefix_account import lines as account_lines
from bench.prefix_cold import COLD, NONE, OFF, ON, Cold, compared, ms, spread
from bench.prefix_cold import lines as cold_lines
from bench.prefix_redis import Throughput, kv_format
from bench.prefix_redis import table as redis_table
from bench.services import Services, Worker, cpu_seconds

TIERS = ("pool", "host", "redis")
BARS = {"pool": 80.0, "redis": 40.0}
FLOOR_AIM = 2.0
FROM_TIER = 0.9
STEP_TOKENS = 12
SPARE_TOKENS = 64
SHORT_TOKENS = 16
SHORT_COLD = 512
READY_ROUNDS = 15
THREADS = 2
CHUNK_TOKENS = 512
"""Fixed, or one slow chunk would make the later ones of its fleet smaller, and the comparison one of chunk sizes."""
PATIENCE_S = 60.0
"""A machine that others load as well may need long for a chunk, and a second attempt would count as a cold start."""


@dataclass
class Fleets:
    """Clients of the fleet with the cache and of the one without, the workers of the first, and of both fleets the
    processes and the control listener of the prefill worker."""

    on: AsyncClient
    none: AsyncClient
    workers: list[Worker]
    redis: Redis
    pids: dict[str, dict[str, int]]
    prefills: dict[str, str]

    def of(self, way: str) -> tuple[AsyncClient, str]:
        """The client to ask for a cold prompt, and its fleet's name."""
        return (self.none, "none") if way == NONE else (self.on, "on")


@dataclass
class Samples:
    """Seconds to the first token, by what was asked; `strays` are warm ones that came from elsewhere.

    `ratios`: of each round, the cold prompts' median with the cache on over that of a tier.
    """

    ttft: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    cold: list[Cold] = field(default_factory=list)
    short: list[Cold] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def add(self, name: str, seconds: float) -> None:
        """One more."""
        self.ttft.setdefault(name, []).append(seconds)


async def ask(
    client: AsyncClient,
    prompt: Sequence[int],
    cache: str = "read_write",
    tokens: int = 1,
    came: Callable[[], object] = lambda: None,
) -> tuple[list[float], CachedTokens]:
    """Seconds from the call to each token, and where the prompt's KV came from; `came` is called as they come."""
    began, arrivals, usage = time.perf_counter(), list[float](), None
    async for delta in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, cache=cache):
        arrivals += [time.perf_counter() - began] * len(delta.tokens)
        if delta.tokens:
            came()
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
        self._compute: dict[str, frozenset[int]] = {}
        self.samples = Samples()

    async def warm_up(self) -> None:
        """Everything once, and the prompt that takes the pages from others."""
        self._other = self._fresh(self._length)
        for way in (NONE, ON):
            client, fleet = self._fleets.of(way)
            await ask(client, self._fresh(256), tokens=4)
            prefill = self._fleets.pids[fleet]["prefill"]
            before = thread_seconds(prefill)
            # At full length in both: kernels and working memory are made for each new shape.
            await ask(client, self._other)
            self._compute[fleet] = busiest(before, thread_seconds(prefill), THREADS)
        await self._settled()

    async def cold_round(self) -> list[int]:
        """Two samples of each cold way; returns the last prompt with the cache on."""
        prompts = {way: await self._cold(way, self._length, self.samples.cold) for way in COLD}
        return prompts[ON]

    async def short_round(self) -> None:
        """The same with short prompts."""
        for way in COLD:
            await self._cold(way, SHORT_COLD, self.samples.short)

    async def ready_round(self) -> None:
        """Two samples in each way of prompts that only become ready to be computed."""
        for way in COLD:
            address = self._fleets.prefills[self._fleets.of(way)[1]]
            self.samples.ready.append(await until_ready(address, self._fresh(self._length), way))

    async def warm_round(self, prompt: list[int], repeats: int) -> None:
        """`repeats` samples of a prompt that is in all tiers from each of them; follows a cold round."""
        before = {tier: len(self.samples.ttft.get(tier, ())) for tier in TIERS}
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
        # The machine's speed changes from minute to minute, so a tier is compared with the cold prompts of its round.
        cold = statistics.median([each.ttft for each in self.samples.cold[-len(COLD) :] if each.way == ON])
        for tier, known in before.items():
            if new := self.samples.ttft.get(tier, [])[known:]:
                self.samples.ratios.setdefault(tier, []).append(cold / statistics.median(new))
        await self._steps(prompt, repeats)
        self.samples.copies += [copy_seconds(self._bytes()) for _ in range(repeats)]

    async def _cold(self, way: str, length: int, samples: list[Cold]) -> list[int]:
        """One new prompt; returns it."""
        client, fleet = self._fleets.of(way)
        pids, compute = self._fleets.pids[fleet], self._compute[fleet]
        prompt = self._fresh(length)
        taken = [_taken(pids)]
        arrivals, cached = await ask(
            client, prompt, "off" if way == OFF else "read_write", came=lambda: taken.append(_taken(pids))
        )
        if cached.total:
            raise RuntimeError(f"{way}: {cached.total} tokens were cached")
        await self._settled()
        (before, threads), (first, threads_then) = taken[:2]
        until = _minus(first, before)
        others = {role: took for role, took in until.items() if role != "prefill"}
        apart = {**beside(pids["prefill"], compute, threads, threads_then), **others}
        samples.append(Cold(way, arrivals[0], until, _minus(_taken(pids)[0], first), apart))
        return prompt

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


def _taken(pids: dict[str, int]) -> tuple[dict[str, float], dict[int, float]]:
    """CPU seconds so far of each process, and of each thread of the prefill worker."""
    return {role: cpu_seconds(pid) for role, pid in pids.items()}, thread_seconds(pids["prefill"])


def _minus(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {role: value - before[role] for role, value in now.items()}


def copy_seconds(size: int) -> float:
    """Seconds in which one thread copies `size` bytes in memory."""
    source = numpy.ones(size, dtype=numpy.uint8)
    target = numpy.zeros(size, dtype=numpy.uint8)
    began = time.perf_counter()
    numpy.copyto(target, source)
    return time.perf_counter() - began


def cold_report(samples: Samples, length: int) -> dict[str, Any]:
    """All about cold prompts."""
    cold = statistics.median(each.ttft for each in samples.cold if each.way == ON)
    return {
        "prompt_tokens": length,
        "prefix_bytes": length * kv_format().token_bytes,
        **compared(samples.cold),
        "cold_tokens_per_s": round(length / cold, 1),
        "cold_account": accounts(samples.cold, samples.ready),
        "cold_short": {"prompt_tokens": SHORT_COLD, **compared(samples.short)},
    }


def warm_report(samples: Samples, length: int, redis_seconds: float) -> dict[str, Any]:
    """Medians in ms, floors and ratios; `redis_seconds` is what a plain client takes for the prefix."""
    ttft = {name: statistics.median(values) for name, values in samples.ttft.items()}
    ratios = {tier: statistics.median(each) for tier, each in samples.ratios.items()}
    step = statistics.median(samples.steps)
    moving = {"pool": 0.0, "host": statistics.median(samples.copies), "redis": redis_seconds}
    warm = {}
    for tier in (tier for tier in TIERS if tier in ttft):
        floor = moving[tier] + step
        warm[tier] = {
            **spread(samples.ttft[tier]),
            "floor_ms": ms(floor),
            "moving_ms": ms(moving[tier]),
            "cold_over_warm": round(ratios[tier], 1),
            "cold_over_warm_each": [round(each, 1) for each in samples.ratios[tier]],
            "warm_over_floor": round(ttft[tier] / floor, 2),
            **({"bar": BARS[tier], "reached": ratios[tier] >= BARS[tier]} if tier in BARS else {}),
        }
    return {
        "warm": warm,
        "strays": samples.strays,
        "one_step_ms": ms(step),
        "short_prompt": spread(samples.ttft["short prompt"]),
        "copy_gb_per_s": round(length * kv_format().token_bytes / moving["host"] / 1e9, 2),
    }


@contextlib.contextmanager
def fleets(arguments: argparse.Namespace) -> Iterator[tuple[Fleets, str]]:
    """The fleet with a cache and the one without, and the URL of the server."""
    page_bytes = (arguments.tokens + SPARE_TOKENS) * kv_format().token_bytes
    common = {"dtype": "bfloat16", "threads": THREADS, "max_model_len": 2 * arguments.tokens, "stall_s": PATIENCE_S}
    with embedded_valkey(2 << 30) as server, Services(model=arguments.model, **common) as services:
        redis = Redis.from_url(server, protocol=2)
        routers, pids, workers, prefills = {}, {}, {}, {}
        for name, cache in (
            ("on", {"redis": server, "cache_memory": "1GiB"}),
            ("none", {"redis": "none", "cache_memory": 0}),
        ):
            prefill = services.worker("prefill", kv_memory=page_bytes, chunk_size=CHUNK_TOKENS, **cache)
            decode = services.worker("decode", slots=2, kv_memory=2 * page_bytes, **cache)
            routers[name] = services.router([prefill], [decode], prefill_silence_s=PATIENCE_S)
            workers[name], prefills[name] = [prefill, decode], prefill.control
            places = {"prefill": prefill.control, "decode": decode.control, "router": routers[name]}
            pids[name] = {role: services.pid(address) for role, address in places.items()}
        pids["on"]["redis"] = int(redis.info("server")["process_id"])
        clients = AsyncClient(routers["on"]), AsyncClient(routers["none"])
        yield Fleets(*clients, workers["on"], redis, pids, prefills), server


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with fleets(arguments) as (found, server):
        async with found.on, found.none:
            vocabulary = (await found.on.get_model()).vocab_size
            run = Run(found, arguments.tokens, vocabulary, arguments.seed)
            await run.warm_up()
            throughput = None if arguments.cold_only else Throughput(server, arguments.tokens // kv_format().block_size)
            for _ in range(arguments.rounds):
                prompt = await run.cold_round()
                if throughput is not None:
                    await run.warm_round(prompt, arguments.repeats)
                    for _ in range(2):
                        await throughput.round()
            for _ in range(READY_ROUNDS):
                await run.ready_round()
            for _ in range(arguments.short_rounds):
                await run.short_round()
        results = cold_report(run.samples, arguments.tokens)
        if throughput is None:
            return results
        results |= warm_report(run.samples, arguments.tokens, throughput.best_seconds("get"))
        await throughput.close()
        return {**results, "redis": throughput.results()}


def table(results: dict[str, Any]) -> str:
    """The whole on one screen."""
    lines = [f"{results['prompt_tokens']} tokens, {results['prefix_bytes'] / 1e6:.1f} MB of KV"]
    lines += [*cold_lines(results), *account_lines(results["cold_account"])]
    lines += [f"{results['cold_short']['prompt_tokens']} tokens", *cold_lines(results["cold_short"])]
    if "warm" not in results:
        return "\n".join(lines)
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
    parser.add_argument("--short-rounds", type=int, default=30, help="six short cold prompts each")
    parser.add_argument("--cold-only", action="store_true", help="only what the cache costs a new prompt")
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments))
    save("prefix-cold" if arguments.cold_only else "prefix", results)
    print(table(results))


if __name__ == "__main__":
    main()
