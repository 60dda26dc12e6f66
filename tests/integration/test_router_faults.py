"""Faults on either side of the router, over real gRPC: streams go on without a seam, and nothing is left behind."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.errors import EngineError
from baton.pb import decode_pb2, inference_pb2, prefill_pb2, worker_pb2
from baton.request import Prefilled, TokenInfo
from baton.worker.status import WorkerStatus
from router import output as output_module
from router.workers import calls
from router.workers import pool as pool_module
from tests.integration.router_rig import Answer, refused, router_rig, until, whole
from tests.integration.router_stubs import LENGTH, DownStream, StubDecode, continue_by_hand, granted, letter, text

Kind = decode_pb2.AttemptFailure


@pytest.mark.parametrize("kind", ["KIND_SOURCE_UNREACHABLE", "KIND_TRANSFER", "KIND_ENGINE", "KIND_DRAINING"])
async def test_failed_attempt_goes_on_elsewhere_without_a_seam(tmp_path: Path, kind: str) -> None:
    async with router_rig(tmp_path, prefill=2, decode=2) as b:
        failed: list[decode_pb2.AttemptKey] = []
        begun = asyncio.Event()

        async def once(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
            if failed:
                await continue_by_hand(down, start, asked)
                return
            failed.append(start.key)
            down.send(start.key, 0, 1, [letter(1), letter(2)])
            # A token beyond a gap is the failed attempt's word, and must not outlive it.
            down.send(start.key, 0, 4, [letter(25)])
            await begun.wait()
            down.fail(start.key, getattr(Kind, kind))
            down.send(start.key, 0, 3, [letter(25)])

        for stub in b.decode:
            stub.script = once
        call = b.call(max_tokens=6)
        first = await call.read()
        begun.set()
        answer = Answer([first, *(await whole(call)).events])
        assert answer.text() == text(0, 6)
        assert answer.last().finish_reason == LENGTH
        requests = sorted((r for stub in b.prefill for r in stub.requests), key=lambda r: r.attempt)
        assert [list(r.output_token_ids) for r in requests] == [[], [letter(0), letter(1), letter(2)]]
        assert len({r.request_id for r in requests}) == 1
        assert len({r.transfer_id for r in requests}) == 2
        used = [[stub.identity.worker_id for stub in b.decode if stub.reserves], [len(s.requests) for s in b.prefill]]
        if kind in ("KIND_ENGINE", "KIND_DRAINING"):
            assert used[0] == ["decode-0", "decode-1"]
        else:
            assert used != [["decode-0"], [2, 0]]
        replay = next(r for stub in b.decode for r in stub.reserves if r.key.attempt == 1)
        assert (replay.context_tokens, replay.max_new_tokens) == (3 + 3, 3)


async def test_a_request_that_can_not_be_told_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, told, emit = letter(25), asyncio.Event(), output_module._Choice._emit

    def breaks(self: output_module._Choice, token: TokenInfo, *rest: Any) -> None:
        if token.token_id == bad:
            raise ValueError("it has no text")
        emit(self, token, *rest)

    async def speaks(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        down.send(start.key, 0, 1, [letter(1)])
        await told.wait()
        if asked.sampling.max_tokens == 9:
            down.send(start.key, 0, 2, [bad])
        else:
            down.send(start.key, 0, 2, [letter(2)], LENGTH)

    monkeypatch.setattr(output_module._Choice, "_emit", breaks)
    async with router_rig(tmp_path) as b:
        b.decode[0].script = speaks
        broken, fine = b.call(max_tokens=9), b.call(max_tokens=3)
        while "b" not in Answer([await broken.read()]).text():
            pass
        told.set()
        assert (await refused(broken)).code() is grpc.StatusCode.INTERNAL
        assert (await whole(fine)).text() == text(0, 3)
        assert len(b.decode[0].sessions) == 1


async def test_a_bad_message_costs_its_session_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, read = letter(25), calls.token_from_proto

    def breaks(message: inference_pb2.TokenInfo) -> TokenInfo:
        if message.token_id == bad:
            raise ValueError("no such token")
        return read(message)

    async def once(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        if len(b.decode[0].sessions) > 1:
            await continue_by_hand(down, start, asked)
        else:
            down.send(start.key, 0, 1, [bad])

    monkeypatch.setattr(calls, "token_from_proto", breaks)
    async with router_rig(tmp_path) as b:
        b.decode[0].script = once
        assert (await b.answer(max_tokens=3)).text() == text(0, 3)
        assert len(b.decode[0].sessions) == 2


async def test_a_prefill_that_can_not_be_read_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(done: prefill_pb2.PrefillDone) -> Prefilled:
        raise ValueError("no such token")

    async with router_rig(tmp_path) as b:
        with monkeypatch.context() as broken:
            broken.setattr(calls, "prefilled_from_proto", breaks)
            assert (await refused(b.call(max_tokens=3))).code() is grpc.StatusCode.INTERNAL
        assert (await b.answer(max_tokens=3)).text() == text(0, 3)


async def test_a_bad_status_costs_its_watch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = pool_module.status_from_proto, asyncio.Event()

    def breaks(message: worker_pb2.WorkerStatus) -> WorkerStatus:
        if not broken.is_set():
            broken.set()
            raise ValueError("no such status")
        return read(message)

    async with router_rig(tmp_path) as b:
        monkeypatch.setattr(pool_module, "status_from_proto", breaks)
        b.prefill[0].status.notify()
        await until(b.app, lambda: broken.is_set() and len(b.app.pool.fleet.prefill) == 1)
        assert (await b.answer(max_tokens=3)).text() == text(0, 3)


async def test_last_token_of_a_replay_needs_no_decode(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def fails_late(down: DownStream, start: decode_pb2.Start, _: prefill_pb2.PrefillRequest) -> None:
        down.send(start.key, 0, 1, [letter(1), letter(2)])
        # Before the first token, which prefill sends, a fault would leave nothing to go on from.
        await begun.wait()
        down.fail(start.key, Kind.KIND_ENGINE)

    async with router_rig(tmp_path) as b:
        b.decode[0].script = fails_late
        call = b.call(max_tokens=4)
        first = await call.read()
        begun.set()
        assert Answer([first, *(await whole(call)).events]).text() == "abcd"
        assert [r.transfer_id != "" for r in b.prefill[0].requests] == [True, False]


async def test_an_attempt_that_ends_without_all_of_its_tokens_is_a_fault(tmp_path: Path) -> None:
    async def gap(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        if start.key.attempt:
            await continue_by_hand(down, start, asked)
        else:
            down.send(start.key, 0, 2, [letter(2), letter(3)], LENGTH)

    async with router_rig(tmp_path) as b:
        b.decode[0].script = gap
        assert (await b.answer(max_tokens=4)).text() == "abcd"
        assert len(b.prefill[0].requests) == 2


async def test_attempts_are_bounded_and_the_last_fault_is_told(tmp_path: Path) -> None:
    async def broken(_: prefill_pb2.PrefillRequest) -> None:
        raise EngineError("layer 3 yielded NaN")

    async with router_rig(tmp_path, max_attempts=3) as b:
        b.prefill[0].script = broken
        error = await refused(b.call(max_tokens=4))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "layer 3 yielded NaN" in (error.details() or "")
        assert len(b.prefill[0].requests) == 3
        await b.decode[0].log.until(lambda: len(b.decode[0].cancels) == 3)


async def test_session_lost_before_the_answer_leaves_the_next_workers_attempt_alone(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2) as b:
        lost: list[StubDecode] = []

        def once(stub: StubDecode, reserve: decode_pb2.Reserve) -> decode_pb2.ReserveResult:
            if lost:
                return granted(reserve)
            lost.append(stub)
            stub.sessions[-1].end()
            return decode_pb2.ReserveResult()

        for stub in b.decode:
            stub.answer = functools.partial(once, stub)
        assert (await b.answer(max_tokens=3)).text() == "abc"
        assert [[r.key.attempt for r in stub.reserves] for stub in b.decode] == [[0], [0]]


async def test_a_late_answer_is_not_taken_for_that_of_the_next_reservation(tmp_path: Path) -> None:
    async with router_rig(tmp_path, reserve_timeout_s=0.2) as b:

        def late(reserve: decode_pb2.Reserve) -> decode_pb2.ReserveResult:
            if len(b.decode[0].reserves) == 1:
                return decode_pb2.ReserveResult()
            if len(b.decode[0].reserves) == 2:
                refusal = decode_pb2.ReserveResult(key=reserve.key, reason="full")
                b.decode[0].sessions[-1].messages.put_nowait(decode_pb2.SessionDown(reserved=[refusal]))
            return granted(reserve)

        b.decode[0].answer = late
        assert (await b.answer(max_tokens=3)).text() == "abc"
        # On a busy machine the second answer may be late as well.
        assert len(b.decode[0].reserves) == len(b.decode[0].cancels) + 1 > 1


async def test_a_cancel_ends_the_prefill_call_and_the_reservation(tmp_path: Path) -> None:
    async def block(_: prefill_pb2.PrefillRequest) -> None:
        await asyncio.get_running_loop().create_future()

    async with router_rig(tmp_path) as b:
        b.prefill[0].script = block
        call = b.call(max_tokens=4)
        await b.prefill[0].log.until(lambda: len(b.prefill[0].requests) == 1)
        await b.decode[0].log.until(lambda: len(b.decode[0].starts) == 1)
        call.cancel()
        await b.decode[0].log.until(lambda: len(b.decode[0].cancels) == 1)
        await b.prefill[0].log.until(lambda: b.prefill[0].cancelled == 1)
        await until(b.app, lambda: all(view.own_requests == 0 for view in b.app.pool.fleet.prefill.values()))
