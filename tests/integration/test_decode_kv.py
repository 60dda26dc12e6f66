"""KV that decode workers hold: pinned, moved no second time, fetched by peers, left behind, written back."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine import contract
from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import EngineError, TicketRefused, TransferError
from baton.kv.format import PartData
from baton.kv.prefix.contract import Payload
from baton.kv.prefix.redis.cache import RedisPrefixCache
from baton.pb import decode_pb2
from baton.request import RemoteExport, SamplingParams
from baton.rpc.channel import kv_channel
from baton.telemetry import metrics
from baton.transfer.fetcher import fetch_prefix_from
from baton.transfer.tickets import TicketSigner
from baton.transfer.transport import GrpcSource
from decode_svc.attempts import DecodeAttempt
from tests.certificates import fleet
from tests.decode_rig import WAIT_S, Rig, SessionRouter, rig
from tests.decoding import alone, digests, greedy
from tests.metrics import count
from tests.property.attempts import held_payloads, payloads
from tests.redis_server import running

PROMPT = list(range(3, 43))
"""Two blocks of 16, and half of a third."""
PINNED = 32


def names(all_: Rig, ids: Sequence[int], salt: bytes = b"") -> dict[str, bytes]:
    return {"prefix_digests": b"".join(digests(all_.engine, ids, salt)), "cache_salt": salt}


def received() -> float:
    return count(metrics.TRANSFER_BYTES, "received")


async def turn(all_: Rig, router: SessionRouter, name: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """One turn of a conversation; returns prompt and answer."""
    await router.request(name, prompt, params, **names(all_, prompt))
    await router.until_finished((name, 0))
    assert router.tokens[name, 0] == alone(prompt, params)
    return [*prompt, *router.tokens[name, 0]]


def attempt_of(all_: Rig, name: str) -> DecodeAttempt:
    """The live attempt of that name."""
    (attempt,) = (each for each in all_.app.worker.attempts if each.key.request_id == name)
    return attempt


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

        def inserted(sequence: contract.EngineSequence) -> None:
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
            await all_.app.worker.write_backs.wait_finished()
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

    async def held_back(cache: RedisPrefixCache, blocks: Sequence[tuple[bytes, Payload]]) -> list[bool]:
        writing.set()
        await gate.wait()
        return await store(cache, blocks)

    monkeypatch.setattr(RedisPrefixCache, "_write", held_back)
    with running("valkey", tmp_path) as server:
        async with rig({"redis": server.url, "fleet_secret": "secret"}) as all_:
            await turn(all_, await all_.router(), "a", PROMPT, greedy(60))
            await asyncio.wait_for(writing.wait(), WAIT_S)
            await all_.app.worker.write_backs.wait_finished()
            draining = asyncio.create_task(all_.app.drain())
            await asyncio.wait({draining}, timeout=0.1)
            assert not draining.done()
            gate.set()
            await asyncio.wait_for(draining, WAIT_S)
            with server.client() as client:
                assert client.dbsize() == 4


async def fetched(
    all_: Rig, transfer_id: str, *, ticket: bytes = b"", incarnation: str = ""
) -> tuple[FakeEngine, KvHandle]:
    """Fetch a pinned prefix as a prefill worker does, into an engine of its own."""
    engine = FakeEngine(page_size=8, pages=32)
    handle = engine.reserve("peer", len(PROMPT))
    name = digests(all_.engine, PROMPT[:PINNED])[-1]
    identity = all_.app.status.identity
    (shard,) = identity.shards
    export = RemoteExport(transfer_id, incarnation or identity.incarnation, identity.shards, ticket)
    async with kv_channel(all_.app.addresses.kv) as channel:
        source = GrpcSource(channel, export, shard, timeout_s=WAIT_S, silence_timeout_s=WAIT_S, consumer="peer")
        await fetch_prefix_from(
            [source], engine, handle, tokens=range(PINNED), length=PINNED, digest=name, timeout_s=WAIT_S
        )
    return engine, handle


async def pinned(all_: Rig, router: SessionRouter, name: str) -> None:
    """An attempt that has pinned a prefix, and exports it as "name/prefix"; its own KV is not there yet."""
    result = await router.reserve(name, len(PROMPT), 50, **names(all_, PROMPT))
    assert result.cached_tokens == PINNED
    router.open(name, PROMPT)
    await router.start(name, prefix_transfer_id=f"{name}/prefix")


async def test_a_peer_fetches_what_is_pinned_while_its_own_part_is_awaited() -> None:
    async with rig() as all_:
        router = await all_.router()
        await turn(all_, router, "a", PROMPT, greedy(4))
        opened = count(metrics.PREFIX_EXPORTS)
        result = await router.reserve("b", len(PROMPT), 20, **names(all_, PROMPT))
        commit = router.open("b", PROMPT)
        # The fetch may come first.
        fetching = asyncio.create_task(fetched(all_, "b/prefix"))
        await router.start("b", prefix_transfer_id="b/prefix")
        engine, handle = await fetching
        assert result.cached_tokens == PINNED
        assert held_payloads(engine, handle, 2) == payloads(all_.engine, PROMPT)[:2]
        assert count(metrics.PREFIX_EXPORTS) == opened + 1
        commit(greedy(20))
        router.tokens["b", 0] = [router.exporter.firsts[0].token.token_id]
        await router.until_finished(("b", 0))
        assert router.tokens["b", 0] == alone(PROMPT, greedy(20))
        await all_.until_free()


async def test_a_fetch_of_a_prefix_that_is_not_pinned_ends_at_once() -> None:
    async with rig() as all_:
        router = await all_.router()
        assert (await router.reserve("a", len(PROMPT), 20)).granted
        router.open("a", PROMPT)
        await router.start("a", prefix_transfer_id="a/prefix")
        with pytest.raises(TransferError, match="has nothing to export"):
            await fetched(all_, "a/prefix")
        await router.cancel("a")
        await all_.until_free()


async def test_a_prefix_needs_a_ticket_where_kv_does() -> None:
    signer = TicketSigner(str(fleet() / "ticket.key"))
    async with rig({"ticket_keys": str(fleet() / "ticket.pub")}) as all_:
        router = await all_.router()
        await turn(all_, router, "a", PROMPT, greedy(4))
        incarnation = all_.app.status.identity.incarnation
        await pinned(all_, router, "b")

        def ticket(transfer_id: str) -> bytes:
            return signer.sign(
                transfer_id=transfer_id, incarnation=incarnation, consumer="peer", expires_unix_s=time.time() + 60
            )

        for wrong in (b"", ticket("c/prefix")):
            with pytest.raises(TicketRefused):
                await fetched(all_, "b/prefix", ticket=wrong)
        engine, handle = await fetched(all_, "b/prefix", ticket=ticket("b/prefix"))
        assert held_payloads(engine, handle, 2) == payloads(all_.engine, PROMPT)[:2]
        await router.cancel("b")
        await all_.until_free()


@asynccontextmanager
async def being_read(all_: Rig, transfer_id: str) -> AsyncIterator[asyncio.Task[Any]]:
    """A peer's fetch whose reads are held back until the block ends."""
    gate, reached, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    read_kv = all_.engine.read_kv

    def slow(*args: Any) -> list[PartData]:
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(WAIT_S)
        return read_kv(*args)

    all_.engine.read_kv = slow  # type: ignore[method-assign]
    fetching = asyncio.create_task(fetched(all_, transfer_id))
    try:
        await asyncio.wait_for(reached.wait(), WAIT_S)
        yield fetching
    finally:
        gate.set()
        await asyncio.wait({fetching})


