"""Fetches KV into a handle's pages; returns the handoff only if everything arrived and is committed.

    each shard:  frames ──▶ Receiver.add_frame (in an executor) ──▶ gaps? fetch each once more ──▶ commit
    all shards:  ──▶ release

`fetch` takes over a request, with the KV that is not here already. `fetch_prefix` fetches KV only. Each is complete
when all shards are.

While one frame is checked and written, the next one is received; there is no other read-ahead. A write can't be
cancelled, so these functions return or raise only after the last write has ended. Then the caller may free the handle.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from baton import executors
from baton.engine.contract import Engine, KvHandle
from baton.errors import CorruptFrame, IncompleteTransfer, TransferError, WrongPrefix
from baton.executors import COPIES
from baton.kv.format import Shard
from baton.request import Handoff
from baton.tasks import wait_to_end
from baton.telemetry.metrics import TRANSFER_FAULTS
from baton.transfer.coverage import Box
from baton.transfer.receiver import Receiver
from baton.transfer.source import KvSource


async def fetch(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, *, tokens: int, first: int = 0, timeout_s: float
) -> Handoff:
    """Pull tokens `[first, tokens)` of an export into the handle, and release the export in any case.

    `sources` are the shards of the export. If the handle has all tokens already, only manifests and commits are
    fetched. `timeout_s` limits the whole fetch. Raises only TransferError and its subclasses.
    """
    async with _release_at_end(sources):
        box = _whole(engine, range(first, tokens))
        return await pull(sources, engine, handle, box, length=tokens, timeout_s=timeout_s)


async def fetch_prefix(
    sources: Sequence[KvSource],
    engine: Engine,
    handle: KvHandle,
    *,
    tokens: range,
    length: int,
    digest: bytes,
    timeout_s: float,
) -> None:
    """Pull `tokens` of an export of `length` tokens that has no handoff, and release the export in any case.

    `digest` is that of the export's last full block. Raises WrongPrefix if the exporter's
    digest is another one; the other errors are those of `fetch`.
    """
    async with _release_at_end(sources), _limit_time(timeout_s):
        for receiver in await _pull(sources, engine, handle, _whole(engine, tokens), length):
            if (held := receiver.prefix_digest) != digest:
                name = held.hex() or "none"
                raise WrongPrefix(f"the prefix's last block is {digest.hex()}, the exporter sent {name}")


async def pull(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, box: Box, *, length: int, timeout_s: float
) -> Handoff:
    """Pull one box of an export of `length` tokens into the handle, from the shards that have a part of it.

    The export stays open. A bad frame is fetched once more. Raises TransferError and its subclasses, each counted by
    kind.
    """
    async with _limit_time(timeout_s):
        first, *others = [receiver.handoff for receiver in await _pull(sources, engine, handle, box, length)]
        if first is None:
            raise IncompleteTransfer("the commit has no handoff: it is that of a prefix")
        if any(other != first for other in others):
            raise IncompleteTransfer("the shards hand over different requests")
        return first


def _whole(engine: Engine, tokens: range) -> Box:
    whole = engine.spec.kv_format.whole
    return Box(tokens, whole.layers, whole.heads)


@asynccontextmanager
async def _release_at_end(sources: Sequence[KvSource]) -> AsyncIterator[None]:
    """Release the export at the end of the block, also after an error or a cancellation."""
    try:
        yield
    finally:
        # A cancellation must not cancel the release: the exporter would keep its pages until the lease ends.
        await wait_to_end(asyncio.gather(*(source.release() for source in sources)))


@asynccontextmanager
async def _limit_time(timeout_s: float) -> AsyncIterator[None]:
    """Raise IncompleteTransfer if the block takes longer; count each TransferError that ends it."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        TRANSFER_FAULTS.labels("timeout").inc()
        raise IncompleteTransfer(f"the transfer did not end within {timeout_s} s") from None
    except TransferError as error:
        TRANSFER_FAULTS.labels(re.sub(r"\B([A-Z])", r"_\1", type(error).__name__).lower()).inc()
        raise


async def _pull(sources: Sequence[KvSource], engine: Engine, handle: KvHandle, box: Box, length: int) -> list[Receiver]:
    """Pull the box from all shards that have a part of it; returns the receiver that saw the commit of each.

    The first failure ends all pulls.
    """
    shards = [replace(source.shard, kv_address="") for source in sources]
    if not engine.spec.kv_format.is_covered_by(shards):
        raise IncompleteTransfer(f"the exporter's shards do not cover the KV exactly once: {shards}")
    parts = [Box(box.tokens, _intersect(box.layers, each.layers), _intersect(box.heads, each.heads)) for each in shards]
    try:
        async with asyncio.TaskGroup() as group:
            pulls = [
                group.create_task(_pull_shard(source, engine, handle, part, length, shards))
                for source, part in zip(sources, parts, strict=True)
                if part.layers and part.heads
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [each.result() for each in pulls]


def _intersect(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


async def _pull_shard(
    source: KvSource, engine: Engine, handle: KvHandle, box: Box, length: int, shards: Sequence[Shard]
) -> Receiver:
    """The receiver that saw the shard's commit, once all gaps are filled."""

    def receiver(box: Box) -> Receiver:
        return Receiver(engine, handle, box, length, shards, source.seed)

    receivers = [receiver(box)]
    for gap in await _receive(source, receivers[0]):
        again = receiver(gap)
        await _receive(source, again)
        if again.bad_frames:
            raise CorruptFrame(f"layer {gap.layers.start}, tokens {gap.tokens}: bad a second time")
        receivers.append(again)
    committed = next((each for each in receivers if each.committed), None)
    if committed is None:
        raise IncompleteTransfer("the stream ended without a commit")
    return committed


async def _receive(source: KvSource, receiver: Receiver) -> list[Box]:
    """Read one stream to its end; returns the boxes to fetch again."""
    writing: asyncio.Future[None] | None = None
    async with aclosing(source.frames(receiver.box)) as frames:
        try:
            async for frame in frames:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = executors.run(COPIES, receiver.add_frame, frame)
            if writing is not None:
                await asyncio.shield(writing)
        finally:
            if writing is not None:
                await wait_to_end(writing)
    return receiver.gaps()
