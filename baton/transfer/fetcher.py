"""Fetches KV into a handle's pages; returns the handoff only if everything arrived and is committed.

    each shard:  frames up to the commit ──▶ Receiver.add_frame (in an executor) ──▶ fetch each gap once more
    all shards:  ──▶ release

`ExportFetcher` opens the sources of an export, and calls `fetch_from` for the KV of a request, except tokens that are
here already, and its handoff, or `fetch_prefix_from` for KV only. A fetch is complete when all shards are complete.

While one frame is checked and written, the next one is received; there is no other read-ahead. A write can't be
cancelled, so these functions return or raise only after the last write has ended. Then the caller may free the handle.

A frame that fails its own check (`wire.decode`) is counted as bad. It leaves a gap, which is fetched again. A valid
frame that does not belong in the stream (outside of the slice, sent twice, after the commit) ends the transfer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace

from baton.engine.contract import Engine, KvHandle
from baton.errors import CorruptFrame, IncompleteTransfer, TransferError, WrongPrefix
from baton.kv.format import PartData, Shard
from baton.process import executors
from baton.process.executors import COPIES, wait_to_end
from baton.rates import DecayingRate
from baton.request import Handoff, RemoteExport
from baton.rpc.tls import Tls
from baton.telemetry.metrics import TRANSFER_BYTES, TRANSFER_FAULTS
from baton.transfer import wire
from baton.transfer.transport import KvChannels, KvSource, open_sources
from baton.transfer.wire import HANDOFF_VERSION, Commit, Coverage, KvSlice, Manifest, unpack

MIN_FLOW_BYTES, MAX_FLOW_GAP_S = 1 << 16, 0.05
"""Smaller frames tell nothing of the rate of a transfer, and one that comes later had to be computed first."""


class ExportFetcher:
    """Fetches exports of other workers over gRPC, as `consumer` (the name of this worker in tickets).

    A fetch fails if the exporter sends nothing for `silence_timeout_s` seconds. An exporter's certificate must have the
    role `role`, "prefill" or "decode". Used on the asyncio loop only.

    `rate` is the rate in bytes/s at which frames come, without the time for which the exporter has nothing to send.
    """

    def __init__(
        self, engine: Engine, tls: Tls | None, consumer: str, silence_timeout_s: float, role: str = "prefill"
    ) -> None:
        self._engine = engine
        self._channels = KvChannels(tls, role)
        self._consumer = consumer
        self._silence_timeout_s = silence_timeout_s
        self.rate = DecayingRate()

    async def fetch(
        self, export: RemoteExport, handle: KvHandle, *, tokens: range, length: int, timeout_s: float
    ) -> Handoff:
        """Fetch `tokens` of `export`, which has `length` tokens, into the handle, in at most `timeout_s` seconds.

        If `tokens` is empty, only manifests and commits are fetched. The export is released, also after an error.
        Raises TransferError and its subclasses.
        """
        kv_slice = _whole(self._engine, tokens)
        flow = _Flow()
        async with self._open(export, timeout_s) as sources:
            metered = [_MeteredSource(source, flow) for source in sources]
            handoff = await fetch_from(metered, self._engine, handle, kv_slice, length=length, timeout_s=timeout_s)
        self.rate.add(flow.size, flow.seconds)
        return handoff

    async def fetch_prefix(
        self, export: RemoteExport, handle: KvHandle, *, tokens: range, length: int, digest: bytes, timeout_s: float
    ) -> None:
        """Fetch `tokens` of `export`, which has `length` tokens and no handoff, in at most `timeout_s` seconds.

        `digest` is the expected digest of its last full block. The export is released, also after an error. Raises
        WrongPrefix if the exporter has another digest, and TransferError and its subclasses.
        """
        async with self._open(export, timeout_s) as sources:
            await fetch_prefix_from(
                sources, self._engine, handle, tokens=tokens, length=length, digest=digest, timeout_s=timeout_s
            )

    async def close(self) -> None:
        """Close all channels; no fetch may be running."""
        await self._channels.close()

    def _open(self, export: RemoteExport, timeout_s: float) -> AbstractAsyncContextManager[list[KvSource]]:
        return open_sources(
            self._channels,
            export,
            timeout_s=timeout_s,
            silence_timeout_s=self._silence_timeout_s,
            consumer=self._consumer,
        )


class _Flow:
    """Bytes and seconds of the frames of a fetch that came soon after the one before, from any shard."""

    def __init__(self) -> None:
        self.size, self.seconds = 0, 0.0
        self._last_at = asyncio.get_running_loop().time()

    def record(self, size: int) -> None:
        """Record that a frame of `size` bytes has come."""
        now = asyncio.get_running_loop().time()
        gap, self._last_at = now - self._last_at, now
        if size >= MIN_FLOW_BYTES and gap < MAX_FLOW_GAP_S:
            self.size, self.seconds = self.size + size, self.seconds + gap


class _MeteredSource:
    """A source whose frames are recorded in a flow."""

    def __init__(self, source: KvSource, flow: _Flow) -> None:
        self._source, self._flow = source, flow

    @property
    def shard(self) -> Shard:
        return self._source.shard

    @property
    def checksum_seed(self) -> int:
        return self._source.checksum_seed

    async def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._source.frames(kv_slice)) as frames:
            async for frame in frames:
                self._flow.record(len(frame))
                yield frame

    async def release(self) -> None:
        await self._source.release()


async def fetch_from(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, kv_slice: KvSlice, *, length: int, timeout_s: float
) -> Handoff:
    """Fetch a slice of an export of `length` tokens into the handle, and release the export, also after an error.

    `sources` are the shards of the export; those that have a part of the slice are read. A bad frame is fetched once
    more. `timeout_s` limits the whole fetch. Raises TransferError and its subclasses, which are counted in the metrics,
    and no other errors.
    """
    async with _release_at_end(sources), _limit_time(timeout_s):
        first, *others = [
            receiver.handoff for receiver in await _fetch_shards(sources, engine, handle, kv_slice, length)
        ]
        if first is None:
            raise IncompleteTransfer("the commit has no handoff: the export is a prefix")
        if any(other != first for other in others):
            raise IncompleteTransfer("the shards hand over different requests")
        return first


async def fetch_prefix_from(
    sources: Sequence[KvSource],
    engine: Engine,
    handle: KvHandle,
    *,
    tokens: range,
    length: int,
    digest: bytes,
    timeout_s: float,
) -> None:
    """Fetch `tokens` of an export of `length` tokens that has no handoff, and release the export, also after an error.

    `digest` is the expected digest of the export's last full block. Raises WrongPrefix if the exporter has another one,
    and the errors of `fetch_from`.
    """
    async with _release_at_end(sources), _limit_time(timeout_s):
        for receiver in await _fetch_shards(sources, engine, handle, _whole(engine, tokens), length):
            if (held := receiver.prefix_digest) != digest:
                name = held.hex() or "none"
                raise WrongPrefix(f"the prefix's last block is {digest.hex()}, the exporter sent {name}")


def _whole(engine: Engine, tokens: range) -> KvSlice:
    whole = engine.spec.kv_format.whole
    return KvSlice(tokens, whole.layers, whole.heads)


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


async def _fetch_shards(
    sources: Sequence[KvSource], engine: Engine, handle: KvHandle, kv_slice: KvSlice, length: int
) -> list[Receiver]:
    """Fetch the slice from all shards that have a part; returns the receivers that got the commits."""
    shards = [replace(source.shard, kv_address="") for source in sources]
    if not engine.spec.kv_format.is_covered_by(shards):
        raise IncompleteTransfer(f"the exporter's shards do not cover the KV exactly once: {shards}")
    parts = [
        KvSlice(kv_slice.tokens, _intersect(kv_slice.layers, each.layers), _intersect(kv_slice.heads, each.heads))
        for each in shards
    ]
    try:
        async with asyncio.TaskGroup() as group:
            fetches = [
                group.create_task(_fetch_shard(source, engine, handle, part, length, shards))
                for source, part in zip(sources, parts, strict=True)
                if part.layers and part.heads
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [each.result() for each in fetches]


def _intersect(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


async def _fetch_shard(
    source: KvSource, engine: Engine, handle: KvHandle, kv_slice: KvSlice, length: int, shards: Sequence[Shard]
) -> Receiver:
    """Fetch a shard's part of a slice, and fill its gaps; returns the receiver that got the commit."""

    def receiver(kv_slice: KvSlice) -> Receiver:
        return Receiver(engine, handle, kv_slice, length, shards, source.checksum_seed)

    receivers = [receiver(kv_slice)]
    for gap in await _receive(source, receivers[0]):
        again = receiver(gap)
        await _receive(source, again)
        if again.bad_frames:
            part = f"layer {gap.layers.start}, tokens [{gap.tokens.start}, {gap.tokens.stop})"
            raise CorruptFrame(f"{part} failed its checksum twice; the transfer ends")
        receivers.append(again)
    committed = next((each for each in receivers if each.committed), None)
    if committed is None:
        raise IncompleteTransfer("the stream ended without a commit")
    return committed


