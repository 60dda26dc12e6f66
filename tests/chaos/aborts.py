"""`python -m tests.chaos.aborts`: how long memory stays held after a client has gone, by the state of its request.

For each state a request is brought into it (among holders that keep prefill, transfers or slots busy where that is
needed), seen there in a ledger, and cancelled by its client. The time runs until no ledger of any process has an entry
of the request; it includes the polling, a few milliseconds. Exits with 1 if a 99th percentile is above a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.stats import percentile
from baton.client import AsyncClient
from tests.chaos import report
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.load import Mix, Spec, ask_until_cancelled
from tests.chaos.observe import ledger
from tests.chaos.runner import clients_of

SHAPE = Shape(slots=2, chunk_time=0.04)
TIGHT = Shape(slots=2, decode_pages=48, step_time=0.004)
"""Two sequences in slots outgrow its decode workers."""
LIMIT_S = 1.0
REACH_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a request gets into a state: in whose ledger it is seen, its size, and who is in its way."""

    state: str
    books: str
    states: Sequence[str]
    prompt: int
    max_tokens: int
    holders: int = 0
    holder_prompt: int = 40
    holder_tokens: int = 8
    kv_rate: float = 0.0
    shape: Shape = SHAPE


WAYS = (
    Way("in the router's queue", "r", ("queued", "reserving"), 40, 20, holders=14, holder_prompt=1500),
    Way("preparing at prefill", "p", ("preparing",), 40, 20, holders=6, holder_prompt=1500),
    Way("prefilling", "p", ("prefilling",), 1500, 20),
    Way("transferring", "d", ("transferring",), 1500, 20, kv_rate=300_000),
    Way("held by prefill", "p", ("held",), 1500, 20, kv_rate=150_000),
    Way("waiting for a slot", "d", ("slot_wait",), 40, 20, holders=6, holder_tokens=300),
    Way("decoding", "d", ("decoding",), 40, 2000),
    Way("paused", "d", ("paused",), 40, 600, holders=3, holder_tokens=600, shape=TIGHT),
)


@contextlib.asynccontextmanager
async def held(client: AsyncClient, mix: Mix, way: Way) -> AsyncIterator[None]:
    """The holders of a way, until the block ends."""
    specs = [mix.plain(way.holder_prompt, way.holder_tokens) for _ in range(way.holders)]
    tasks = [asyncio.create_task(ask_until_cancelled(client, spec)) for spec in specs]
    try:
        await asyncio.sleep(0.3 if tasks else 0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def owners(fleet: Fleet, names: Sequence[str], states: Sequence[str] = ()) -> set[str]:
    """Ids of the requests in these ledgers, in any of the states if some are named."""
    books = await asyncio.gather(*(ledger(fleet, name) for name in names))
    entries = [entry for book in books if book for entry in book.entries]
    return {entry.owner.partition("/")[0] for entry in entries if not states or entry.state in states}


async def sample(fleet: Fleet, clients: dict[str, AsyncClient], mix: Mix, way: Way) -> float | None:
    """Seconds from a cancel until nothing of the request is held; None if it did not get into the state."""
    everybody = [*fleet.routers, *fleet.workers]
    books = [name for name in everybody if name[0] == way.books]
    async with held(clients["r1"], mix, way):
        before = await owners(fleet, everybody)
        spec: Spec = mix.plain(way.prompt, way.max_tokens)
        asking = asyncio.create_task(ask_until_cancelled(clients["r0"], spec))
        try:
            end, found = time.monotonic() + REACH_S, set[str]()
            while not (found := await owners(fleet, books, way.states) - before):
                if asking.done() or time.monotonic() > end:
                    return None
        finally:
            began = time.monotonic()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        while found & await owners(fleet, everybody):
            if time.monotonic() - began > REACH_S:
                break
        return time.monotonic() - began


async def measure(fleet: Fleet, way: Way, count: int, mix: Mix) -> list[float]:
    """`count` samples, or fewer where the state was not reached."""
    for name in fleet.prefill:
        await fleet.mode("slow" if way.kv_rate else "pass", f"kv-{name}", rate=way.kv_rate)
    async with clients_of(fleet) as clients:
        found = [await sample(fleet, clients, mix, way) for _ in range(count)]
    return [value for value in found if value is not None]


async def run(arguments: argparse.Namespace, directory: Path) -> int:
    began, mix = time.monotonic(), Mix(random.Random(arguments.seed))
    rows, late = [], False
    for shape, ways in itertools.groupby(WAYS, key=lambda way: way.shape):
        async with Fleet.running(shape, directory) as fleet:
            for way in ways:
                values = await measure(fleet, way, arguments.count, mix)
                quoted = (
                    [f"{1e3 * percentile(values, share):.0f}" for share in (0.5, 0.99, 1.0)] if values else ["–"] * 3
                )
                rows.append(f"| {way.state} | {len(values)} | {' | '.join(quoted)} |")
                print(rows[-1], flush=True)
                late |= not values or percentile(values, 0.99) > LIMIT_S
    head = ["| state when cancelled | samples | p50 ms | p99 ms | most ms |", "|---|---|---|---|---|"]
    heading = report.heading(arguments.seed, time.monotonic() - began, SHAPE)
    report.write(
        "chaos-aborts", "\n".join(["# From a cancel until nothing is held", "", *heading, "", *head, *rows, ""])
    )
    return int(late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aborts-") as temporary:
        return asyncio.run(run(arguments, Path(temporary)))


if __name__ == "__main__":
    sys.exit(main())
