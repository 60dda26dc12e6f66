"""The prefill service and a decode worker that holds a prefix, when something is wrong with that."""

import asyncio

import pytest

from baton.engine.fake import expected_tokens
from baton.telemetry.metrics import TRANSFER_FAULTS
from tests.metrics import count
from tests.peers import exporter
from tests.prefill import PROMPT, WAIT_S, by_tier, fetch_all, serving


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


@pytest.mark.parametrize("fault", ["gone", "unknown", "stranger", "silent", "malformed"])
async def test_a_peer_that_fails_is_only_slower(fault: str) -> None:
    async with serving(cache_budget_s=0.1) as client, exporter() as (exporting, held):
        source = exporting.offer(held, 96)
        if fault == "gone":
            source.export.shards[0].kv_address = "127.0.0.1:1"
        elif fault == "unknown":
            source.export.transfer_id = "another"
        elif fault == "stranger":
            source.export.incarnation = "another"
        elif fault == "malformed":
            source.export.shards[0].kv_address = "nowhere"
        else:
            source = exporting.source("announced", 96)
            exporting.exports.announce("announced")
        done = await client.done(source=source)
        assert done.cached_tokens == 0
        assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]


async def test_a_peer_that_holds_another_prefix_is_a_miss() -> None:
    """It sends as many tokens as were named, of another prompt; and one that says nothing of what it holds."""
    faults = TRANSFER_FAULTS.labels("wrong_prefix")
    before = count(faults)
    async with serving() as client, exporter([*PROMPT[:95], PROMPT[95] + 1, *PROMPT[96:]]) as (exporting, held):
        for prompt in ([*PROMPT[:95], PROMPT[95] + 1], PROMPT[:80] + PROMPT[:16]):
            done = await client.done(source=exporting.offer(held, 96, prompt))
            assert done.cached_tokens == 0
            assert done.first_tokens[0].token.token_id == expected_tokens(PROMPT, 1)[0]
            client.app.engine.drop_cached()
    assert count(faults) == before + 2


async def test_a_call_cancelled_during_a_fetch_from_a_peer_leaves_nothing() -> None:
    async with serving(cache_budget_s=WAIT_S) as client, exporter() as (exporting, _):
        exporting.exports.announce("announced")
        source = exporting.source("announced", 96)
        call = client.call(transfer_id="t", source=source)
        await client.status(lambda status: status.load.pages_used == 7)
        call.cancel()
        async with asyncio.timeout(WAIT_S / 2):
            await client.pages_back()


async def test_a_peer_that_says_more_than_it_has_is_only_slower() -> None:
    async with serving() as client, exporter() as (exporting, held):
        source = exporting.offer(held, 48)
        source.tokens = 96
        assert (await client.done(source=source)).cached_tokens == 0
        client.app.engine.drop_cached()
        source = exporting.offer(held, 50)
        assert by_tier(await client.done([*PROMPT[:50], 8], source=source)) == {"peer": 48}
