"""One exported KV cache: which tokens are final, its streams, its lease, its end (`registry` shows its life).

Each stream sends final KV in the order in which it was computed: a chunk passes through all layers before the next
chunk starts. While one frame is sent, the next is read from the engine. There is no other read-ahead, so a slow
consumer costs the memory of two frames. A consumer may have to wait: for tokens that it has already and that are
computed here, or while the engine computes other prompts. Meanwhile it gets an empty progress frame every PROGRESS_S:
the export is there. Whether the worker itself makes progress is told by its status.

The lease begins at the commit. Each frame that a consumer reads renews it. If a consumer reads none, the export ends,
even while its stream is open. The timers are those of the event loop, so they do not depend on a scheduler.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from baton import executors
from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError, IncompleteTransfer, InvalidRequest, TransferError
from baton.executors import COPIES, WORK
from baton.kv.format import Shard
from baton.request import Handoff
from baton.telemetry.metrics import LEASES_EXPIRED, TRANSFER_BYTES
from baton.transfer import wire
from baton.transfer.closing import Manifest, encode_commit, encode_manifest, pack
from baton.transfer.coverage import Box, Coverage
from baton.transfer.waiters import add_waiter, wake_all

PROGRESS_S = 1.0

_Frame = tuple[int, range, bytes, int, int]
"""Layer, tokens, the encoded frame, its checksum, and the bytes of its payload."""


class Export:
    """One exported KV cache; `ExportRegistry.open` makes it."""

    def __init__(
        self,
        engine: Engine,
        transfer_id: str,
        handle: KvHandle,
        tokens: int,
        *,
        lease_s: float,
        frame_bytes: int,
        shards: Sequence[Shard],
        on_ended: Callable[[str], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.tokens = tokens
        self._seed = wire.seed_of(transfer_id)
        self.kv_format = engine.spec.kv_format
        self._engine = engine
        self._handle = handle
        self._lease_s = lease_s
        self._frame_bytes = frame_bytes
        self._shards = shards
        self._on_ended = on_ended
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._final = [0] * self.kv_format.layers
        self._wake_lock = threading.Lock()
        self._wake_pending = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._committed = False
        self._handoff: Handoff | None = None
        self.is_prefix = False
        """Whether it has no handoff. Its consumers will cache the KV under the digests of its blocks."""
        self._prefix_digest = b""
        self._commit: bytes | None = None
        self._ended: TransferError | None = None
        self._reading = 0
        self._lease_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether the export was released, has failed, or its lease is over."""
        return self._ended is not None

    @property
    def closed(self) -> bool:
        """Whether it has ended and none of its reads is running."""
        return self.ended and not self._reading

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends; infinite before the commit."""
        return math.inf if self._timer is None else max(0.0, self._lease_until - self._loop.time())

    def advance(self, layer: int, token_end: int) -> None:
        """Record that tokens `[0, token_end)` of the layer are final.

        May be called from any thread; ignored after the end.

        Raises InvalidRequest for a layer or token outside of the export.
        """
        if not 0 <= layer < len(self._final):
            raise InvalidRequest("layer", f"must be in [0, {len(self._final)})", layer)
        if not 0 <= token_end <= self.tokens:
            raise InvalidRequest("token_end", f"must be in [0, {self.tokens}]", token_end)
        with self._wake_lock:
            if self.ended or token_end <= self._final[layer]:
                return
            self._final[layer] = token_end
            if self._wake_pending:
                return
            self._wake_pending = True
        self._loop.call_soon_threadsafe(self._wake)

    def commit(self, handoff: Handoff) -> None:
        """Record that all KV is final, with its handoff; the lease begins. Ignored after the end.

        Raises IncompleteTransfer if a layer has not advanced to the last token, InvalidRequest if it was committed
        before.
        """
        self._commit_with(handoff)

    def commit_prefix(self, digest: bytes) -> None:
        """Commit KV that was final from the start, without a handoff; otherwise like `commit`.

        `digest` is that of its last full block.
        """
        self._prefix_digest, self.is_prefix = digest, True
        for layer in range(len(self._final)):
            self.advance(layer, self.tokens)
        self._commit_with(None)

    def _commit_with(self, handoff: Handoff | None) -> None:
        if self.ended:
            return
        if self._committed:
            raise InvalidRequest("transfer_id", "was committed already", self.transfer_id)
        for layer, final in enumerate(self._final):
            if final != self.tokens:
                raise IncompleteTransfer(
                    f"transfer {self.transfer_id}: {final} of {self.tokens} tokens of layer {layer} are final"
                )
        self._committed, self._handoff = True, handoff
        self._wake_waiters()
        self._renew()

    def fail(self, error: Exception) -> None:
        """End the export; its streams end with the error. Ignored after the end."""
        self.end(f"failed at its source: {error}")

    def end(self, reason: str) -> None:
        """End the export, for a reason that its streams report; idempotent."""
        if self.ended:
            return
        self._ended = TransferError(f"transfer {self.transfer_id} {reason}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_ended(reason)
        self._wake_waiters()
        self._close_when_unread()

    async def frames(self, box: Box) -> AsyncGenerator[bytes, None]:
        """The stream of one FetchKv: data frames as KV becomes final, then the manifest, then the commit.

        `box` must lie within the export. Raises TransferError if the export ends before the stream does.
        """
        self._renew()
        carried, digest, count = Coverage(box), 0, 0
        pieces = _Pieces(box, self._tokens_a_frame(box))
        ahead = None
        sent_at = self._loop.time()
        while ahead is not None or not pieces.done:
            ahead = ahead or self._read_next(pieces, box)
            if ahead is None:
                if self._loop.time() < sent_at + PROGRESS_S:
                    await self._wait_for_change(until=sent_at + PROGRESS_S)
                else:
                    yield wire.PROGRESS
                    sent_at = self._loop.time()
                continue
            layer, tokens, frame, checksum, payload = await self._result(ahead)
            carried.add(layer, tokens, box.heads)
            digest, count = wire.extend_digest(digest, checksum), count + 1
            ahead = self._read_next(pieces, box)
            yield frame
            TRANSFER_BYTES.labels("sent").inc(payload)
            self._renew()
            sent_at = self._loop.time()
        yield encode_manifest(Manifest(count, carried.runs(), digest, Shard("", box.layers, box.heads)))
        self._renew()
        while not self._committed:
            await self._wait_for_change(until=sent_at + PROGRESS_S)
            if self._loop.time() >= sent_at + PROGRESS_S:
                yield wire.PROGRESS
                sent_at = self._loop.time()
        self._check()
        yield await executors.run(WORK, self._encoded_commit)
        self._renew()

    def _encoded_commit(self) -> bytes:
        if self._commit is None:
            handoff = None if self._handoff is None else pack(self._handoff)
            shards = [replace(shard, kv_address="") for shard in self._shards]
            self._commit = encode_commit(self.tokens, handoff, shards, prefix_digest=self._prefix_digest)
        return self._commit

    def _tokens_a_frame(self, box: Box) -> int:
        token_bytes = self.kv_format.token_bytes // self.kv_format.layers
        layer_bytes = token_bytes * len(box.heads) // self.kv_format.heads
        return max(1, self._frame_bytes // layer_bytes)

    def _read_next(self, pieces: _Pieces, box: Box) -> asyncio.Future[_Frame] | None:
        """Start to read the next piece, if it is final."""
        self._check()
        piece = pieces.next_piece(self._final)
        if piece is None:
            return None
        self._reading += 1
        read = executors.run(COPIES, self._read, *piece, box.heads)
        read.add_done_callback(self._on_read_done)
        return read

    def _read(self, layer: int, tokens: range, heads: range) -> _Frame:
        parts = self._engine.read_kv(self._handle, layer, tokens, heads)
        frame, checksum = wire.encode_data(layer, tokens, heads, parts, self._seed)
        return layer, tokens, frame, checksum, sum(memoryview(part.data).nbytes for part in parts)

    async def _result(self, read: asyncio.Future[_Frame]) -> _Frame:
        try:
            # Shielded, because a cancelled stream does not end the read in its thread.
            return await asyncio.shield(read)
        except EngineError:
            # The owner may free the handle at the end of the export, before the read has begun.
            self._check()
            raise

    def _on_read_done(self, read: asyncio.Future[_Frame]) -> None:
        self._reading -= 1
        if not read.cancelled():
            read.exception()
        self._close_when_unread()

    def _close_when_unread(self) -> None:
        """Close the export once it has ended and no read is running.

        No read starts after the end, so it closes once.
        """
        if self.ended and not self._reading:
            self._on_closed()

    def _check(self) -> None:
        if self._ended is not None:
            raise TransferError(str(self._ended))

    async def _wait_for_change(self, until: float) -> None:
        """Wait until KV is final, committed, or it is `until`. Raises TransferError if the export has ended."""
        self._check()
        with add_waiter(self._waiting) as waiter:
            await asyncio.wait({waiter}, timeout=max(0.0, until - self._loop.time()))
        self._check()

    def _wake(self) -> None:
        with self._wake_lock:
            self._wake_pending = False
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        wake_all(self._waiting)

    def _renew(self) -> None:
        """Restart the lease now; it does not run before the commit."""
        if self._committed and not self.ended:
            self._lease_until = self._loop.time() + self._lease_s
            if self._timer is None:
                self._timer = self._loop.call_at(self._lease_until, self._on_lease_timer)

    def _on_lease_timer(self) -> None:
        self._timer = None
        if self._loop.time() < self._lease_until:
            self._timer = self._loop.call_at(self._lease_until, self._on_lease_timer)
            return
        LEASES_EXPIRED.inc()
        self.end(f"was not fetched within its lease of {self._lease_s} s")


class _Pieces:
    """Cuts a box into frames, in the order in which KV is computed: the layer that is furthest behind goes first."""

    def __init__(self, box: Box, tokens_a_frame: int) -> None:
        self._next = dict.fromkeys(box.layers, box.tokens.start)
        self._stop = box.tokens.stop
        self._size = tokens_a_frame

    @property
    def done(self) -> bool:
        """Whether all pieces were taken."""
        return all(at == self._stop for at in self._next.values())

    def next_piece(self, final: list[int]) -> tuple[int, range] | None:
        """The next piece, given the number of final tokens of each layer; None if there is none yet."""
        ready = [(at, layer) for layer, at in self._next.items() if at < min(final[layer], self._stop)]
        if not ready:
            return None
        start, layer = min(ready)
        stop = min(start + self._size, final[layer], self._stop)
        self._next[layer] = stop
        return layer, range(start, stop)
