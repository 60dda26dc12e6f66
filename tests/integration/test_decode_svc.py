"""The decode service over real sockets: sessions of routers on one side, a KV exporter on the other, short memory."""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import decode_svc.worker
from baton.errors import EngineError
from baton.pb import admin_pb2, admin_pb2_grpc, decode_pb2, decode_pb2_grpc
from baton.request import SamplingParams
from baton.rpc.admin import ledger_from_proto
from baton.rpc.channel import control_channel
from decode_svc.messages import AttemptKey, Cancel, Reserve, Start
from tests.decode_rig import WAIT_S, Rig, SessionRouter, key, rig
from tests.decoding import alone, greedy
from tests.metrics import sample

Failure = decode_pb2.AttemptFailure


async def held_in_a_step(all_: Rig, router: SessionRouter) -> None:
    """The router's request "r" is in a step that does not end until the gate of the engine is set."""
    all_.engine.gate.clear()
    await router.request("r", [1, 2, 3], greedy(9))
    await asyncio.to_thread(all_.engine.entered.acquire)


@pytest.fixture
async def all_() -> AsyncIterator[Rig]:
    async with rig() as all_:
        yield all_


async def test_a_request_continues_where_prefill_ended_and_its_account_adds_up(all_: Rig) -> None:
    router = await all_.router()
    await router.request("r", range(1, 20), greedy(8))
    await router.until_finished(("r", 0))
    assert router.tokens["r", 0] == alone(range(1, 20), greedy(8))
    timings = router.timings["r", 0]
    assert timings.fetch_ms > 0
    assert timings.slot_wait_ms >= 0
    await all_.until_free()


async def test_a_step_is_one_message_with_all_of_a_routers_sequences(all_: Rig) -> None:
    first, second = await all_.router(), await all_.router()
    all_.engine.gate.clear()
    for router, name in ((first, "a"), (first, "b"), (second, "c"), (first, "d")):
        await router.request(name, [1, 2, 3], greedy(5))
    await asyncio.to_thread(all_.engine.entered.acquire)
    await all_.until_decoding(first, 4)
    all_.engine.gate.set()
    await first.until_finished(("a", 0), ("b", 0), ("d", 0))
    await second.until_finished(("c", 0))
    for router, names in ((first, {"a", "b", "d"}), (second, {"c"})):
        outputs = [message.outputs for message in router.messages if message.outputs]
        assert len(outputs) <= len(all_.engine.steps)
        assert names in [{output.key.request_id for output in each} for each in outputs]
        assert names == {output.key.request_id for each in outputs for output in each}


async def test_a_half_closed_session_ends_with_success_and_frees_its_attempts(all_: Rig) -> None:
    router = await all_.router()
    assert (await router.reserve("r", 10, 10)).granted
    await router.call.done_writing()
    assert await router.call.code() is grpc.StatusCode.OK
    await all_.until_free()


async def test_reservations_are_answered_while_a_step_runs_and_refused_with_numbers() -> None:
    async with rig(pages=32, max_model_len=400) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(20))
        await asyncio.to_thread(all_.engine.entered.acquire)
        assert (await router.reserve("fits", 60, 4)).granted
        full = await router.reserve("full", 60, 4)
        assert (full.granted, full.too_small, full.waiting) == (False, False, True)
        never = await router.reserve("never", 300, 4)
        assert (never.granted, never.too_small) == (False, True)
        assert "needs 76 pages, there are 32" in never.reason
        all_.engine.gate.set()
        await router.until_finished(("r", 0))
        await router.cancel("fits")
        await router.until_granted("full")


async def test_a_start_that_is_cancelled_in_the_same_breath_releases_the_export(all_: Rig) -> None:
    worker, exporter = all_.app.worker, all_.exporter
    exporter.open("r/0", [1, 2, 3])(SamplingParams(max_tokens=4, temperature=0))
    session, key = worker.open_session("router"), AttemptKey("r", 0)
    worker.handle_command(session, Reserve(key, context_tokens=3, max_new_tokens=4, choices=1))
    worker.handle_command(session, Start(key, exporter.source("r/0")))
    worker.handle_command(session, Cancel(key))
    await asyncio.wait_for(exporter.exports.wait_closed(), 60)
    worker.close_session(session)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"incarnation": "earlier"}, Failure.KIND_TRANSFER),
        ({"address": "127.0.0.1:1"}, Failure.KIND_SOURCE_UNREACHABLE),
        ({"address": "nowhere"}, Failure.KIND_TRANSFER),
        ({"transfer_id": ""}, Failure.KIND_TRANSFER),
    ],
)
async def test_a_fetch_that_fails_ends_its_attempt_with_the_kind_of_fault(change: dict[str, str], kind: int) -> None:
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("r", 3, 5)).granted
        await router.start("r", **change)
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == kind
        await router.request("next", [1, 2, 3], greedy(3))
        router.failures.clear()
        await router.until_finished(("next", 0))
        await all_.until_free()