async def _receive(source: KvSource, receiver: Receiver) -> list[KvSlice]:
    """Read one stream to its end; returns the slices to fetch again."""
    writing: asyncio.Future[None] | None = None
    async with aclosing(source.frames(receiver.kv_slice)) as frames:
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


class Receiver:
    """Receives a slice of an export of `length` tokens into the handle's pages.

    `shards` are all shards of the exporter. `seed` is the seed of the checksums of its frames (`wire.seed_of`).
    """

    def __init__(
        self,
        engine: Engine,
        handle: KvHandle,
        kv_slice: KvSlice,
        length: int,
        shards: Collection[Shard],
        seed: int,
    ) -> None:
        self.kv_slice = kv_slice
        self.bad_frames = 0
        """Number of frames that failed their check."""
        self.committed = False
        self.handoff: Handoff | None = None
        """Set by the commit; None for the export of a prefix."""
        self.prefix_digest = b""
        """Set by the commit of a prefix."""
        self._engine = engine
        self._handle = handle
        self._length = length
        self._shards = set(shards)
        self._seed = seed
        self._coverage = Coverage(kv_slice)
        self._frames = 0
        self._digest = 0
        self._manifest: Manifest | None = None

    def add_frame(self, raw: bytes) -> None:
        """Check and write one frame; raises TransferError if the transfer can't succeed any more."""
        if self.committed:
            raise CorruptFrame("a frame was sent after the commit")
        if raw == wire.KEEPALIVE:
            return
        try:
            frame = wire.decode(raw, self._seed)
        except CorruptFrame:
            self.bad_frames += 1
            TRANSFER_FAULTS.labels("bad_frame").inc()
            return
        match frame:
            case wire.KvData():
                self._add_data(frame)
            case Manifest():
                self._add_manifest(frame)
            case Commit():
                self._add_commit(frame)

    def gaps(self) -> list[KvSlice]:
        """The slices to fetch again because of bad frames; call it at the end of the stream.

        Raises IncompleteTransfer if something is missing although no frame was bad.
        """
        missing = self._coverage.missing()
        if not self.bad_frames:
            if missing:
                raise IncompleteTransfer(f"the stream ended without {_describe(missing)}")
            if self._manifest is None or not self.committed:
                raise IncompleteTransfer(
                    f"the stream ended without {'manifest' if self._manifest is None else 'commit'}"
                )
        if not missing and not self.committed:
            # A slice without tokens asks for manifest and commit only.
            return [KvSlice(range(self._length, self._length), self.kv_slice.layers, self.kv_slice.heads)]
        return missing

    def _add_data(self, frame: wire.KvData) -> None:
        if self._manifest is not None:
            raise CorruptFrame("data was sent after the manifest")
        self._coverage.add(frame.layer, frame.tokens, frame.heads)
        self._frames += 1
        self._digest = wire.extend_digest(self._digest, frame.checksum)
        self._write(frame.layer, frame.tokens.start, frame.heads.start, frame.parts)
        TRANSFER_BYTES.labels("received").inc(frame.payload_bytes)

    def _write(self, layer: int, token: int, head: int, parts: tuple[PartData, ...]) -> None:
        try:
            self._engine.write_kv(self._handle, layer, token, head, parts)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"layer {layer} from token {token} on could not be written: {error}") from error

    def _add_manifest(self, manifest: Manifest) -> None:
        """Compare the manifest with the frames that arrived, or with the whole slice if some frames were bad."""
        if self._manifest is not None:
            raise CorruptFrame("a second manifest was sent")
        tokens, layers = self.kv_slice.tokens, self.kv_slice.layers
        whole = tuple((layer, tokens.start, tokens.stop) for layer in layers) if tokens else ()
        runs, digest = (whole, manifest.digest) if self.bad_frames else (self._coverage.runs(), self._digest)
        arrived = Manifest(self._frames + self.bad_frames, runs, digest, Shard("", layers, self.kv_slice.heads))
        if manifest != arrived:
            raise IncompleteTransfer(
                f"the manifest lists {manifest.frames} frames with digest {manifest.digest:#010x} in "
                f"{len(manifest.runs)} ranges, {arrived.frames} frames with digest {arrived.digest:#010x} in "
                f"{len(arrived.runs)} ranges arrived, of {_part(manifest.shard)} and {_part(arrived.shard)}"
            )
        self._manifest = manifest

    def _add_commit(self, commit: Commit) -> None:
        if self._manifest is None and not self.bad_frames:
            raise IncompleteTransfer("the commit was sent without a manifest")
        handoff, lengths = None, {commit.length}
        if commit.handoff is not None:
            if commit.version != HANDOFF_VERSION:
                raise TransferError(f"the handoff has version {commit.version}, this worker reads {HANDOFF_VERSION}")
            handoff = unpack(commit.handoff, self._engine.spec.vocab_size)
            lengths.add(len(handoff.prompt_ids) + len(handoff.output_ids))
        if lengths != {self._length}:
            raise IncompleteTransfer(f"the commit covers {sorted(lengths)} tokens, {self._length} are wanted")
        if set(commit.shards) != self._shards:
            raise IncompleteTransfer(f"the exporter has the shards {commit.shards}, fetched are {self._shards}")
        self.committed, self.handoff, self.prefix_digest = True, handoff, commit.prefix_digest


def _part(shard: Shard) -> str:
    return f"layers [{shard.layers.start}, {shard.layers.stop}) and heads [{shard.heads.start}, {shard.heads.stop})"


def _describe(missing: list[KvSlice]) -> str:
    first = missing[0]
    return (
        f"tokens [{first.tokens.start}, {first.tokens.stop}) of layer {first.layers.start}, "
        f"the first of {len(missing)} gaps"
    )
