"""Fetching: pull KV into a handle's pages, and return the handoff only of what is complete and committed.

    frames ──▶ Receiver.take (in an executor) ──▶ gaps? each once more ──▶ commit ──▶ release

`fetch` takes over a request, with the KV that is not there already; `fetch_prefix` takes KV alone.

The next frame is received while the one before is checked and written, and no more than that. A write can't
be cancelled, so neither function returns or raises before the last one has ended: the handle may be freed
at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc

from baton.engine.contract import Engine, KvHandle
from baton.errors import CorruptFrame, IncompleteTransfer, TransferError, WrongPrefix
from baton.kv.format import KvCompression
from baton.request import Handoff
from baton.telemetry.metrics import TRANSFER_FAULTS
from baton.transfer.coverage import Box
from baton.transfer.receiver import Receiver
from baton.transfer.source import GrpcSource, KvSource


async def fetch(
    channel: grpc.aio.Channel,
    engine: Engine,
    handle: KvHandle,
    *,
    transfer_id: str,
    incarnation: str,
    tokens: int,
    first: int = 0,
    timeout_s: float,
    stall_timeout_s: float,
    ticket: bytes = b"",
    consumer: str = "",
    compression: KvCompression = KvCompression.NONE,
) -> Handoff:
    """Pull an export of `tokens` tokens into the handle, from token `first` on, and release it whatever happens.

    The tokens before `first` are there already; if all are, the manifest and the commit alone are asked for.
    `timeout_s` bounds all; `stall_timeout_s` the silence of the exporter once the export is open. `ticket` is the
    router's for this export and `consumer` whom it names; an exporter with ticket keys asks for both. KV that comes in
    a `compression` is not what the exporter holds, and must not be published. Raises only TransferError and its
    subclasses, EncodingRefused where the exporter does not know the compression.
    """
    source = GrpcSource(
        channel,
        transfer_id,
        incarnation,
        timeout_s=timeout_s,
        stall_timeout_s=stall_timeout_s,
        ticket=ticket,
        consumer=consumer,
        compression=compression,
    )
    box = _box(engine, range(first, tokens))
    async with _released(source):
        return await pull(source, engine, handle, box, length=tokens, timeout_s=timeout_s)


async def fetch_prefix(
    channel: grpc.aio.Channel,
    engine: Engine,
    handle: KvHandle,
    *,
    transfer_id: str,
    incarnation: str,
    tokens: range,
    length: int,
    digest: bytes,
    timeout_s: float,
    stall_timeout_s: float,
    ticket: bytes = b"",
    consumer: str = "",
) -> None:
    """Pull `tokens` of an export of `length` tokens that hands nothing over, and release it whatever happens.

    `digest` names the last full block of the export. It is never compressed. All else is as with `fetch`. Raises
    WrongPrefix, too, if the exporter holds what it sent by another name.
    """
    source = GrpcSource(
        channel,
        transfer_id,
        incarnation,
        timeout_s=timeout_s,
        stall_timeout_s=stall_timeout_s,
        ticket=ticket,
        consumer=consumer,
    )
    async with _released(source), _bounded(timeout_s):
        held = (await _pull(source, engine, handle, _box(engine, tokens), length)).prefix_digest
        if held != digest:
            raise WrongPrefix(f"the prefix's last block is {digest.hex()}, the exporter sent {held.hex() or 'none'}")


async def pull(
    source: KvSource, engine: Engine, handle: KvHandle, box: Box, *, length: int, timeout_s: float
) -> Handoff:
    """Pull one box of an export of `length` tokens into the handle; the export stays open.

    A bad frame is fetched once more. Raises TransferError and its subclasses, each counted by kind.
    """
    async with _bounded(timeout_s):
        handoff = (await _pull(source, engine, handle, box, length)).handoff
        if handoff is None:
            raise IncompleteTransfer("the commit hands nothing over: it is a prefix's")
        return handoff


def _box(engine: Engine, tokens: range) -> Box:
    kv_format = engine.spec.kv_format
    return Box(tokens, range(kv_format.layers), range(kv_format.heads))


@asynccontextmanager
async def _released(source: KvSource) -> AsyncIterator[None]:
    """Release the export at the end of the block, however that comes."""
    try:
        yield
    finally:
        # A cancel must not end the release too: the exporter would hold its pages until the lease ends.
        await _ended(asyncio.ensure_future(source.release()))


@asynccontextmanager
async def _bounded(timeout_s: float) -> AsyncIterator[None]:
    """Raise IncompleteTransfer when time is up, and count whatever TransferError ends the block."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        TRANSFER_FAULTS.labels("timeout").inc()
        raise IncompleteTransfer(f"the transfer did not end within {timeout_s} s") from None
    except TransferError as error:
        TRANSFER_FAULTS.labels(re.sub(r"\B([A-Z])", r"_\1", type(error).__name__).lower()).inc()
        raise


async def _pull(source: KvSource, engine: Engine, handle: KvHandle, box: Box, length: int) -> Receiver:
    """The first receiver that saw the commit, once all gaps are filled."""
    receivers = [Receiver(engine, handle, box, length, source.seed, source.compression)]
    for gap in await _receive(source, receivers[0]):
        again = Receiver(engine, handle, gap, length, source.seed, source.compression)
        await _receive(source, again)
        if again.bad:
            raise CorruptFrame(f"layer {gap.layers.start}, tokens {gap.tokens}: bad again when fetched again")
        receivers.append(again)
    committed = next((each for each in receivers if each.committed), None)
    if committed is None:
        raise IncompleteTransfer("the stream ended without a commit")
    return committed


async def _receive(source: KvSource, receiver: Receiver) -> list[Box]:
    """Run one stream to its end; returns what has to be fetched again."""
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    async with aclosing(source.frames(receiver.box)) as frames:
        try:
            async for frame in frames:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = loop.run_in_executor(None, receiver.take, frame)
            if writing is not None:
                await asyncio.shield(writing)
        finally:
            if writing is not None:
                await _ended(writing)
    return receiver.gaps()


async def _ended(work: asyncio.Future[None]) -> None:
    """Wait for a write or a release, through cancellations as well, which are raised after it."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    work.exception()
    if cancelled is not None:
        raise cancelled