async def test_a_start_without_a_reservation_is_answered(all_: Rig) -> None:
    router = await all_.router()
    await router.start("r")
    await router.until(lambda: "r" in router.failures)
    assert router.failures["r"].kind == Failure.KIND_TRANSFER


async def test_a_worker_whose_pages_dont_add_up_fails_all_and_takes_no_more(all_: Rig) -> None:
    router = await all_.router()
    await held_in_a_step(all_, router)
    await router.reserve("other", 5, 5)
    all_.engine.fail_next, all_.engine.broken = "NaN", True
    all_.engine.gate.set()
    await router.until(lambda: len(router.failures) == 2)
    assert {failure.kind for failure in router.failures.values()} == {Failure.KIND_ENGINE}
    assert "page audit failed" in str(all_.app.failed.exception())
    assert "engine has failed" in (await router.reserve("next", 5, 5)).reason
    all_.engine.broken = False


async def test_a_step_that_counts_its_work_is_stalled_only_when_the_count_stands_still() -> None:
    looks, looked = itertools.count(1), asyncio.Event()

    def count_work() -> int:
        if (number := next(looks)) == 3 * 4:
            # Three times `stall_s`, in one step.
            looked.set()
        return number

    async with rig({"stall_s": 0.2}) as all_:
        router = await all_.router()
        all_.engine.count_work = count_work
        await held_in_a_step(all_, router)
        await asyncio.wait_for(looked.wait(), WAIT_S)
        await all_.until_status(lambda status: status.load.pages_used > 0 and not status.stalled)
        all_.engine.count_work = lambda: -1
        await all_.until_status(lambda status: status.stalled)
        all_.engine.gate.set()
        await router.until_finished(("r", 0))
        await all_.until_status(lambda status: not status.stalled)


async def test_a_drain_refuses_new_work_and_lets_the_running_finish(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with rig() as all_:
        router = await all_.router()
        await held_in_a_step(all_, router)
        caplog.clear()
        draining = asyncio.create_task(all_.app.drain())
        await asyncio.sleep(0)
        assert "draining" in (await router.reserve("next", 5, 5)).reason
        all_.engine.gate.set()
        await router.until_finished(("r", 0))
        await asyncio.wait_for(draining, WAIT_S)
        assert not router.failures
        assert [text for name, _, text in caplog.record_tuples if name == "baton.worker.start"] == ["drained"]


async def test_a_drain_whose_grace_is_over_hands_the_rest_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decode_svc")
    async with rig({"drain_s": 0.01}) as all_:
        router = await all_.router()
        await held_in_a_step(all_, router)
        await asyncio.wait_for(all_.app.drain(), WAIT_S)
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == Failure.KIND_DRAINING
        assert [text for name, _, text in caplog.record_tuples if name.startswith("decode_svc")] == [
            "drained: 1 sequences moved after 0.01 s"
        ]
        all_.engine.gate.set()


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (decode_pb2.SessionUp(heartbeat=decode_pb2.Heartbeat()), "must be hello, got 'heartbeat'"),
        (decode_pb2.SessionUp(), "must be hello, got 'nothing'"),
    ],
)
async def test_a_session_begins_with_hello(first: decode_pb2.SessionUp, words: str) -> None:
    async with rig() as all_, control_channel(all_.app.addresses.control) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Session()
        await call.write(first)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in await call.details()


async def test_a_malformed_command_ends_its_session_by_name_and_frees_it(all_: Rig) -> None:
    router = await all_.router()
    await router.reserve("r", 5, 5)
    await router.say(cancel=decode_pb2.Cancel())
    assert await router.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cancel.key.request_id" in await router.call.details()
    await all_.until_free()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"choices": 0}, "reserve.choices: must be at least 1, got 0"),
        ({"prefix_digests": b"x" * 33}, "reserve.prefix_digests: its length must be a multiple of 32 bytes, got 33"),
        ({"cache": 99}, "cache: must be one of"),
        ({"name": "r"}, "reserve.key: attempt r/0 is reserved already"),
    ],
)
async def test_a_malformed_or_repeated_reservation_ends_its_session_and_is_not_too_large(
    change: dict[str, Any], words: str
) -> None:
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("r", 5, 5)).granted
        request = {"name": "next", "context": 5, "new": 5, **change}
        asking = asyncio.create_task(router.reserve(**request))
        assert await router.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in await router.call.details()
        assert request["name"] not in router.reserved
        asking.cancel()
        await all_.until_free()


