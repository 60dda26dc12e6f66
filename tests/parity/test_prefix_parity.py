"""The source of a prefix changes how long a prompt takes and nothing else; losing a store changes no more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.config.worker import PrefillConfig
from baton.engine.config import EngineConfig
from baton.engine.contract import Engine
from baton.engine.factory import build
from baton.pb import prefill_pb2
from baton.request import CachePolicy, SamplingParams, SequenceState
from prefill_svc.app import run
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.engine_calls import insert
from tests.peers import Peer, peer
from tests.prefill import Client, fetch_all
from tests.redis_server import running

BLOCK = 16
PARAMS = SamplingParams(max_tokens=16, temperature=0.9, seed=7, ignore_eos=True, logprobs=1)
SIZES = ((16, 0), (16, 23), (32, 7), (256, 64))
"""Of pages and chunks: each with the pages, whose hits depend on them, and with all tiers, each tier with some."""
STEPS = 5
SHARED = 300
LENGTHS = (BLOCK - 1, BLOCK, 2 * BLOCK + 5, 6 * BLOCK, 256, 257, SHARED)
"""None, one block, several and a bit, and whole prompts, of which the last token must still be sampled from."""


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


@dataclass
class Models:
    """Engines on one checkpoint, float32: for prefill by page size, and one to decode with."""

    checkpoint: Path
    engines: dict[int, Engine]
    decoder: Engine
    expected: dict[int, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    checkpoint = make_checkpoint("llama", tmp_path_factory.mktemp("model"))

    def engine(page_size: int, slots: int = 0) -> Engine:
        config = EngineConfig(str(checkpoint), "cpu", "float32", page_size=page_size, kv_memory=64 << 20, slots=slots)
        return build(config)

    made = Models(checkpoint, {size: engine(size) for size in (16, 32, 256)}, engine(32, slots=1), {})
    yield made
    for each in (*made.engines.values(), made.decoder):
        assert each.audit() == {}
        each.close()


@contextlib.asynccontextmanager
async def worker(models: Models, page_size: int, **settings: Any) -> AsyncIterator[Client]:
    """A prefill worker, with nothing cached in its pages."""
    engine = models.engines[page_size]
    engine.drop_cached()
    config = PrefillConfig(model=str(models.checkpoint), fleet_secret="secret", **settings)
    async with run(config, engine=engine) as app:
        client = Client(app)
        yield client
        await client.channel.close()


async def settled(client: Client) -> None:
    """Wait until all computed blocks are in all tiers."""
    await client.app.worker.wait_finished()


async def completed(
    models: Models, client: Client, prompt: list[int], name: str, **how: Any
) -> tuple[list[int], list[float], prefill_pb2.PrefillDone]:
    """Tokens and log-probabilities of a prompt, prefilled, transferred and decoded, and what prefill says."""
    engine = models.decoder
    handle = engine.reserve("r", len(prompt) + STEPS)
    pulling = asyncio.create_task(client.fetch(engine, handle, name, len(prompt)))  # type: ignore[arg-type]
    done = await client.done(prompt, params=PARAMS, transfer_id=name, **how)
    handoff = await pulling
    infos = [handoff.first_tokens[0].token]
    insert(engine, handle, SequenceState(PARAMS, prompt, [infos[0].token_id], 0))
    for _ in range(STEPS):
        ((_, tokens),) = engine.launch().result().sequences
        infos += tokens
    engine.free(handle)
    return [info.token_id for info in infos], [info.logprob or 0.0 for info in infos], done


@pytest.fixture
async def expected(models: Models) -> dict[int, tuple[list[int], list[float]]]:
    """The outcome for each length without any cache."""
    if not models.expected:
        async with worker(models, 16) as client:
            for length in LENGTHS:
                prompt = prompt_ids(SHARED)[:length]
                tokens, logprobs, done = await completed(models, client, prompt, f"{length}", cache=CachePolicy.OFF)
                assert done.cached_tokens == 0
                models.expected[length] = tokens, logprobs
    return models.expected


@contextlib.asynccontextmanager
async def exporting(models: Models, prompt: list[int]) -> AsyncIterator[tuple[Peer, Any]]:
    """A decode worker that holds the KV of a prompt."""
    engine = models.decoder
    handle = engine.reserve("held", len(prompt))
    async with worker(models, 32) as client:
        pulling = asyncio.create_task(client.fetch(engine, handle, "held", len(prompt)))  # type: ignore[arg-type]
        await client.done(prompt, transfer_id="held", cache=CachePolicy.OFF)
        await pulling
    async with peer(engine) as there:
        yield there, handle
    engine.free(handle)


@pytest.mark.parametrize(
    ("tier", "page_size", "chunk_size"),
    [
        *(("pool", page_size, chunk_size) for page_size, chunk_size in SIZES),
        ("host", 16, 23),
        ("host", 256, 64),
        ("redis", 16, 0),
        ("redis", 32, 7),
        ("peer", 32, 7),
        ("peer", 256, 64),
        *(("all", page_size, chunk_size) for page_size, chunk_size in SIZES),
    ],
)
async def test_hits_of_any_length_from_any_tier_keep_the_tokens(
    models: Models,
    expected: dict[int, tuple[list[int], list[float]]],
    tier: str,
    page_size: int,
    chunk_size: int,
    tmp_path: Path,
) -> None:
    shared = prompt_ids(SHARED)
    settings: dict[str, Any] = {"chunk_size": chunk_size}
    async with contextlib.AsyncExitStack() as stack:
        if tier in ("host", "all"):
            settings |= {"kv_home": "device", "host_memory": 64 << 20}
        if tier in ("redis", "all"):
            settings["redis"] = stack.enter_context(running("valkey", tmp_path)).url
        if tier in ("peer", "all"):
            there, handle = await stack.enter_async_context(exporting(models, shared))
        client = await stack.enter_async_context(worker(models, page_size, **settings))
        if tier == "all":
            async with worker(models, 32 if page_size == 16 else 16, redis=settings["redis"]) as other:
                await other.done(shared[:150], params=PARAMS)
                await settled(other)
        if tier in ("pool", "host", "redis"):
            await client.done(shared, params=PARAMS)
            await settled(client)
        for length in LENGTHS:
            if tier != "pool":
                client.app.engine.drop_cached()
            if tier == "all":
                await client.app.cache.clear(shared=False)
                await client.done([*shared[:70], 1], params=PARAMS)
                await settled(client)
                client.app.engine.drop_cached()
                await client.done([*shared[: 2 * BLOCK], 1], params=PARAMS, cache=CachePolicy.WRITE)
            named = min(length, SHARED) // BLOCK * BLOCK
            source = there.offer(handle, named, shared) if tier in ("peer", "all") and named else None
            prompt = shared[:length]
            tokens, logprobs, done = await completed(models, client, prompt, f"{length}", source=source)
            assert tokens == expected[length][0], f"prompt of {length}"
            assert logprobs == pytest.approx(expected[length][1], abs=1e-4)
            held_tokens = SHARED // page_size * page_size if tier == "pool" else SHARED
            assert done.cached_tokens == min(min(length, held_tokens) // BLOCK * BLOCK, length - 1)
            if tier != "all":
                assert getattr(done.cached, tier) == done.cached_tokens
            await settled(client)
