"""Prompts that begin alike and come together: who waits for whom, and what a fault leaves to those who wait."""

import asyncio
from typing import Any

import pytest

from baton.engine.fake import FakeEngine, expected_tokens
from tests.prefill import PROMPT, WAIT_S, Gate, by_tier, prefilled, read, serving, since


class Faulty(FakeEngine):
    """Fails once in the chunk that begins at `at`."""

    at = -1

    def launch(self, chunks: Any = (), **kwargs: Any) -> Any:
        if chunks[0].start == self.at:
            self.at = -1
            raise RuntimeError("no memory")
        return super().launch(chunks, **kwargs)


async def test_a_fault_of_the_engine_leaves_nothing_cached() -> None:
    engine = Faulty()
    async with serving(engine, chunk_size=40) as client:
        await client.done(PROMPT[50:])
        engine.at = 40
        with pytest.raises(Exception, match="no memory"):
            await client.done()
        assert client.app.engine.stats().cached == 0
        assert (await client.done()).cached_tokens == 0


async def test_what_a_prompt_left_before_its_fault_is_not_given_to_those_who_waited_for_it() -> None:
    gate = Gate()
    engine = Faulty(chunk_time=1.0, delay=gate)
    engine.at = 40
    async with serving(engine, chunk_size=40) as client:
        first = asyncio.create_task(client.done())
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT[:80], 1, 2]))
        await client.status(lambda status: status.load.requests_without_token == 2)
        gate.open()
        with pytest.raises(Exception, match="no memory"):
            await first
        done = await other
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT[:80], 1, 2], 1)[0]


async def test_prompts_that_begin_alike_are_computed_once_though_they_come_together() -> None:
    gate = Gate()
    layers = FakeEngine().spec.kv_format.layers
    async with serving(FakeEngine(chunk_time=1.0, delay=gate), chunk_size=40) as client:
        before = prefilled()
        first = asyncio.create_task(client.done())
        await gate.reached()
        others = [asyncio.create_task(client.done([*PROMPT[:80], 1, 2, i])) for i in range(3)]
        await client.status(lambda status: status.load.requests_without_token >= 3)
        gate.pass_layers(2 * layers)
        gate.open()
        assert (await first).cached_tokens == 0
        for i, other in enumerate(others):
            done = await other
            assert by_tier(done) == {"pool": 80}
            assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT[:80], 1, 2, i], 1)[0]
        assert since(before) == {"computed": 109, "pool": 240}


@pytest.mark.parametrize("begun", [True, False])
async def test_a_short_prompt_waits_for_a_long_one_only_while_that_is_at_it(begun: bool) -> None:
    gate = Gate()
    short, long = [*PROMPT[:64], *[1] * 16], [*PROMPT[:64], *[2] * 336]
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        running = asyncio.create_task(client.done(long if begun else [3] * 16))
        await gate.reached()
        if not begun:
            others = asyncio.create_task(client.done(long))
            await client.status(lambda status: status.load.pages_used == 26)
        waiting = asyncio.create_task(client.done(short))
        await client.status(
            lambda status: status.load.requests_without_token == 2 if begun else status.load.pages_used == 31
        )
        gate.open()
        await running
        assert by_tier(await waiting) == ({"pool": 64} if begun else {})
        if not begun:
            await others


async def test_nobody_waits_for_what_fills_no_page_and_so_is_never_published() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, page_size=64)) as client:
        first = asyncio.create_task(client.done(PROMPT[:60]))
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT[:50], 1]))
        await client.status(lambda status: status.load.pages_used == 2)
        gate.open()
        await first
        assert (await other).cached_tokens == 0


async def test_one_that_waits_for_part_of_a_page_waits_until_it_is_whole() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate, page_size=64), chunk_size=50) as client:
        first = asyncio.create_task(client.done(PROMPT[:90]))
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT[:48], 1, 2]))
        await client.status(lambda status: status.load.requests_without_token == 2)
        gate.open()
        await first
        assert by_tier(await other) == {"pool": 48}


async def test_one_that_waited_for_another_goes_on_when_that_one_ends() -> None:
    gate = Gate()
    async with serving(FakeEngine(chunk_time=1.0, delay=gate)) as client:
        first = client.call()
        reading = asyncio.create_task(read(first))
        await gate.reached()
        other = asyncio.create_task(client.done([*PROMPT, 1]))
        await client.status(lambda status: status.load.pages_used == 7 and status.load.requests_without_token == 2)
        aborted = client.watch_aborts()
        first.cancel()
        await asyncio.wait([reading])
        await asyncio.wait_for(aborted.wait(), WAIT_S)
        gate.open()
        done = await other
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens([*PROMPT, 1], 1)[0]