async def test_the_worker_leaves_no_task_and_no_thread_behind() -> None:
    before = {task.get_name() for task in asyncio.all_tasks()}
    async with rig() as all_:
        router = await all_.router()
        await router.request("r", [1, 2, 3], greedy(9))
    left = {task.get_name() for task in asyncio.all_tasks()} - before
    assert not {name for name in left if name.startswith(("fetch", "session", "watch"))}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode-engine")]


async def test_attempts_that_a_router_does_not_list_are_ended(all_: Rig) -> None:
    router, other = await all_.router(beats=False), await all_.router()
    all_.engine.gate.clear()
    for name in ("kept", "forgotten"):
        await router.request(name, [1, 2, 3], greedy(9))
    assert (await router.reserve("unstarted", 10, 10)).granted
    assert (await other.reserve("foreign", 10, 10)).granted
    await router.say(heartbeat=decode_pb2.Heartbeat(live=[key("kept"), key("never heard of")]))
    await router.barrier()
    assert {each.key.request_id for each in all_.app.worker.attempts} == {"kept", "foreign"}
    all_.engine.gate.set()
    await router.until_finished(("kept", 0))
    assert router.tokens["kept", 0] == alone([1, 2, 3], greedy(9))
    assert not router.failures


async def test_a_cancel_of_what_waits_gives_the_pages_set_aside_for_it_to_others() -> None:
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80) as all_:
        router, other = await all_.router(), await all_.router()
        assert (await router.reserve("held", 36, 4)).granted
        assert (await router.reserve("large", 60, 4)).waiting
        assert (await other.reserve("half", 28, 4)).waiting
        await router.cancel("large")
        await other.until_granted("half")


async def test_answers_that_are_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_svc.worker, "MAX_ANSWERS", 50)
    async with rig() as all_:
        router, other = await all_.router(), await all_.router()
        assert (await router.reserve("r", 10, 10)).granted
        assert (await other.reserve("s", 10, 10)).granted
        (session, _) = all_.app.worker.sessions.values()
        for number in range(52):
            # All at once, so that no message leaves in between.
            all_.app.worker.handle_command(session, Reserve(AttemptKey(f"flood{number}", 0), 1 << 30, 1, 1))
        assert session.unread == 0
        assert await router.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "51 answers were not read; at most 50" in await router.call.details()
        assert {each.key.request_id for each in all_.app.worker.attempts} == {"s"}


async def test_a_flood_of_hopeless_reservations_is_answered_to_a_router_that_reads(all_: Rig) -> None:
    router = await all_.router()
    for number in range(2000):
        flood = key(f"flood{number}")
        reserve = decode_pb2.Reserve(key=flood, context_tokens=1 << 30, max_new_tokens=1, choices=1)
        await router.say(reserve=reserve)
    async with asyncio.timeout(60):
        await router.until(lambda: len(router.reserved) == 2000)
    assert not any(result.granted for result in router.reserved.values())


async def test_the_youngest_goes_back_to_its_router_and_nothing_takes_the_pages_that_the_rest_needs() -> None:
    before = sample("baton_sequences_preempted_total")
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80) as all_:
        router = await all_.router()
        await router.reserve("c", 1, 1)
        assert all_.app.status.status().load.requests_without_token == 1
        await router.cancel("c")
        all_.engine.gate.clear()
        for name in ("a", "b"):
            await router.request(name, [1, 2, 3], greedy(60))
        await all_.until_decoding(router, 2)
        batch_pages = all_.app.worker.batch_pages
        while not batch_pages.kept_pages:
            await asyncio.to_thread(all_.engine.entered.acquire)
            if not batch_pages.kept_pages:
                all_.engine.gate.set()
                all_.engine.gate.clear()
        await router.until(lambda: "b" in router.failures)
        failure = router.failures.pop("b")
        assert failure.kind == Failure.KIND_PREEMPTED
        assert "is preempted and frees 10 of 20 pages: the batch needs pages and none is free" in failure.message
        assert all_.app.status.status().load.requests_without_token == 0, "both have had tokens"
        for name in ("c", "d"):
            answer = await router.reserve(name, 30, 1)
            assert (answer.granted, answer.too_small, answer.waiting) == (False, False, True)
            await router.cancel(name)
        assert (await router.reserve("small", 1, 1)).granted
        await router.cancel("small")
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
