"""What a cold prompt's first token waits for because of the cache, counted by itself; see bench.prefix.

The clock can't tell 1% of a prompt on a machine whose speed changes by half. But nearly all of a cold prompt is the
forward pass, on the compute threads, and that is the same with the cache and without. What the cache adds is apart:

    wait    before the first chunk: naming blocks, asking pages and Redis, the decision. From the call of the prefill
            worker until it says that the prompt is ready to be computed, on the client's clock
    beside  CPU time until the first token of all other threads of the prefill worker, and of decode, router and Redis

Both are small, and hardly depend on how fast the forward pass happens to be, so that their differences between
neighbours (cache on, and off or none) are exact to a few milliseconds. Their sum is what the first token can be later
at most: whatever else runs, whether it holds the interpreter's lock, a lock of the page pool, or a core that a compute
thread wanted, delays the forward pass by no more than the CPU time that it takes, as long as nobody else wants the
cores. It counts too much, since the wait is CPU time for the most part, and work on a free core delays nothing. Its
noise comes from what all processes do every second anyway, as long as a prompt takes. It does not contain
what the cache may do to the speed of the compute threads by its use of memory, for which the pairs' ratios stand.

Each of the two has an interval of the median of its differences with a confidence of 97.5%, so that both hold at once
with 95%; the account's bounds are the sums of theirs. Shares are of the median time to the first token without.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton import AsyncClient
from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import CachePolicy, SamplingParams
from baton.rpc.convert import cache_policy_to_proto, sampling_to_proto
from bench.prefix_cold import COMPARISONS, CONFIDENCE, NOT_SHOWN, OFF, ON, Cold, interval, ms, neighbours

MOST_SHARE = 0.01
"""The bar: this much of a cold prompt's time to the first token."""
PATIENCE_S = 60.0
_EACH = (1 + CONFIDENCE) / 2
LOOP, OTHERS = "prefill, event loop", "prefill, other threads"


@dataclass(frozen=True)
class Ready:
    """One prompt that was not computed: seconds until the prefill worker was ready to."""

    way: str
    seconds: float


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds that each thread of a process has taken so far, to the nanosecond while it sleeps (Linux)."""
    took = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            took[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return took


def busiest(before: Mapping[int, float], after: Mapping[int, float], count: int) -> frozenset[int]:
    """The threads that took most in between: while a prompt is computed, the compute threads."""
    return frozenset(heapq.nlargest(count, after, key=lambda thread: after[thread] - before.get(thread, 0.0)))


def beside(
    pid: int, compute: frozenset[int], before: Mapping[int, float], after: Mapping[int, float]
) -> dict[str, float]:
    """CPU seconds of a prefill worker's threads but the compute threads: of its event loop, and of the others."""
    took = {thread: after[thread] - before.get(thread, 0.0) for thread in after.keys() - compute}
    loop = took.pop(pid, 0.0)
    return {LOOP: loop, OTHERS: sum(took.values())}


async def until_ready(address: str, prompt: Sequence[int], way: str) -> Ready:
    """Ask the prefill worker at `address` for a new prompt, and take the request back as soon as it is ready.

    Returns once the worker holds nothing any more.
    """
    request = prefill_pb2.PrefillRequest(
        request_id=str(uuid.uuid4()),
        prompt_token_ids=prompt,
        choice_indexes=[0],
        sampling=sampling_to_proto(SamplingParams(max_tokens=1, temperature=0.0)),
        cache=cache_policy_to_proto(CachePolicy.OFF if way == OFF else CachePolicy.READ_WRITE),
    )
    async with grpc.aio.insecure_channel(address) as channel, AsyncClient(address) as client:
        async with asyncio.timeout(PATIENCE_S):
            await channel.channel_ready()
            began = time.perf_counter()
            call = prefill_pb2_grpc.PrefillStub(channel).Prefill(request)
            event = await call.read()
            took = time.perf_counter() - began
            call.cancel()
            ready = isinstance(event, prefill_pb2.PrefillEvent) and event.WhichOneof("event") == "progress"
            if not ready or event.progress.cached_tokens:
                raise RuntimeError(f"{way}: instead of being ready: {event}")
            while (await client.ledger()).entries:
                pass
    return Ready(way, took)


def accounts(samples: Sequence[Cold], ready: Sequence[Ready]) -> dict[str, Any]:
    """The account of each comparison, by its name."""
    return {name: account(samples, ready, below) for name, below in COMPARISONS.items()}


def account(samples: Sequence[Cold], ready: Sequence[Ready], below: str) -> dict[str, Any]:
    """What the cache adds before the first token, against asking `below`: ms, and shares of the whole."""
    pairs = neighbours(samples, ON, below)
    whole = statistics.median(low.ttft for _, low in pairs)
    waits = [high.seconds - low.seconds for high, low in neighbours(ready, ON, below)]
    cpu = [sum(high.beside.values()) - sum(low.beside.values()) for high, low in pairs]
    added = statistics.median(waits) + statistics.median(cpu)
    parts = interval(waits, _EACH), interval(cpu, _EACH)
    bounds = None
    if parts[0] is not None and parts[1] is not None:
        bounds = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
    by_part = {
        name: ms(statistics.median(high.beside[name] - low.beside.get(name, 0.0) for high, low in pairs))
        for name in pairs[0][0].beside
    }
    return {
        "account_ms": ms(added),
        "interval_ms": None if bounds is None else [ms(bound) for bound in bounds],
        "account_share": round(added / whole, 5),
        "interval": None if bounds is None else [round(bound / whole, 5) for bound in bounds],
        "bar": MOST_SHARE,
        # An upper bound of the cost: beyond the bar it shows nothing.
        "reached": True if bounds is not None and bounds[1] / whole <= MOST_SHARE else NOT_SHOWN,
        "wait_ms": _differences(waits, parts[0]),
        "beside_computing_ms": {**_differences(cpu, parts[1]), "by_part": by_part},
    }


def _differences(seconds: Sequence[float], bounds: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "median": ms(statistics.median(seconds)),
        "interval": None if bounds is None else [ms(bound) for bound in bounds],
        "pairs": len(seconds),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """All accounts, for people."""
    told = []
    for name, each in found.items():
        bounds = "unknown" if each["interval_ms"] is None else "{:.1f} to {:.1f}".format(*each["interval_ms"])
        told.append(
            f"{name:24} account {each['account_ms']:.1f} ms, 95% {bounds}: {each['account_share']:.2%} of a cold "
            f"prompt (bar {MOST_SHARE:.0%}: {each['reached']})"
        )
        cpu = each["beside_computing_ms"]
        parts = ", ".join(f"{part} {more:.1f}" for part, more in cpu["by_part"].items())
        told.append(f"  wait {each['wait_ms']['median']:.1f} ms, CPU {cpu['median']:.1f} ms: {parts}")
    return told
