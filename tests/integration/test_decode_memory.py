"""Decode when memory is short, over real sockets: growth, preemption, refusals, and the ledger of it all."""

import asyncio

import pytest

from baton.errors import EngineError
from baton.pb import admin_pb2, admin_pb2_grpc, decode_pb2
from baton.rpc.admin import ledger_from_proto
from baton.rpc.channel import control_channel
from tests.decode_rig import WAIT_S, rig
from tests.decoding import alone, greedy
from tests.metrics import sample

Failure = decode_pb2.AttemptFailure


async def test_the_youngest_goes_back_to_its_router_and_nothing_is_granted_before_the_rest_has_room() -> None:
    before = sample("baton_sequences_preempted_total")
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80) as all_:
        router = await all_.router()
        await router.reserve("c", 1, 1)
        assert all_.app.service.status.status().load.requests_without_token == 1
        await router.cancel("c")
        all_.engine.gate.clear()
        for name in ("a", "b"):
            await router.request(name, [1, 2, 3], greedy(60))
        await all_.until_decoding(router, 2)
        loop = all_.app.service.worker.decode_loop
        while not loop.short_of_pages:
            await asyncio.to_thread(all_.engine.entered.acquire)
            if not loop.short_of_pages:
                all_.engine.gate.set()
                all_.engine.gate.clear()
        await router.until(lambda: "b" in router.failures)
        failure = router.failures.pop("b")
        assert failure.kind == Failure.KIND_PREEMPTED
        assert "gives back its 10 pages of 20: no page is left" in failure.message
        assert all_.app.service.status.status().load.requests_without_token == 0, "both have had tokens"
        for name in ("c", "d"):
            refused = await router.reserve(name, 1, 1)
            assert (refused.granted, refused.too_small) == (False, False)
            assert "the batch lacks pages" in refused.reason
            assert refused.retry_after_ms > 0
        assert (await router.reserve("e", 80, 1)).too_small
        async with control_channel(all_.app.addresses.control) as channel:
            ledger = ledger_from_proto(await admin_pb2_grpc.AdminStub(channel).Ledger(admin_pb2.LedgerRequest()))
        assert (ledger.role, ledger.violation, ledger.pages_total) == ("decode", "", 20)
        (held,) = ledger.entries
        assert (held.owner, held.kind, held.state) == ("a/0", "kv", "decoding")
        assert held.pages == all_.engine.audit()["a/0"]
        all_.engine.gate.set()
        await router.until_finished(("a", 0))
        assert router.tokens["a", 0] == alone([1, 2, 3], greedy(60))
        # Its stream continues elsewhere: these are the tokens that it would have had here.
        told = router.tokens["b", 0]
        assert told == alone([1, 2, 3], greedy(60))[: len(told)]
        await all_.until_free()
    assert sample("baton_sequences_preempted_total") == before + 1


async def test_an_idle_worker_whose_pages_dont_add_up_fails_with_the_ledger(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as all_:
        router = await all_.router()
        lost = all_.engine.reserve("lost/0", 20)
        await router.request("r", [1, 2, 3], greedy(3))
        await router.until_finished(("r", 0))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(EngineError, match="owns the pages of lost/0"):
                await asyncio.shield(all_.app.failed)
        assert "lost/0" in caplog.text
        all_.engine.free(lost)
