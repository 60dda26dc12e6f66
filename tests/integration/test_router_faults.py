"""Faults of workers and of what they say, over real gRPC: streams go on without a seam, and nothing is left behind."""

import asyncio
import functools
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import REGISTRY

import router.retries
import router.workers.failures
from baton import AsyncClient
from baton.errors import EngineError
from baton.kv.hashing import tenant_salt
from baton.pb import decode_pb2, inference_pb2, kv_pb2, prefill_pb2, worker_pb2
from baton.request import Prefilled, TokenInfo
from baton.rpc.channel import control_channel
from baton.worker.status import WorkerStatus
from router import output as output_module
from router.workers import decode_session, prefill_call
from router.workers import link as link_module
from tests.integration.router_rig import Answer, RouterRig, refused, request, router_rig, until, whole
from tests.integration.router_stubs import (
    LENGTH,
    DownStream,
    Script,
    StubDecode,
    continue_by_hand,
    granted,
    letter,
    never_ending,
    text,
)
from tests.metrics import sample

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


async def test_an_output_that_fails_ends_only_its_own_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    bad, read = letter(25), decode_session.token_from_proto

    def breaks(message: inference_pb2.TokenInfo) -> TokenInfo:
        if message.token_id == bad:
            raise ValueError("no such token")
        return read(message)

    async def once(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        if len(b.decode[0].sessions) > 1:
            await continue_by_hand(down, start, asked)
        else:
            down.send(start.key, 0, 1, [bad])

    monkeypatch.setattr(decode_session, "token_from_proto", breaks)
    async with router_rig(tmp_path) as b:
        b.decode[0].script = once
        assert (await b.answer(max_tokens=3)).text() == text(0, 3)
        assert len(b.decode[0].sessions) == 2


async def test_a_prefill_that_can_not_be_read_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(done: prefill_pb2.PrefillDone) -> Prefilled:
        raise ValueError("no such token")

    async with router_rig(tmp_path) as b:
        with monkeypatch.context() as broken:
            broken.setattr(prefill_call, "prefilled_from_proto", breaks)
            assert (await refused(b.call(max_tokens=3))).code() is grpc.StatusCode.INTERNAL
        assert (await b.answer(max_tokens=3)).text() == text(0, 3)


async def test_a_bad_status_costs_its_watch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = link_module.status_from_proto, asyncio.Event()

    def breaks(message: worker_pb2.WorkerStatus) -> WorkerStatus:
        if not broken.is_set():
            broken.set()
            raise ValueError("no such status")
        return read(message)

    async with router_rig(tmp_path) as b:
        monkeypatch.setattr(link_module, "status_from_proto", breaks)
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


async def test_attempts_are_bounded_and_the_last_fault_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: prefill_pb2.PrefillRequest) -> None:
        raise EngineError("layer 3 yielded NaN")

    async with router_rig(tmp_path, max_attempts=3) as b:
        b.prefill[0].script = broken
        error = await refused(b.call(max_tokens=4))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "layer 3 yielded NaN" in (error.details() or "")
        assert len(b.prefill[0].requests) == 3
        await b.decode[0].log.until(lambda: len(b.decode[0].cancels) == 3)
        monkeypatch.setattr(router.retries.RetryBudget, "charge", lambda *_, **__: False)
        before = sample("baton_retries_refused_total")
        await refused(b.call(max_tokens=4))
        assert len(b.prefill[0].requests) == 4
        assert sample("baton_retries_refused_total") == before + 1


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
                refusal = decode_pb2.ReserveResult(key=b.decode[0].reserves[0].key, reason="full")
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
        await until(b.app, lambda: all(view.open_requests == 0 for view in b.app.pool.fleet.prefill.values()))


def wasted() -> float:
    """Tokens that were prefilled in vain so far."""
    return REGISTRY.get_sample_value("baton_wasted_prefill_tokens_total") or 0.0


