"""KV that decode workers hold, over real sockets: pinned, moved no second time, exported, left behind, written back."""

import asyncio
from collections import abc
from pathlib import Path

import pytest

from baton.engine.contract import Sequence
from baton.errors import EngineError
from baton.kv.prefix.contract import Payload
from baton.kv.prefix.redis.cache import RedisPrefixCache
from baton.pb import decode_pb2
from baton.request import SamplingParams
from baton.telemetry import metrics
from tests.decode_rig import WAIT_S, rig
from tests.decoding import digests, greedy
from tests.integration.decode_turns import PINNED, PROMPT, names, received, turn
from tests.metrics import count
from tests.property.attempts import payloads
from tests.redis_server import running

Failure = decode_pb2.AttemptFailure


async def test_a_next_turn_moves_only_what_is_new() -> None:
    async with rig(pages=128) as all_:
        router, token = await all_.router(), all_.engine.spec.kv_format.token_bytes
        before, reused = received(), count(metrics.REUSED_TOKENS)
        ids = await turn(all_, router, "a", PROMPT, greedy(30))
        assert received() - before == len(PROMPT) * token
        for number, held in ((1, 64), (2, 96), (3, 144)):
            prompt, before = [*ids, *range(900, 910)], received()
            ids = await turn(all_, router, f"b{number}", prompt, greedy(30))
            assert router.reserved[f"b{number}"].cached_tokens == held
            assert received() - before == (len(prompt) - held) * token
        assert count(metrics.REUSED_TOKENS) - reused == 64 + 96 + 144
        await all_.until_free()


async def test_a_context_that_is_here_entirely_moves_nothing_and_is_handed_over() -> None:
    prompt = PROMPT[:PINNED]
    async with rig() as all_:
        router = await all_.router()
        await turn(all_, router, "a", prompt, greedy(4))
        before = received()
        await turn(all_, router, "b", prompt, greedy(9))
        assert (router.reserved["b"].cached_tokens, received() - before) == (PINNED, 0)
        await all_.until_free()


async def test_a_failed_step_leaves_nothing() -> None:
    async with rig(step_time=0.02) as all_:
        router = await all_.router()
        await router.request("a", PROMPT, greedy(400))
        await router.until(lambda: len(router.tokens["a", 0]) > 40)
        all_.engine.fail_next = "NaN"
        await router.until(lambda: "a" in router.failures)
        ids = [*PROMPT, *router.tokens["a", 0]]
        assert (await router.reserve("b", len(ids), 8, **names(all_, ids))).cached_tokens == 0
        await router.cancel("b")
        await all_.until_free()


async def test_a_fault_with_one_choice_leaves_no_output_of_the_others() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, n=2)
    async with rig(slots=2, admits=9, pages=1024, max_model_len=1600, step_time=0.03) as all_:
        router, insert = await all_.router(), all_.engine.insert

        def inserted(sequence: Sequence) -> None:
            if sequence.handle.owner.startswith("b/") and sequence.state.choice_index == 1:
                raise EngineError("told so by the test")
            insert(sequence)

        all_.engine.insert = inserted  # type: ignore[method-assign]
        await router.request("a", [1, 2], greedy(1500))
        # It has one of the two slots, so that of the other request's choices the second has to wait.
        await router.until(lambda: len(router.tokens["a", 0]) > 1)
        await router.request("b", PROMPT, params, range(2))
        await router.until(lambda: len(router.tokens["b", 0]) > 40)
        assert not router.failures
        await router.cancel("a")
        await router.until(lambda: "b" in router.failures)
        assert router.failures["b"].kind == Failure.KIND_ENGINE
        assert all_.engine.match_prefix(digests(all_.engine, [*PROMPT, *router.tokens["b", 0]])) == PINNED
        await all_.until_free()


@pytest.mark.parametrize("page_size", [4, 16, 256])
async def test_answers_are_written_back_and_prompts_are_not(tmp_path: Path, page_size: int) -> None:
    """Also where they end within a page."""
    with running("valkey", tmp_path) as server:
        async with rig({"redis": server.url, "fleet_secret": "secret"}, page_size=page_size, pages=64) as all_:
            router = await all_.router()
            ids = await turn(all_, router, "a", PROMPT, greedy(60))
            await all_.until_free()
            await all_.app.service.worker.write_backs.wait_finished()
            expected = digests(all_.engine, ids[:-1])[2:]
            await all_.app.cache.flush()
            assert (await all_.app.cache.lookup(expected)).blocks == len(expected) == 4
            assert await all_.app.cache.fetch(expected) == payloads(all_.engine, ids[:-1])[2:]
            with server.client() as client:
                assert client.dbsize() == len(expected)
            # Of the next turn only what is new is moved.
            prompt, before = [*ids, *range(900, 910)], received()
            await turn(all_, router, "b", prompt, greedy(4))
            assert received() - before == (len(prompt) - 96) * all_.engine.spec.kv_format.token_bytes
            await all_.until_free()


async def test_a_drain_waits_until_blocks_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, gate = asyncio.Event(), asyncio.Event()
    store = RedisPrefixCache._write

    async def held_back(cache: RedisPrefixCache, blocks: abc.Sequence[tuple[bytes, Payload]]) -> list[bool]:
        writing.set()
        await gate.wait()
        return await store(cache, blocks)

    monkeypatch.setattr(RedisPrefixCache, "_write", held_back)
    with running("valkey", tmp_path) as server:
        async with rig({"redis": server.url, "fleet_secret": "secret"}) as all_:
            await turn(all_, await all_.router(), "a", PROMPT, greedy(60))
            await asyncio.wait_for(writing.wait(), WAIT_S)
            await all_.app.service.worker.write_backs.wait_finished()
            draining = asyncio.create_task(all_.app.drain())
            await asyncio.wait({draining}, timeout=0.1)
            assert not draining.done()
            gate.set()
            await asyncio.wait_for(draining, WAIT_S)
            with server.client() as client:
                assert client.dbsize() == 4
