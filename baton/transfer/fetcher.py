"""Fetching: pull KV into a handle's pages, and return the handoff only of what is complete and committed.

    each shard:  frames ──▶ Receiver.take (in an executor) ──▶ gaps? each once more ──▶ commit
    all shards:  ──▶ release

`fetch` takes over a request, with the KV that is not there already; `fetch_prefix` takes KV alone. Either is complete
when every shard is.

The next frame is received while the one before is checked and written, and no more than that. A write can't
be cancelled, so neither function returns or raises before the last one has ended: the handle may be freed
at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from baton.engine.contract import Engine, KvHandle
from baton.errors import CorruptFrame, IncompleteTransfer, TransferError, WrongPrefix
from baton.kv.format import Shard
from baton.request import Handoff
from baton.telemetry.metrics import TRANSFER_FAULTS
from baton.transfer.coverage import Box
from baton.transfer.receiver import Receiver
from baton.transfer.source import KvSource


async def fetch(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, *, tokens: int, first: int = 0, timeout_s: float
) -> Handoff:
    """Pull an export of `tokens` tokens into the handle, from token `first` on, and release it whatever happens.

    `sources` are its shards. The tokens before `first` are there already; if all are, the manifests and the commits
    alone are asked for. `timeout_s` bounds all. KV that comes in a compression is not what the exporter holds, and must
    not be published. Raises only TransferError and its subclasses, EncodingRefused where the exporter does not know the
    compression.
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
    """Pull `tokens` of an export of `length` tokens that hands nothing over, and release it whatever happens.

    `digest` names the last full block of the export. It is never compressed. All else is as with `fetch`. Raises
    WrongPrefix, too, if the exporter holds what it sent by another name.
    """
    async with _release_at_end(sources), _limit_time(timeout_s):
        for receiver in await _pull(sources, engine, handle, _whole(engine, tokens), length):
            if (held := receiver.prefix_digest) != digest:
                name = held.hex() or "none"
                raise WrongPrefix(f"the prefix's last block is {digest.hex()}, the exporter sent {name}")


async def pull(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, box: Box, *, length: int, timeout_s: float
) -> Handoff:
    """Pull one box of an export of `length` tokens into the handle, from the shards that have some of it.

    The export stays open. A bad frame is fetched once more. Raises TransferError and its subclasses, each counted by
    kind.
    """
    async with _limit_time(timeout_s):
        first, *others = [receiver.handoff for receiver in await _pull(sources, engine, handle, box, length)]
        if first is None:
            raise IncompleteTransfer("the commit hands nothing over: it is a prefix's")
        if any(other != first for other in others):
            raise IncompleteTransfer("the shards hand over different requests")
        return first


def _whole(engine: Engine, tokens: range) -> Box:
    whole = engine.spec.kv_format.whole
    return Box(tokens, whole.layers, whole.heads)


@asynccontextmanager
async def _release_at_end(sources: Sequence[KvSource]) -> AsyncIterator[None]:
    """Release the export at the end of the block, however that comes."""
    try:
        yield
    finally:
        # A cancel must not end the release too: the exporter would hold its pages until the lease ends.
        await _wait_to_end(asyncio.gather(*(source.release() for source in sources)))


@asynccontextmanager
async def _limit_time(timeout_s: float) -> AsyncIterator[None]:
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


async def _pull(sources: Sequence[KvSource], engine: Engine, handle: KvHandle, box: Box, length: int) -> list[Receiver]:
    """Pull from each shard what it has of the box; for each the receiver that saw its commit.

    The first failure ends all.
    """
    shards = [replace(source.shard, kv_address="") for source in sources]
    if not engine.spec.kv_format.is_covered_by(shards):
        raise IncompleteTransfer(f"the exporter's shards are not all of the KV, once: {shards}")
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
    """The first receiver that saw the shard's commit, once all gaps are filled."""

    def receiver(box: Box) -> Receiver:
        return Receiver(engine, handle, box, length, shards, source.seed, source.compression)

    receivers = [receiver(box)]
    for gap in await _receive(source, receivers[0]):
        again = receiver(gap)
        await _receive(source, again)
        if again.bad_frames:
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
                writing = loop.run_in_executor(None, receiver.add_frame, frame)
            if writing is not None:
                await asyncio.shield(writing)
        finally:
            if writing is not None:
                await _wait_to_end(writing)
    return receiver.gaps()


async def _wait_to_end(work: asyncio.Future[Any]) -> None:
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