def fails(kind: int, times: int, *, tokens: int = 1) -> Script:
    """Fail the first attempts, each after that many tokens of decode's own, then go on by hand."""
    failed: list[decode_pb2.AttemptKey] = []

    async def script(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
        if len(failed) >= times:
            await continue_by_hand(down, start, asked)
            return
        failed.append(start.key)
        first = len(asked.output_token_ids) + 1
        for index in range(first, first + tokens):
            down.send(start.key, 0, index, [letter(index)])
        down.fail(start.key, kind)

    return script


async def running(b: RouterRig, **sampling: object) -> tuple[grpc.aio.UnaryStreamCall, StubDecode, StubDecode]:
    """A call whose first token has come, the decode worker that it is at, and the other one, which would go on."""
    for stub in b.decode:
        stub.script = never_ending
    call = b.call(**sampling)
    assert (await call.read()).choices[0].text == "a"
    first = next(stub for stub in b.decode if stub.reserves)
    # The first token may be quicker than the message.
    await first.log.until(lambda: bool(first.starts))
    other = next(stub for stub in b.decode if stub is not first)
    other.script = continue_by_hand
    return call, first, other


async def test_heartbeats_list_what_lives_and_nothing_else(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2) as b:
        call, first, _ = await running(b, max_tokens=4)
        down = first.sessions[-1]
        await first.log.until(lambda: bool(down.ups))
        assert [(key.request_id, key.attempt) for key in down.ups[-1].live] == [(first.starts[0].key.request_id, 0)]
        call.cancel()
        await first.log.until(lambda: bool(first.cancels))
        seen = len(down.ups)
        await first.log.until(lambda: len(down.ups) > seen)
        assert list(down.ups[-1].live) == []


async def test_a_request_that_decode_does_not_list_is_replayed_elsewhere(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2) as b:
        call, first, other = await running(b, max_tokens=4)
        first.sessions[-1].beat()
        assert (await whole(call)).text() == "bcd"
        assert len(other.starts) == 1


async def test_a_finished_attempt_that_decode_no_longer_lists_is_not_lost(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as b:
        gate = asyncio.Event()

        async def late(_: prefill_pb2.PrefillRequest) -> None:
            await gate.wait()

        async def early(down: DownStream, start: decode_pb2.Start, _: prefill_pb2.PrefillRequest) -> None:
            down.send(start.key, 0, 1, [letter(1), letter(2)], LENGTH)
            down.beat()
            b.decode[0].log.add("all said")

        b.prefill[0].script, b.decode[0].script = late, early
        call = b.call(max_tokens=3)
        await b.decode[0].log.until(lambda: len(b.decode[0].starts) == 1)
        b.prefill[0].handoffs.of(b.decode[0].starts[0].source.transfer_id).set_result(prefill_pb2.PrefillRequest())
        await b.decode[0].log.until(lambda: "all said" in b.decode[0].log.entries)
        b.prefill[0].handoffs.prefilled.clear()
        gate.set()
        assert (await whole(call)).text() == "abc"
        assert len(b.prefill[0].requests) == 1


async def test_a_worker_that_answers_and_makes_no_progress_is_lost_until_it_does(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2, max_attempts=1) as b:
        call, first, other = await running(b, max_tokens=4)
        first.status.set_stalled(True)
        assert (await whole(call)).text() == "bcd"
        await until(b.app, lambda: [d.address for d in b.app.pool.fleet.decode.values()] == [other.address])
        assert "makes no progress" in b.app.pool.describe_missing()
        first.status.set_stalled(False)
        await until(b.app, lambda: len(b.app.pool.fleet.decode) == 2)


async def test_a_silent_prefill_call_fails(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=2, prefill_silence_s=0.2) as b:

        async def block(_: prefill_pb2.PrefillRequest) -> None:
            for stub in b.prefill:
                stub.script = lambda request: asyncio.sleep(0)  # type: ignore[assignment,return-value]
            await asyncio.get_running_loop().create_future()

        b.prefill[0].script = b.prefill[1].script = block
        assert (await b.answer(max_tokens=4)).text() == "abcd"
        assert [len(stub.requests) for stub in b.prefill] == [1, 1]


async def test_a_cut_pair_is_avoided_by_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.workers.failures, "MIN_PAUSE_S", 60.0)
    async with router_rig(tmp_path, decode=2) as b:
        cut: list[DownStream] = []

        async def script(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
            if down in (cut or [down]):
                cut[:] = [down]
                down.fail(start.key, Kind.KIND_SOURCE_UNREACHABLE)
            else:
                await continue_by_hand(down, start, asked)

        b.decode[0].script = b.decode[1].script = script
        for _ in range(4):
            assert (await b.answer(max_tokens=3)).text() == "abc"
        assert sorted(len(stub.starts) for stub in b.decode) == [1, 4]
        assert sample("baton_breakers_open", guards="pair") == 1


@pytest.mark.parametrize(("tokens", "finishes", "abandoned"), [(0, False, True), (1, False, False), (0, True, False)])
async def test_kv_that_nobody_took_is_abandoned(tmp_path: Path, tokens: int, finishes: bool, abandoned: bool) -> None:
    before, told = wasted(), asyncio.Event()
    async with router_rig(tmp_path) as b:
        b.prefill[0].cached_tokens = 1
        script = continue_by_hand if finishes else fails(Kind.KIND_ENGINE, 1, tokens=tokens)

        async def once_told(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
            await told.wait()
            await script(down, start, asked)

        b.decode[0].script = once_told
        call = b.call(max_tokens=5)
        assert (await call.read()).choices[0].text == "a"
        told.set()
        assert (await whole(call)).text() == "bcde"
        if abandoned:
            await b.prefill[0].log.until(lambda: bool(b.prefill[0].abandoned))
    # The router has ended, and what it had to say was said.
    seen = [(call.transfer_id, call.incarnation) for call in b.prefill[0].abandoned]
    first = b.prefill[0].requests[0].transfer_id
    assert seen == ([(first, "incarnation-prefill-0")] if abandoned else [])
    assert wasted() - before == (2 if abandoned else 0)


async def test_a_cancel_during_the_transfer_abandons_the_kv(tmp_path: Path) -> None:
    async with router_rig(tmp_path) as b:
        b.decode[0].script = never_ending
        call = b.call(max_tokens=4)
        await call.read()
        call.cancel()
        await b.prefill[0].log.until(lambda: bool(b.prefill[0].abandoned))
        assert b.prefill[0].abandoned[0].transfer_id == b.prefill[0].requests[0].transfer_id


async def test_a_lost_prefill_worker_is_not_called_and_its_death_is_no_fault(tmp_path: Path) -> None:
    async with router_rig(tmp_path, prefill=2, max_attempts=1) as b:

        async def unreachable(down: DownStream, start: decode_pb2.Start, asked: prefill_pb2.PrefillRequest) -> None:
            if start.key.attempt:
                await continue_by_hand(down, start, asked)
                return
            next(stub for stub in b.prefill if stub.requests).status.close()
            down.fail(start.key, Kind.KIND_SOURCE_UNREACHABLE)

        b.decode[0].script = unreachable
        assert (await b.answer(max_tokens=4)).text() == "abcd"
    assert [stub.abandoned for stub in b.prefill] == [[], []]


async def test_requests_without_a_deadline_get_one(tmp_path: Path) -> None:
    async with router_rig(tmp_path, request_timeout_s=0.3) as b:
        b.decode[0].script = never_ending
        error = await refused(b.call(timeout=None, max_tokens=4))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < b.decode[0].reserves[0].deadline_ms <= 300


async def test_the_ledger_lists_every_attempt_until_it_ends(tmp_path: Path) -> None:
    async with router_rig(tmp_path, decode=2) as b, AsyncClient(b.app.address) as client:
        call, first, other = await running(b, max_tokens=4)
        ledger = await client.ledger()
        (entry,) = ledger.entries
        assert ledger.role == "router"
        assert entry.owner == f"{first.starts[0].key.request_id}/0"
        assert (entry.kind, entry.state) == ("request", "transferring")
        assert entry.deadline_s is not None
        # gRPC rounds deadlines up on the wire.
        assert 0 < entry.deadline_s <= 21
        assert "prefill-0 at " in entry.detail
        assert first.address in entry.detail
        call.cancel()
        await first.log.until(lambda: bool(first.cancels))
        assert list((await client.ledger()).entries) == []
        assert other.starts == []


async def test_a_drain_that_takes_too_long_ends_the_rest_with_a_status(tmp_path: Path) -> None:
    async with router_rig(tmp_path, drain_s=0.1) as b:
        b.decode[0].script = never_ending
        channel = control_channel(b.app.address)
        call = type(b.client)(channel).Generate(request("hi", max_tokens=4), timeout=60)
        await call.read()
        await b.app.drain()
        ended = asyncio.create_task(refused(call))
    error = await ended
    await channel.close()
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the router is stopping, and the request has not ended",
    )
    assert len(b.decode[0].cancels) == 1


async def test_tickets_and_salts_travel_where_the_fleet_has_keys(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "ticket.pem"
    path.write_bytes(key)
    path.chmod(0o600)
    async with router_rig(tmp_path, ticket_key=str(path), fleet_secret="secret") as b:
        assert (await b.answer(max_tokens=3)).text() == "abc"
        (start,), (asked,) = b.decode[0].starts, b.prefill[0].requests
        ticket = kv_pb2.Ticket.FromString(kv_pb2.SignedTicket.FromString(start.source.ticket).ticket)
        assert ticket.transfer_id == start.source.transfer_id
        assert (ticket.incarnation, ticket.consumer) == ("incarnation-prefill-0", "incarnation-decode-0")
        assert ticket.expires_unix_ms == pytest.approx(1e3 * time.time() + 20_000, abs=5000)
        assert asked.cache_salt == tenant_salt("secret", "")
