"""Prompts asked again and again at one prefill worker, for tests of their cached ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY

from baton.pb import prefill_pb2
from baton.request import Handoff
from tests.prefill import PROMPT, Client, decode, decoder, flushed
from tests.redis_server import Server


def soil(client: Client) -> None:
    """Overwrite all free pages, so that KV which nobody loaded is not there by chance."""
    engine = client.app.engine
    pages = engine.stats().free
    handle = engine.reserve("soil", pages * engine.spec.page_size)
    engine.write_blocks(handle, 0, [b"\1" * engine.spec.kv_format.block_bytes] * pages)
    engine.free(handle)


async def ask(client: Client, prompt: Sequence[int] = PROMPT, times: int = 1, **how: Any) -> prefill_pb2.PrefillDone:
    """The last answer of so many, each with all that it leaves in the caches."""
    for _ in range(times):
        soil(client)
        done = await client.done(prompt, **how)
        await flushed(client)
    return done


async def pulled(
    client: Client, prompt: Sequence[int], name: str, **how: Any
) -> tuple[prefill_pb2.PrefillDone, Handoff, list[int]]:
    """The answer, what decode is told, and the tokens that it makes of all KV, which it pulled meanwhile."""
    soil(client)
    with decoder(5) as engine:
        handle = engine.reserve("r", len(prompt) + 10)
        pulling = asyncio.create_task(client.fetch(engine, handle, name, len(prompt)))
        done = await client.done(prompt, transfer_id=name, **how)
        handoff = await pulling
        tokens = decode(engine, handle, handoff, 4)
    await flushed(client)
    return done, handoff, tokens


def ends() -> dict[str, float]:
    """Ends so far, by outcome."""
    return {
        outcome: REGISTRY.get_sample_value("baton_prefix_ends_total", {"outcome": outcome}) or 0.0
        for outcome in ("put", "used")
    }


def ends_since(before: dict[str, float]) -> tuple[float, float]:
    """Those put, and those used."""
    now = ends()
    return now["put"] - before["put"], now["used"] - before["used"]


def calls(server: Server, *commands: str) -> int:
    """How often a server was asked so."""
    with server.client() as redis:
        stats = redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {}).get("calls", 0) for command in commands)
