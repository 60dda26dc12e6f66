"""The decode service over real sockets: a router's session on one side, a KV exporter on the other."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading

import grpc
import pytest

from baton.pb import decode_pb2, decode_pb2_grpc
from baton.request import SamplingParams
from baton.rpc.channel import control_channel
from decode_svc.messages import AttemptKey, Cancel, Reserve, Start
from tests.decode_rig import WAIT_S, rig
from tests.decoding import alone, greedy

Failure = decode_pb2.AttemptFailure


async def test_a_request_continues_where_prefill_ended_and_its_account_adds_up() -> None:
    async with rig() as all_:
        router = await all_.router()
        await router.request("r", range(1, 20), greedy(8))
        await router.until_finished(("r", 0))
        assert router.tokens["r", 0] == alone(range(1, 20), greedy(8))
        timings = router.timings["r", 0]
        assert timings.fetch_ms > 0
        assert timings.slot_wait_ms >= 0
        await all_.until_free()


async def test_sequences_of_any_mixture_share_the_batch_and_each_gets_what_it_gets_alone() -> None:
    dice = random.Random(7)
    async with rig(slots=8, admits=32) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        expected = {}
        for number in range(32):
            prompt = [dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
            params = SamplingParams(
                max_tokens=dice.randrange(2, 20),
                temperature=dice.choice([0.0, 1.0]),
                seed=dice.randrange(10**6),
                stop_token_ids=tuple(dice.sample(range(1000), 40)),
                ignore_eos=dice.random() < 0.5,
            )
            await router.request(f"r{number}", prompt, params)
            expected[f"r{number}", 0] = alone(prompt, params)
        await all_.until_decoding(router, len(expected) - len(router.finished))
        all_.engine.gate.set()
        await router.until_finished(*expected)
        assert router.tokens == expected
        assert max(len(batch) for batch in all_.engine.steps) == 8
        await all_.until_free()


async def test_a_step_is_one_message_with_all_of_a_routers_sequences() -> None:
    async with rig() as all_:
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


async def test_choices_share_one_transfer_and_differ_by_their_seeded_noise() -> None:
    params = SamplingParams(max_tokens=9, seed=11, n=4)
    async with rig() as all_:
        router = await all_.router()
        await router.request("r", range(5, 18), params, choices=range(4))
        await router.until_finished(*(("r", choice) for choice in range(4)))
        for choice in range(4):
            assert router.tokens["r", choice] == alone(range(5, 18), params, choice)
        assert len({tuple(tokens) for tokens in router.tokens.values()}) == 4
        await all_.until_free()


async def test_a_choice_that_is_cancelled_leaves_the_others_alone() -> None:
    params = SamplingParams(max_tokens=9, seed=11, n=3)
    async with rig() as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", range(5, 18), params, choices=range(3))
        await asyncio.to_thread(all_.engine.entered.acquire)
        await router.cancel("r", 1)
        assert not (await router.reserve("barrier", 0, 1)).granted
        all_.engine.gate.set()
        await router.until_finished(("r", 0), ("r", 2))
        assert router.tokens["r", 1] == alone(range(5, 18), params, 1)[:1]
        assert router.tokens["r", 2] == alone(range(5, 18), params, 2)
        await all_.until_free()


async def test_cancelling_frees_everything_while_fetching_waiting_and_running() -> None:
    async with rig(slots=1, admits=9) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("running", [1, 2, 3], greedy(50))
        await asyncio.to_thread(all_.engine.entered.acquire)
        await router.request("waiting", [1, 2, 3], greedy(50))
        assert (await router.reserve("fetching", 40, 50)).granted
        router.open("fetching", range(40))
        await router.start("fetching")
        assert (await router.reserve("reserved", 40, 50)).granted
        for name in ("fetching", "waiting", "running", "reserved", "never heard of"):
            await router.cancel(name)
        assert not (await router.reserve("barrier", 0, 1)).granted
        all_.engine.gate.set()
        await all_.until_free()
        assert not router.failures
        assert not router.finished


async def test_the_end_of_a_session_frees_all_that_it_owned_and_nothing_else() -> None:
    async with rig(slots=2, admits=9) as all_:
        lost, kept = await all_.router(), await all_.router()
        all_.engine.gate.clear()
        for name in ("a", "b", "c"):
            await lost.request(name, [4, 5, 6], greedy(60))
        await asyncio.to_thread(all_.engine.entered.acquire)
        await lost.reserve("d", 100, 5)
        await kept.request("a", [7, 8], greedy(12))
        lost.call.cancel()
        all_.engine.gate.set()
        await kept.until_finished(("a", 0))
        assert kept.tokens["a", 0] == alone([7, 8], greedy(12))
        await all_.until_free()


async def test_a_half_closed_session_ends_with_success_and_frees_its_attempts() -> None:
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("r", 10, 10)).granted
        await router.call.done_writing()
        assert await router.call.code() is grpc.StatusCode.OK
        await all_.until_free()


async def test_deadlines_end_fetches_waits_and_running_sequences() -> None:
    async with rig(slots=1, admits=9) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        for name, prompt in (("running", [1, 2]), ("waiting", [3, 4])):
            assert (await router.reserve(name, 2, 50)).granted
            commit = router.open(name, prompt)
            await router.start(name, deadline_ms=400)
            commit(greedy(50))
            if name == "running":
                await asyncio.to_thread(all_.engine.entered.acquire)
        assert (await router.reserve("fetching", 2, 50)).granted
        router.open("fetching", [5, 6])
        await router.start("fetching", deadline_ms=1)
        await router.until(lambda: len(router.failures) == 3)
        all_.engine.gate.set()
        assert {failure.kind for failure in router.failures.values()} == {Failure.KIND_DEADLINE}
        for name, state, deadline_s in (
            ("running", "decoding", 0.4),
            ("waiting", "slot_wait", 0.4),
            ("fetching", "transferring", 0.001),
        ):
            told = re.search(rf"was {state} at its deadline, ([\d.]+) s", router.failures[name].message)
            assert told is not None, router.failures[name].message
            assert deadline_s <= float(told[1]) < deadline_s + 2
        await all_.until_free()


async def test_reservations_are_answered_while_a_step_runs_and_refused_with_numbers() -> None:
    async with rig(pages=32, max_model_len=400) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(20))
        await asyncio.to_thread(all_.engine.entered.acquire)
        assert (await router.reserve("fits", 60, 4)).granted
        full = await router.reserve("full", 60, 4)
        assert (full.granted, full.never) == (False, False)
        assert "needs 16 pages, 10 of 32" in full.reason
        never = await router.reserve("never", 300, 4)
        assert (never.granted, never.never) == (False, True)
        assert "needs 76 pages, there are 32" in never.reason
        again = await router.reserve("fits", 1, 1)
        assert "already" in again.reason
        all_.engine.gate.set()
        await router.until_finished(("r", 0))


async def test_a_start_that_is_cancelled_in_the_same_breath_releases_the_export() -> None:
    async with rig() as all_:
        service, exporter = all_.app.service, all_.exporter
        exporter.open("r/0", [1, 2, 3])(SamplingParams(max_tokens=4, temperature=0))
        session, key = service.worker.open_session("router"), AttemptKey("r", 0)
        service.worker.handle(session, Reserve(key, context_tokens=3, max_new_tokens=4, choices=1))
        service.worker.handle(session, Start(key, exporter.source("r/0")))
        service.worker.handle(session, Cancel(key))
        await asyncio.wait_for(exporter.exports.drained(), 60)
        service.worker.close_session(session)


async def test_a_reservation_that_is_not_started_runs_out() -> None:
    async with rig({"start_timeout_s": 0.05}) as all_:
        router = await all_.router()
        assert (await router.reserve("r", 10, 10)).granted
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == Failure.KIND_TRANSFER
        await all_.until_free()


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


async def test_a_handoff_that_was_not_reserved_for_is_refused() -> None:
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("r", 3, 5)).granted
        commit = router.open("r", [1, 2, 3])
        await router.start("r")
        commit(greedy(6))
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == Failure.KIND_TRANSFER
        assert "allows 6 new tokens, reserved was 5" in router.failures["r"].message
        await all_.until_free()


async def test_a_start_without_a_reservation_is_answered() -> None:
    async with rig() as all_:
        router = await all_.router()
        await router.start("r")
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == Failure.KIND_TRANSFER


async def test_a_replay_continues_its_choice_after_the_outputs_already_present() -> None:
    params = SamplingParams(max_tokens=10, seed=3, n=4)
    expected = alone([9, 8, 7], params, 2)
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("r", 3 + 4, 6, attempt=1)).granted
        commit = router.open("r", [9, 8, 7], expected[:4], attempt=1)
        await router.start("r", attempt=1)
        router.tokens["r", 2] = expected[:5]
        commit(params, [2], attempt=1)
        await router.until_finished(("r", 2))
        assert router.tokens["r", 2] == expected


async def test_a_failed_step_fails_its_batch_and_the_worker_goes_on() -> None:
    async with rig() as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(9))
        await asyncio.to_thread(all_.engine.entered.acquire)
        all_.engine.fail_next = "out of memory"
        all_.engine.gate.set()
        await router.until(lambda: "r" in router.failures)
        assert router.failures["r"].kind == Failure.KIND_ENGINE
        assert "out of memory" in router.failures["r"].message
        router.failures.clear()
        await router.request("next", [1, 2, 3], greedy(9))
        await router.until_finished(("next", 0))
        assert not all_.app.failed.done()


async def test_a_worker_whose_pages_dont_add_up_fails_all_and_takes_no_more() -> None:
    async with rig() as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(9))
        await asyncio.to_thread(all_.engine.entered.acquire)
        await router.reserve("other", 5, 5)
        all_.engine.fail_next, all_.engine.broken = "NaN", True
        all_.engine.gate.set()
        await router.until(lambda: len(router.failures) == 2)
        assert {failure.kind for failure in router.failures.values()} == {Failure.KIND_ENGINE}
        assert "page audit failed" in str(all_.app.failed.exception())
        assert "engine has failed" in (await router.reserve("next", 5, 5)).reason
        all_.engine.broken = False


async def test_a_drain_refuses_new_work_and_lets_the_running_finish(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decode_svc")
    async with rig() as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(9))
        await asyncio.to_thread(all_.engine.entered.acquire)
        draining = asyncio.create_task(all_.app.drain())
        await asyncio.sleep(0)
        assert "draining" in (await router.reserve("next", 5, 5)).reason
        all_.engine.gate.set()
        await router.until_finished(("r", 0))
        await asyncio.wait_for(draining, WAIT_S)
        assert not router.failures
        assert [text for name, _, text in caplog.record_tuples if name.startswith("decode_svc")] == ["drained"]


async def test_a_drain_whose_grace_is_over_hands_the_rest_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decode_svc")
    async with rig({"drain_s": 0.01}) as all_:
        router = await all_.router()
        all_.engine.gate.clear()
        await router.request("r", [1, 2, 3], greedy(9))
        await asyncio.to_thread(all_.engine.entered.acquire)
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


async def test_a_malformed_command_ends_its_session_by_name_and_frees_it() -> None:
    async with rig() as all_:
        router = await all_.router()
        await router.reserve("r", 5, 5)
        await router.say(cancel=decode_pb2.Cancel())
        assert await router.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cancel.key.request_id" in await router.call.details()
        await all_.until_free()


async def test_the_worker_leaves_no_task_and_no_thread_behind() -> None:
    before = {task.get_name() for task in asyncio.all_tasks()}
    async with rig() as all_:
        router = await all_.router()
        await router.request("r", [1, 2, 3], greedy(9))
    left = {task.get_name() for task in asyncio.all_tasks()} - before
    assert not {name for name in left if name.startswith(("fetch", "session", "watch"))}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode-engine")]
