"""A session whose router forgets, falls silent, or asks without reading: what it owned is freed, and nothing grows."""

import asyncio

import grpc
import pytest

import decode_svc.worker
from baton.pb import decode_pb2
from decode_svc.reservation import AttemptKey, Reserve
from tests.decode_rig import key, rig
from tests.decoding import alone, greedy


async def test_what_a_router_does_not_list_is_ended_and_the_rest_goes_on() -> None:
    async with rig() as all_:
        router, other = await all_.router(beats=False), await all_.router()
        all_.engine.gate.clear()
        for name in ("kept", "forgotten"):
            await router.request(name, [1, 2, 3], greedy(9))
        assert (await router.reserve("unstarted", 10, 10)).granted
        assert (await other.reserve("foreign", 10, 10)).granted
        await router.say(heartbeat=decode_pb2.Heartbeat(live=[key("kept"), key("never heard of")]))
        assert not (await router.reserve("barrier", 0, 1)).granted
        assert {each.key.request_id for each in all_.app.service.worker.attempts} == {"kept", "foreign"}
        all_.engine.gate.set()
        await router.until_finished(("kept", 0))
        assert router.tokens["kept", 0] == alone([1, 2, 3], greedy(9))
        assert not router.failures


async def test_a_cancel_of_what_was_refused_gives_back_the_pages_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig({"reserve_tokens": 4}, pages=20, max_model_len=80) as all_:
        router, other = await all_.router(), await all_.router()
        assert (await router.reserve("held", 36, 4)).granted
        assert not (await router.reserve("large", 60, 4)).granted
        assert "are kept for a larger request" in (await other.reserve("half", 28, 4)).reason
        told: list[str] = []
        monkeypatch.setattr(all_.app.service.status, "notify", lambda: told.append("routers"))
        await router.cancel("large")
        assert not (await router.reserve("barrier", 0, 1)).granted
        assert told, "so that they ask again"
        assert (await other.reserve("half", 28, 4)).granted


async def test_answers_that_are_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_svc.worker, "MAX_ANSWERS", 50)
    async with rig() as all_:
        router, other = await all_.router(), await all_.router()
        assert (await router.reserve("r", 10, 10)).granted
        assert (await other.reserve("s", 10, 10)).granted
        (session, _) = all_.app.service.worker.sessions.values()
        for number in range(52):
            # All at once, so that no message leaves in between.
            all_.app.service.worker.handle(session, Reserve(AttemptKey(f"flood{number}", 0), 0, 1, 1))
        assert session.unread == 0
        assert await router.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "51 answers were not read; at most 50" in await router.call.details()
        assert {each.key.request_id for each in all_.app.service.worker.attempts} == {"s"}


async def test_a_flood_of_hopeless_reservations_is_answered_to_a_router_that_reads() -> None:
    async with rig() as all_:
        router = await all_.router()
        for number in range(2000):
            await router.say(reserve=decode_pb2.Reserve(key=key(f"flood{number}"), context_tokens=0, choices=1))
        async with asyncio.timeout(60):
            await router.until(lambda: len(router.reserved) == 2000)
        assert not any(result.granted for result in router.reserved.values())
