"""Damaged records: bits of what Redis holds are flipped while prompts with shared prefixes are served from it.

    probe: a shared prefix, its hits from Redis ── bits flip, workers forget what they hold ── every record is damaged
                                                                     ── the same hits come back

No token may be wrong meanwhile, and a damaged record is one that the next computation mends.
"""

import asyncio
import random
import time

import redis.asyncio

from baton.client import AsyncClient
from baton.errors import BatonError
from tests.chaos.observe import counter
from tests.chaos.scene import Scene

DAMAGE_S = 8.0
ROUND_S = 1.0
SHARE = 0.3
"""Of the records, damaged in each round."""

PREFIX, SUFFIX = 320, 8
BACK_BOUND_S = 30.0
"""Within this the hits are what they were."""

FAULTS = "baton_prefix_faults_total"


async def damage(scene: Scene) -> float:
    """Do all of it; when the damage began, on the monotonic clock."""
    fleet, row = scene.fleet, scene.row
    prefix = scene.load.mix.plain(PREFIX, 1).prompt
    workers = [AsyncClient(f"127.0.0.1:{fleet.control[name]}") for name in fleet.prefill]
    store = redis.asyncio.Redis(port=fleet.control["redis"])
    try:
        before = await _hits(scene, workers, prefix, PREFIX)
        refused = await _refused(scene)
        began, flipped = time.monotonic(), 0
        while time.monotonic() - began < scene.hold * DAMAGE_S:
            flipped += await _flip(store, scene.rng, SHARE)
            await _forget(workers)
            await asyncio.sleep(ROUND_S)
        flipped += await _flip(store, scene.rng, 1.0)
        await _forget(workers)
        after = await _hits(scene, workers, prefix, before)
        refused = await _refused(scene) - refused
    finally:
        await asyncio.gather(store.aclose(), *(worker.close() for worker in workers))
    row.hit, row.in_state = "redis", flipped
    row.note = f"{flipped} bits flipped, {refused:.0f} faults counted, cached tokens {before} before, {after} after"
    if not before:
        row.problems.append(f"no token of the shared prefix came from Redis within {BACK_BOUND_S:g} s")
    if after < before:
        row.problems.append(f"{before} tokens came from Redis before the damage, {after} after {BACK_BOUND_S:g} s")
    if not refused:
        row.problems.append(f"no worker counted a fault in {FAULTS}")
    return began


async def _hits(scene: Scene, workers: list[AsyncClient], prefix: tuple[int, ...], wanted: int) -> int:
    """Most tokens of the prefix that come from Redis for workers that hold nothing; waits until it is `wanted`."""
    most, end = 0, time.monotonic() + BACK_BOUND_S
    while most < wanted and time.monotonic() < end:
        spec = scene.load.mix.plain(SUFFIX, 2)
        task = scene.load.start(spec.following(prefix), scene.rng.choice(scene.fleet.routers))
        outcome = scene.load.outcomes[-1]
        await asyncio.wait({task}, timeout=max(0.0, end - time.monotonic()))
        if outcome.usage is not None:
            most = max(most, outcome.usage.cached.redis)
        # Computed blocks are written after the answer.
        await asyncio.sleep(0.3)
        await _forget(workers)
    return most


async def _forget(workers: list[AsyncClient]) -> None:
    """Let the prefill workers drop what they have cached, all but what is in Redis."""
    for worker in workers:
        try:
            await worker.clear_cache(timeout=5)
        except BatonError as error:
            raise RuntimeError("a worker did not clear its cache") from error


async def _refused(scene: Scene) -> float:
    return sum([await counter(scene.fleet, name, FAULTS) or 0.0 for name in scene.fleet.prefill])


async def _flip(store: redis.asyncio.Redis, rng: random.Random, share: float) -> int:
    """Flip a bit in a share of the records; how many."""
    flipped = 0
    for key in sorted([key async for key in store.scan_iter(count=1000)]):
        if rng.random() >= share or not (size := await store.strlen(key)):
            continue
        at = rng.randrange(8 * size)
        await store.setbit(key, at, 1 - await store.getbit(key, at))
        flipped += 1
    return flipped