@pytest.mark.parametrize("end", ["cancel", "session", "deadline", "release", "failed transfer", "drain"])
async def test_an_export_ends_with_its_attempt_while_it_is_being_read(end: str) -> None:
    async with rig({"drain_s": 0.05}) as all_:
        router, keeper = await all_.router(), await all_.router()
        await turn(all_, router, "a", PROMPT, greedy(4))
        await pinned(all_, router, "b")
        async with being_read(all_, "b/prefix") as fetching:
            match end:
                case "cancel":
                    await router.cancel("b")
                case "session":
                    router.call.cancel()
                case "deadline":
                    attempt_of(all_, "b").lifecycle.deadline = 0.0
                    all_.app.worker.resume_waiting()
                    await router.until(lambda: "b" in router.failures)
                    assert "was still transferring" in router.failures.pop("b").message
                case "release":
                    all_.app.worker._exports.release("b/prefix", all_.app.status.identity.incarnation)
                case "failed transfer":
                    all_.exporter.exports.close()
                    await router.until(lambda: "b" in router.failures)
                case "drain":
                    await all_.app.drain()
            async with asyncio.timeout(WAIT_S):
                while len(all_.app.worker.attempts) and end != "release":
                    await keeper.barrier()
        with pytest.raises(TransferError):
            fetching.result()
        if end == "release":
            await router.cancel("b")
        await all_.until_free()


async def test_a_peer_that_asks_another_incarnation_is_refused() -> None:
    async with rig() as all_:
        with pytest.raises(TransferError, match="incarnation"):
            await fetched(all_, "t", incarnation="earlier")
