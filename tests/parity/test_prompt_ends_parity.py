"""A prompt that is cached to its end, and not computed at all, goes on as transformers does, token for token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.contract import Engine
from baton.engine.factory import build
from baton.request import SamplingParams, SequenceState, TokenInfo
from prefill_svc.app import run
from prefill_svc.config import PrefillConfig
from tests.checkpoints import FAMILIES, MIN_MARGIN, Reference, greedy, load_reference, make_checkpoint, prompt_ids
from tests.prefill import Client, by_tier, fetch_all, prefilled, since
from tests.redis_server import running

BLOCK = 16
COUNT = 20
PARAMS = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=1)
LENGTHS = (BLOCK - 3, BLOCK, 2 * BLOCK + 5, 6 * BLOCK)
"""Less than a block, one, two and a bit, and six: an end has KV of its own or none."""


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


@dataclass
class Models:
    """One family, float32: engines for prefill by page size, one to decode with, and prompts with their outcome."""

    checkpoint: Path
    engines: dict[int, Engine]
    decoder: Engine
    prompts: list[tuple[list[int], Reference]]


def clear_prompt(model: Any, length: int) -> tuple[list[int], Reference]:
    """One of which the outcome varies, is not ended early, and has no near-tie."""
    for seed in range(8):
        told = greedy(model, prompt_ids(length, seed), COUNT)
        if len(told.token_ids) == COUNT and len(set(told.token_ids)) > COUNT / 2 and min(told.margins) > MIN_MARGIN:
            return prompt_ids(length, seed), told
    raise AssertionError(f"no clear prompt of {length}")


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    checkpoint = make_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    reference = load_reference(checkpoint)

    def engine(page_size: int, slots: int = 0) -> Engine:
        config = EngineConfig(str(checkpoint), "cpu", "float32", page_size=page_size, kv_memory=4 << 20, slots=slots)
        return build(config)

    engines = {size: engine(size) for size in (16, 32, 256)}
    prompts = [clear_prompt(reference, length) for length in LENGTHS]
    made = Models(checkpoint, engines, engine(32, slots=1), prompts)
    yield made
    for each in (*engines.values(), made.decoder):
        assert each.audit() == {}
        each.close()


@contextlib.asynccontextmanager
async def worker(models: Models, page_size: int, **settings: Any) -> AsyncIterator[Client]:
    """A prefill worker, with nothing cached in its pages."""
    engine = models.engines[page_size]
    engine.drop_cached()
    config = PrefillConfig(model=str(models.checkpoint), fleet_secret="secret", **{"cache_memory": 0, **settings})
    async with run(config, engine=engine) as app:
        client = Client(app)
        yield client
        await client.channel.close()


def soil(engine: Engine) -> None:
    """Overwrite all free pages, so that KV which nobody loaded is not there by chance."""
    tokens = engine.stats().free * engine.spec.page_size
    handle = engine.reserve("soil", tokens)
    engine.write_blocks(handle, 0, [b"\x3f" * engine.spec.kv_format.block_bytes] * (tokens // BLOCK))
    engine.free(handle)


async def completed(models: Models, client: Client, prompt: list[int], name: str) -> tuple[list[TokenInfo], Any]:
    """The tokens of a prompt, prefilled, transferred and decoded, and what prefill says, once all is in the caches."""
    soil(client.app.engine)
    engine = models.decoder
    handle = engine.reserve("r", len(prompt) + COUNT)
    pulling = asyncio.create_task(client.fetch(engine, handle, name, len(prompt)))  # type: ignore[arg-type]
    done = await client.done(prompt, params=PARAMS, transfer_id=name)
    infos = [(await pulling).first_tokens[0].token]
    engine.insert(handle, SequenceState(PARAMS, prompt, [infos[0].token_id], 0))
    while len(infos) < COUNT:
        ((_, tokens),) = engine.step().result()
        infos += tokens
    engine.free(handle)
    await client.app.worker.finished()
    return infos, done


def same(found: list[TokenInfo], computed: list[TokenInfo], reference: Reference) -> None:
    """Fail unless both are what transformers says, with the same log-probabilities."""
    assert [info.token_id for info in found] == reference.token_ids
    assert [info.token_id for info in computed] == reference.token_ids
    assert [info.logprob for info in found] == pytest.approx([info.logprob for info in computed], abs=1e-4)


@pytest.mark.parametrize(("page_size", "chunk_size"), [(16, 7), (256, 0)])
async def test_whole_hits_from_pages_and_host_memory_keep_the_tokens(
    models: Models, page_size: int, chunk_size: int
) -> None:
    async with worker(models, page_size, cache_memory=16 << 20, chunk_size=chunk_size) as client:
        for prompt, reference in models.prompts:
            length = len(prompt)
            client.app.engine.drop_cached()
            computed, _ = await completed(models, client, prompt, f"{length} first")
            await completed(models, client, prompt, f"{length} second")
            for time in ("third", "fourth"):
                before = prefilled()
                found, done = await completed(models, client, prompt, f"{length} {time}")
                pool = length // page_size * page_size if time == "third" else 0
                tail = length // BLOCK * BLOCK if page_size == BLOCK and time == "third" else pool
                expected = {name: count for name, count in (("pool", tail), ("host", length - tail)) if count}
                assert by_tier(done) == since(before) == expected, f"prompt of {length}, {time}"
                same(found, computed, reference)
                client.app.engine.drop_cached()


@pytest.mark.parametrize("page_size", [32, 256])
async def test_whole_hits_of_another_worker_through_redis_keep_the_tokens(
    models: Models, page_size: int, tmp_path: Path
) -> None:
    """Its first time asking; an end without blocks before it is of no use to others."""
    with running("valkey", tmp_path) as server:
        async with (
            worker(models, 16, redis=server.url) as first,
            worker(models, page_size, redis=server.url) as second,
        ):
            for prompt, reference in models.prompts:
                length = len(prompt)
                computed, _ = await completed(models, first, prompt, f"{length} first")
                await completed(models, first, prompt, f"{length} second")
                for client in (first, second):
                    client.app.engine.drop_cached()
                before = prefilled()
                found, done = await completed(models, second, prompt, f"{length} third")
                source = "redis" if length >= BLOCK else "computed"
                assert since(before) == {source: length}, f"prompt of {length}"
                assert done.cached_tokens == (length if length >= BLOCK else 0)
                same(found, computed, reference)
