"""Pages that decode workers have pinned: fetched by peers over real sockets, and let go in every state."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.errors import TicketRefused, TransferError
from baton.kv.format import PartData
from baton.request import RemoteExport
from baton.rpc.channel import kv_channel
from baton.telemetry import metrics
from baton.transfer.fetcher import fetch_prefix
from baton.transfer.tickets import TicketSigner
from baton.transfer.transport import GrpcSource
from tests.certificates import fleet
from tests.decode_rig import WAIT_S, Rig, SessionRouter, rig
from tests.decoding import alone, digests, greedy
from tests.integration.decode_turns import PINNED, PROMPT, attempt_of, names, turn
from tests.metrics import count
from tests.property.attempts import held_payloads, payloads


async def fetched(
    all_: Rig, transfer_id: str, *, ticket: bytes = b"", incarnation: str = ""
) -> tuple[FakeEngine, KvHandle]:
    """Fetch a pinned prefix as a prefill worker does, into an engine of its own."""
    engine = FakeEngine(page_size=8, pages=32)
    handle = engine.reserve("peer", len(PROMPT))
    name = digests(all_.engine, PROMPT[:PINNED])[-1]
    identity = all_.app.service.status.identity
    (shard,) = identity.shards
    export = RemoteExport(transfer_id, incarnation or identity.incarnation, identity.shards, ticket)
    async with kv_channel(all_.app.addresses.kv) as channel:
        source = GrpcSource(channel, export, shard, timeout_s=WAIT_S, stall_timeout_s=WAIT_S, consumer="peer")
        await fetch_prefix([source], engine, handle, tokens=range(PINNED), length=PINNED, digest=name, timeout_s=WAIT_S)
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


async def test_without_anything_pinned_a_peer_is_told_so_at_once() -> None:
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
        incarnation = all_.app.service.status.identity.incarnation
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
                    attempt_of(all_, "b").life.deadline = 0.0
                    all_.app.service.worker.schedule()
                    await router.until(lambda: "b" in router.failures)
                    assert "was still transferring" in router.failures.pop("b").message
                case "release":
                    all_.app.service.worker._exports.release("b/prefix", all_.app.service.status.identity.incarnation)
                case "failed transfer":
                    all_.exporter.exports.close()
                    await router.until(lambda: "b" in router.failures)
                case "drain":
                    await all_.app.drain()
            async with asyncio.timeout(WAIT_S):
                while len(all_.app.service.worker.attempts) and end != "release":
                    await keeper.reserve("barrier", 0, 1)
        with pytest.raises(TransferError):
            fetching.result()
        if end == "release":
            await router.cancel("b")
        await all_.until_free()


async def test_a_peer_that_asks_another_incarnation_is_refused() -> None:
    async with rig() as all_:
        with pytest.raises(TransferError, match="incarnation"):
            await fetched(all_, "t", incarnation="earlier")
