"""Decode when memory is short, over real sockets: growth, pauses, preemption, refusals, and the ledger of it all."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import EngineError
from baton.lifecycle import State
from baton.pb import admin_pb2, admin_pb2_grpc, decode_pb2
from baton.rpc.admin import ledger_from_proto
from baton.rpc.channel import control_channel
from tests.decode_rig import WAIT_S, Rig, SessionRouter, rig
from tests.decoding import alone, greedy
from tests.metrics import sample

Failure = decode_pb2.AttemptFailure


def counted(name: str) -> float:
    return sample(f"baton_sequences_{name}_total")


async def paused_pair(all_: Rig, router: SessionRouter) -> None:
    """Two sequences that can't both go on; the younger, "b", is paused, and the next step waits at the gate."""
    all_.engine.gate.clear()
    for name in ("a", "b"):
        await router.request(name, [1, 2, 3], greedy(60))
    await all_.until_decoding(router, 2)
    while not all_.app.service.worker.loop.paused:
        await asyncio.to_thread(all_.engine.entered.acquire)
        if not all_.app.service.worker.loop.paused:
            all_.engine.gate.set()
            all_.engine.gate.clear()
    async with asyncio.timeout(WAIT_S):
        while not any(attempt.life.state is State.PAUSED for attempt in all_.app.service.worker.attempts):
            await router.reserve("barrier", 0, 1)


async def test_while_a_sequence_is_paused_nothing_is_granted_and_the_ledger_says_where_it_is() -> None:
    before = counted("paused"), counted("resumed")
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80) as all_:
        router = await all_.router()
        await router.reserve("c", 1, 1)
        assert all_.app.service.status.status().load.newcomers == 1
        await router.cancel("c")
        await paused_pair(all_, router)
        assert all_.app.service.status.status().load.newcomers == 0, "both have had tokens"
        refused = await router.reserve("c", 1, 1)
        assert (refused.granted, refused.never) == (False, False)
        assert "; 1 sequences are paused" in refused.reason
        assert refused.retry_after_ms > 0
        assert (await router.reserve("d", 79, 1)).reason.endswith("1 sequences are paused")
        assert (await router.reserve("e", 80, 1)).never
        async with control_channel(all_.app.addresses.control) as channel:
            ledger = ledger_from_proto(await admin_pb2_grpc.AdminStub(channel).Ledger(admin_pb2.LedgerRequest()))
        assert (ledger.role, ledger.violation, ledger.pages_total) == ("decode", "", 20)
        held = {entry.owner: entry for entry in ledger.entries}
        assert (held["a/0"].kind, held["a/0"].state) == ("kv", "decoding")
        assert (held["b/0"].kind, held["b/0"].state, held["b/0"].pages) == ("host_kv", "paused", 0)
        assert held["b/0"].bytes == all_.engine.host_kv()["b/0"]
        assert held["a/0"].pages == all_.engine.audit()["a/0"]
        all_.engine.gate.set()
        await router.until_finished(("a", 0), ("b", 0))
        assert router.tokens["b", 0] == alone([1, 2, 3], greedy(60))
    assert counted("paused") - before[0] == counted("resumed") - before[1] > 0


async def test_a_full_host_pool_gives_the_youngest_back_to_its_router() -> None:
    before = counted("preempted")
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80, host_kv_memory=0) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        for name in ("a", "b"):
            await router.request(name, [1, 2, 3], greedy(60))
        await all_.until_decoding(router, 2)
        all_.engine.gate.set()
        await router.until(lambda: "b" in router.failures)
        failure = router.failures.pop("b")
        assert failure.kind == Failure.KIND_PREEMPTED
        assert "host memory is full" in failure.message
        await router.until_finished(("a", 0))
        assert router.tokens["a", 0] == alone([1, 2, 3], greedy(60))
        # Its stream continues elsewhere: these are the tokens that it would have had here.
        told = router.tokens["b", 0]
        assert told == alone([1, 2, 3], greedy(60))[: len(told)]
        await all_.until_free()
    assert counted("preempted") == before + 1


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
