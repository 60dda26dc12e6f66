"""Redis is killed, stopped, paused and flushed under load: does any request fail, and what do the slow ones wait for?

Real processes with the fake engine, whose tokens are known beforehand, and a real Valkey. Pages are few and host memory
is off, so that shared prefixes come from Redis or must be computed. The same requests, at the same times, in each part:

    undisturbed, first and last
    killed      SIGKILL, and a new, empty server at the same place five seconds later
    stopped     SIGSTOP for five seconds: connections stay, and nothing answers
    paused      CLIENT PAUSE for five seconds, reads and writes
    flushed     FLUSHALL twice

    python -m bench.prefix_faults [--seconds 20] [--rate 6] [--budget-s 0.25]

The bar: no request fails, and p99 of the time to the first token rises by no more than the budget (cache_budget_s) over
that of the quicker of both undisturbed parts.
A prompt whose prefix is gone must be computed as well; the load has enough new prompts for p99 to be one anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton import AsyncClient
from baton.bench.stats import percentile
from baton.engine.fake import expected_tokens
from baton.errors import BatonError
from bench.common import save
from bench.fakes import FakeFleet, fake_fleet
from bench.services import counters, grown
from tests.redis_server import Server, running

SYSTEMS, SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 6, 320, 32, 4
NEW_SHARE = 0.2
"""Part of the requests that share nothing."""
CHUNK_TOKENS, CHUNK_S = 32, 0.004
PAGES = 128
FAULT_AT, FAULT_S = 0.2, 5.0

Fault = Callable[[Server], Awaitable[None]]


@dataclass(slots=True)
class Outcome:
    """One request; seconds."""

    ttft: float = 0.0
    cached: int = 0
    error: str = ""


async def nothing(server: Server) -> None:
    """No fault."""


async def killed(server: Server) -> None:
    """Gone, and back without anything in it."""
    server.kill()
    await asyncio.sleep(FAULT_S)
    await asyncio.to_thread(server.start)


async def stopped(server: Server) -> None:
    """The process stands still."""
    if server.process is None:
        raise RuntimeError("no server runs")
    server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FAULT_S)
    server.process.send_signal(signal.SIGCONT)


async def paused(server: Server) -> None:
    """The server takes connections and commands, and answers later."""
    with server.client() as client:
        client.client_pause(int(FAULT_S * 1e3))
    await asyncio.sleep(FAULT_S)


async def flushed(server: Server) -> None:
    """All keys are gone, twice."""
    for _ in range(2):
        with server.client() as client:
            client.flushall()
        await asyncio.sleep(FAULT_S / 2)


FAULTS: dict[str, Fault] = {"killed": killed, "stopped": stopped, "paused": paused, "flushed": flushed}
PARTS: dict[str, Fault] = {"undisturbed": nothing, **FAULTS, "undisturbed again": nothing}


def prompts(count: int, seed: int) -> Iterator[list[int]]:
    """Shared beginnings with ends of their own, and some that share nothing."""
    chosen = random.Random(seed)

    def some(length: int) -> list[int]:
        return [chosen.randrange(1000) for _ in range(length)]

    systems = [some(SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    for _ in range(count):
        fresh = chosen.random() < NEW_SHARE
        yield (some(SYSTEM_TOKENS) if fresh else chosen.choice(systems)) + some(QUESTION_TOKENS)


async def ask(client: AsyncClient, prompt: list[int]) -> Outcome:
    """One request, held against the tokens that it must yield."""
    outcome, began, got = Outcome(), time.perf_counter(), list[int]()
    try:
        async for delta in client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, timeout=60):
            if delta.tokens and not got:
                outcome.ttft = time.perf_counter() - began
            got += [token.token_id for token in delta.tokens]
            if delta.usage:
                outcome.cached = delta.usage.cached_tokens
    except BatonError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    else:
        outcome.error = "" if got == expected_tokens(prompt, ANSWER_TOKENS) else "wrong tokens"
    return outcome


async def part(client: AsyncClient, server: Server, fault: Fault, arguments: argparse.Namespace) -> list[Outcome]:
    """The load for a time, with a fault in it."""
    chosen = random.Random(arguments.seed)
    count = int(arguments.seconds * arguments.rate)
    faulting = asyncio.create_task(_later(fault, server, FAULT_AT * arguments.seconds))
    tasks, begin, due = [], time.perf_counter(), 0.0
    for prompt in prompts(count, arguments.seed):
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(client, prompt)))
        due += min(chosen.expovariate(arguments.rate), 4 / arguments.rate)
    outcomes = await asyncio.gather(*tasks)
    await faulting
    return outcomes


async def _later(fault: Fault, server: Server, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await fault(server)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """One part in numbers."""
    ttft = [outcome.ttft for outcome in outcomes if not outcome.error]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    return {
        "requests": len(outcomes),
        "failed": len(errors),
        "errors": errors[:3],
        "with_hits": sum(outcome.cached > 0 for outcome in outcomes),
        "ttft_ms": {f"p{share}": round(1e3 * percentile(ttft, share / 100), 1) for share in (50, 90, 99, 100)},
    }


async def measure(arguments: argparse.Namespace, fleet: FakeFleet, server: Server) -> dict[str, Any]:
    found: dict[str, Any] = {}
    outcomes: dict[str, list[Outcome]] = {}
    async with AsyncClient(fleet.router) as client:
        await asyncio.gather(*(ask(client, prompt) for prompt in prompts(8, arguments.seed + 1)))
        for name, fault in PARTS.items():
            with server.client() as plain:
                plain.flushall()
            await drop_pages(fleet)
            before = _counters(fleet)
            outcomes[name] = await part(client, server, fault, arguments)
            found[name] = summary(outcomes[name])
            found[name] |= {key: grown(before[key], after) for key, after in _counters(fleet).items()}
    base = min(found[name]["ttft_ms"]["p99"] for name in PARTS if name not in FAULTS)
    for name in FAULTS:
        rise = found[name]["ttft_ms"]["p99"] - base
        found[name] |= {"p99_rise_ms": round(rise, 1), "within_budget": rise <= 1e3 * arguments.budget_s}
    return {"budget_ms": 1e3 * arguments.budget_s, "undisturbed_p99_ms": base, **found}


async def drop_pages(fleet: FakeFleet) -> None:
    """Nothing is cached in the workers, so that each part begins alike."""
    for control in (fleet.prefill, fleet.decode):
        async with AsyncClient(control) as worker:
            await worker.clear_cache(redis=False)


def _counters(fleet: FakeFleet) -> dict[str, dict[str, float]]:
    return {
        "faults": counters(fleet.ops, "baton_prefix_faults_total", "reason"),
        "blocks": counters(fleet.ops, "baton_prefix_blocks_total", "outcome"),
        "prefill_tokens": counters(fleet.ops, "baton_prefill_tokens_total", "source"),
    }


def table(results: dict[str, Any]) -> str:
    """One line a part."""
    lines = [f"budget {results['budget_ms']:g} ms; undisturbed p99 {results['undisturbed_p99_ms']} ms"]
    for name in PARTS:
        row, ttft = results[name], results[name]["ttft_ms"]
        line = (
            f"{name:17} {row['requests']:4} requests, {row['failed']} failed, {row['with_hits']:4} with hits, TTFT ms"
        )
        line += f" p50 {ttft['p50']:7.1f} p99 {ttft['p99']:7.1f}"
        if name in FAULTS:
            line += f" (rise {row['p99_rise_ms']:+7.1f}, {'within' if row['within_budget'] else 'ABOVE'})"
        lines.append(f"{line}  {row['faults'] or ''}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=float, default=6)
    parser.add_argument("--budget-s", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, running("valkey", Path(directory)) as server:
        cache = ["--redis", server.url, "--cache-memory", "0", "--cache-budget-s", str(arguments.budget_s)]
        prefill = ["--chunk-time", str(CHUNK_S), "--chunk-size", str(CHUNK_TOKENS), "--pages", str(PAGES)]
        with fake_fleet(prefill_flags=[*prefill, *cache], decode_flags=[*cache, "--pages", "256"]) as fleet:
            results = asyncio.run(measure(arguments, fleet, server))
    save("prefix-faults", results)
    print(table(results))


if __name__ == "__main__":
    main()
