"""The consumer's end of one stream: checks each frame, and writes the valid ones.

A frame that fails its own check (`wire.decode`) is counted as bad. It leaves a gap, which the fetcher fetches again. A
valid frame that does not belong in the stream (outside of the box, sent twice, after the commit) ends the transfer.
Nothing here is asynchronous: the fetcher calls `add_frame` on some thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.engine.contract import Engine, KvHandle
from baton.errors import CorruptFrame, IncompleteTransfer, TransferError
from baton.kv.format import PartData, Shard
from baton.request import Handoff
from baton.telemetry.metrics import TRANSFER_BYTES, TRANSFER_FAULTS
from baton.transfer import wire
from baton.transfer.closing import HANDOFF_VERSION, Commit, Manifest, unpack
from baton.transfer.coverage import Box, Coverage


class Receiver:
    """Receives a box of an export of `length` tokens into the handle's pages.

    `shards` are all shards of the exporter. `seed` is that of the export's frames (`wire.seed_of`).
    """

    def __init__(
        self,
        engine: Engine,
        handle: KvHandle,
        box: Box,
        length: int,
        shards: Collection[Shard],
        seed: int,
    ) -> None:
        self.box = box
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
        self._coverage = Coverage(box)
        self._frames = 0
        self._digest = 0
        self._manifest: Manifest | None = None

    def add_frame(self, raw: bytes) -> None:
        """Check and write one frame; raises TransferError if the transfer can't succeed any more."""
        if self.committed:
            raise CorruptFrame("a frame was sent after the commit")
        if raw == wire.PROGRESS:
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

    def gaps(self) -> list[Box]:
        """At the end of the stream: the boxes to fetch again because of bad frames.

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
            return [Box(range(self._length, self._length), self.box.layers, self.box.heads)]
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
        """Compare the manifest with the frames that arrived; if some were bad, with those that should have arrived."""
        if self._manifest is not None:
            raise CorruptFrame("a second manifest was sent")
        tokens, layers = self.box.tokens, self.box.layers
        whole = tuple((layer, tokens.start, tokens.stop) for layer in layers) if tokens else ()
        runs, digest = (whole, manifest.digest) if self.bad_frames else (self._coverage.runs(), self._digest)
        arrived = Manifest(self._frames + self.bad_frames, runs, digest, Shard("", layers, self.box.heads))
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
                raise TransferError(f"the handoff has version {commit.version}, this is {HANDOFF_VERSION}")
            handoff = unpack(commit.handoff, self._engine.spec.vocab_size)
            lengths.add(len(handoff.prompt_ids) + len(handoff.output_ids))
        if lengths != {self._length}:
            raise IncompleteTransfer(f"the commit covers {sorted(lengths)} tokens, {self._length} are wanted")
        if set(commit.shards) != self._shards:
            raise IncompleteTransfer(f"the exporter has the shards {commit.shards}, fetched are {self._shards}")
        self.committed, self.handoff, self.prefix_digest = True, handoff, commit.prefix_digest


def _part(shard: Shard) -> str:
    return f"layers [{shard.layers.start}, {shard.layers.stop}) and heads [{shard.heads.start}, {shard.heads.stop})"


def _describe(missing: list[Box]) -> str:
    first = missing[0]
    return (
        f"tokens [{first.tokens.start}, {first.tokens.stop}) of layer {first.layers.start}, "
        f"the first of {len(missing)} gaps"
    )
