"""Exports: KV that other workers may fetch from this worker, from its first chunk until it is released.

    announce ──▶ open ── mark_final × n ── commit ── lease ──▶ ended ── on_closed
       │           └──────── fail, close, release ────────────▲
       └── withdraw ──────────────────────────────────────────┘   (never opened: no on_closed)

A FetchKv may arrive before the prefill request. If its transfer id is unknown, it waits up to `unknown_wait_s` seconds
until the id is announced or opened. If the id is announced, it waits as long as its caller does, because a prompt may
wait in a queue.

Each stream sends final KV in the order in which it was computed: a chunk passes through all layers before the next
chunk starts. While one frame is sent, the next is read from the engine. There is no other read-ahead, so a slow
consumer costs the memory of two frames. A consumer may have to wait while the engine computes other prompts, or the
part of this prompt that the consumer already has. Meanwhile it gets an empty keep-alive frame every KEEPALIVE_S
seconds, which says only that the export exists; the worker's status says whether the worker makes progress.

The lease begins at the commit. A stream that opens renews it, and so does each frame that a consumer reads. If neither
happens during the lease, the export ends, even while a stream is open. The event loop's timers end it.

An export ends once. Then it can't be found any more, and its streams end with an error. When its last read has ended,
`on_closed` is called, once, and the owner frees the handle. Ids of ended exports are remembered, so that a
late message of a dead attempt can't open them again: the last `MAX_REMEMBERED` ids, each with the first `REASON_LENGTH`
characters of the reason. The RPCs accept ids of at most `MAX_ID_LENGTH` characters, so this takes about 35 MB at
most.

Everything runs on one asyncio loop, except `Export.mark_final`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from baton.engine.contract import Engine, KvHandle
from baton.errors import (
    EngineError,
    IncompleteTransfer,
    InvalidRequest,
    NotFound,
    StaleIncarnation,
    TransferError,
    Unavailable,
    preview,
)
from baton.kv.format import Shard
from baton.process import executors
from baton.process.executors import COPIES, WORK
from baton.request import Handoff
from baton.telemetry.metrics import EXPORTS_OPEN, LEASES_EXPIRED, TRANSFER_BYTES
from baton.transfer import wire
from baton.transfer.wire import Coverage, KvSlice, Manifest, encode_commit, encode_manifest, pack

KEEPALIVE_S = 1.0

_Frame = tuple[int, range, bytes, int, int]
"""Layer, tokens, the encoded frame, its checksum, and the bytes of its payload."""


class Export:
    """The export of the KV of one handle; made by `ExportRegistry.open`."""

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
        self._prefix_digest = b""
        self._commit: bytes | None = None
        self._ended: TransferError | None = None
        self._reading = 0
        self._lease_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether the export has ended: it was released, it has failed, or its lease is over."""
        return self._ended is not None

    @property
    def closed(self) -> bool:
        """Whether it has ended and none of its reads is running."""
        return self.ended and not self._reading

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends; infinite before the commit."""
        return math.inf if self._timer is None else max(0.0, self._lease_until - self._loop.time())

    def mark_final(self, layer: int, token_end: int) -> None:
        """Record that the KV of tokens `[0, token_end)` of a layer is final.

        Any thread may call it. After the end of the export it does nothing. Raises InvalidRequest for a layer or token
        outside the export.
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
        """Commit the export: all KV is final, and `handoff` is sent after it. The lease begins.

        After the end of the export it does nothing. Raises IncompleteTransfer if some KV is not final, InvalidRequest
        if the export was committed before.
        """
        self._commit_with(handoff)

    def commit_prefix(self, digest: bytes) -> None:
        """Mark all KV as final, and commit the export without a handoff; errors as in `commit`.

        `digest` is the digest of the last full block.
        """
        self._prefix_digest = digest
        for layer in range(len(self._final)):
            self.mark_final(layer, self.tokens)
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
        """End the export because of an error, which its streams report; does nothing after the end."""
        self.end(f"failed at its source: {error}")

    def end(self, reason: str) -> None:
        """End the export for a reason such as "was released". Idempotent.

        Its streams raise TransferError with the text "transfer <id> <reason>".
        """
        if self.ended:
            return
        self._ended = TransferError(f"transfer {self.transfer_id} {reason}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_ended(reason)
        self._wake_waiters()
        self._close_when_unread()

    async def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        """Yield the frames of one FetchKv: data frames as KV becomes final, then the manifest, then the commit.

        `kv_slice` must be within the export. Raises TransferError if the export ends before the stream.
        """
        self._renew()
        carried, digest, count = Coverage(kv_slice), 0, 0
        pieces = _Pieces(kv_slice, self._tokens_per_frame(kv_slice))
        ahead = None
        sent_at = self._loop.time()
        while ahead is not None or not pieces.done:
            ahead = ahead or self._read_next(pieces, kv_slice)
            if ahead is None:
                if self._loop.time() < sent_at + KEEPALIVE_S:
                    await self._wait_for_change(until=sent_at + KEEPALIVE_S)
                else:
                    yield wire.KEEPALIVE
                    sent_at = self._loop.time()
                continue
            layer, tokens, frame, checksum, payload = await self._result(ahead)
            carried.add(layer, tokens, kv_slice.heads)
            digest, count = wire.extend_digest(digest, checksum), count + 1
            ahead = self._read_next(pieces, kv_slice)
            yield frame
            TRANSFER_BYTES.labels("sent").inc(payload)
            self._renew()
            sent_at = self._loop.time()
        yield encode_manifest(Manifest(count, carried.runs(), digest, Shard("", kv_slice.layers, kv_slice.heads)))
        self._renew()
        while not self._committed:
            await self._wait_for_change(until=sent_at + KEEPALIVE_S)
            if self._loop.time() >= sent_at + KEEPALIVE_S:
                yield wire.KEEPALIVE
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

    def _tokens_per_frame(self, kv_slice: KvSlice) -> int:
        token_bytes = self.kv_format.token_bytes // self.kv_format.layers
        layer_bytes = token_bytes * len(kv_slice.heads) // self.kv_format.heads
        return max(1, self._frame_bytes // layer_bytes)

    def _read_next(self, pieces: _Pieces, kv_slice: KvSlice) -> asyncio.Future[_Frame] | None:
        """Start to read the next piece; returns None if no piece is final."""
        self._check()
        piece = pieces.next_piece(self._final)
        if piece is None:
            return None
        self._reading += 1
        read = executors.run(COPIES, self._read, *piece, kv_slice.heads)
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
            # After the end of the export its owner may have freed the handle before this read began.
            self._check()
            raise

    def _on_read_done(self, read: asyncio.Future[_Frame]) -> None:
        self._reading -= 1
        if not read.cancelled():
            read.exception()
        self._close_when_unread()

    def _close_when_unread(self) -> None:
        """Close the export if it has ended and no read is running. No read starts after the end, so it closes once."""
        if self.ended and not self._reading:
            self._on_closed()

    def _check(self) -> None:
        if self._ended is not None:
            raise TransferError(str(self._ended))

    async def _wait_for_change(self, until: float) -> None:
        """Wait until `until`, or until more KV is final or committed. Raises TransferError after the end."""
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
        """Restart the lease, unless the export is not committed yet or has ended."""
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
    """Cuts a slice into frames, in the order in which KV is computed: the layer that is furthest behind goes first."""

    def __init__(self, kv_slice: KvSlice, tokens_per_frame: int) -> None:
        self._next = dict.fromkeys(kv_slice.layers, kv_slice.tokens.start)
        self._stop = kv_slice.tokens.stop
        self._size = tokens_per_frame

    @property
    def done(self) -> bool:
        """Whether all pieces were taken."""
        return all(at == self._stop for at in self._next.values())

    def next_piece(self, final: list[int]) -> tuple[int, range] | None:
        """The next piece as (layer, tokens), or None; `final` has the number of final tokens of each layer."""
        ready = [(at, layer) for layer, at in self._next.items() if at < min(final[layer], self._stop)]
        if not ready:
            return None
        start, layer = min(ready)
        stop = min(start + self._size, final[layer], self._stop)
        self._next[layer] = stop
        return layer, range(start, stop)


LEASE_S = 10.0
"""Seconds after which an export ends that nobody fetches, unless a setting says otherwise."""
MAX_REMEMBERED = 65_536
REASON_LENGTH = 160


class ExportRegistry:
    """The exports of one worker, by transfer id."""

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        lease_s: float = LEASE_S,
        unknown_wait_s: float = 2.0,
        frame_bytes: int = 4 << 20,
        shards: Sequence[Shard] = (),
    ) -> None:
        """`shards` are all shards of the worker (default: one); times are in seconds, `frame_bytes` counts KV."""
        self._engine = engine
        self.incarnation = incarnation
        self._shards = shards or (engine.spec.kv_format.whole,)
        self._lease_s = lease_s
        self._frame_bytes = frame_bytes
        self._unknown_wait_s = unknown_wait_s
        self._open: dict[str, Export] = {}
        self._unclosed = 0
        self._announced: set[str] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._draining: set[asyncio.Future[None]] = set()
        self._closed = False

    def announce(self, transfer_id: str) -> None:
        """Announce an id that will be opened or withdrawn; until then, fetches of it wait as long as their callers do.

        Raises the errors of `open`, and InvalidRequest if the id was announced before.
        """
        self._check_new(transfer_id)
        if transfer_id in self._announced:
            raise InvalidRequest("transfer_id", "was announced already", transfer_id)
        self._announced.add(transfer_id)
        self._wake_waiters(transfer_id)

    def withdraw(self, transfer_id: str, reason: str) -> None:
        """Withdraw an announced id: fetches of it end with NOT_FOUND. Does nothing if it was opened."""
        if transfer_id in self._announced:
            self._remember(transfer_id, reason)

    def open(
        self, transfer_id: str, handle: KvHandle, tokens: int, *, on_closed: Callable[[], object] = lambda: None
    ) -> Export:
        """Export the first `tokens` tokens of the handle.

        `on_closed` is called once, on the loop, when the export is closed; it may be called within `release`, `fail` or
        `close`. Raises InvalidRequest if the id is open, TransferError if it was released or withdrawn before,
        Unavailable after `close`.
        """
        self._check_new(transfer_id)
        if not 0 < tokens <= handle.capacity:
            raise InvalidRequest("tokens", f"must be in [1, {handle.capacity}]", tokens)
        self._announced.discard(transfer_id)

        def ended(reason: str) -> None:
            del self._open[transfer_id]
            EXPORTS_OPEN.dec()
            self._remember(transfer_id, reason)

        def closed() -> None:
            self._unclosed -= 1
            wake_all(self._draining)
            on_closed()

        self._open[transfer_id] = export = Export(
            self._engine,
            transfer_id,
            handle,
            tokens,
            lease_s=self._lease_s,
            frame_bytes=self._frame_bytes,
            shards=self._shards,
            on_ended=ended,
            on_closed=closed,
        )
        self._unclosed += 1
        EXPORTS_OPEN.inc()
        self._wake_waiters(transfer_id)
        return export

    async def find(self, transfer_id: str, incarnation: str) -> Export:
        """Find an open export, and wait for it if necessary. Raises StaleIncarnation, NotFound or Unavailable."""
        self._check_incarnation(incarnation)
        give_up = asyncio.get_running_loop().time() + self._unknown_wait_s
        while (export := self._open.get(transfer_id)) is None:
            if (reason := self._ended.get(transfer_id)) is not None:
                raise NotFound(f"transfer {transfer_id} {reason}")
            if self._closed:
                raise Unavailable("the exporter is closing")
            try:
                async with asyncio.timeout_at(None if transfer_id in self._announced else give_up):
                    with add_waiter(self._waiters.setdefault(transfer_id, set())) as waiter:
                        await waiter
            except TimeoutError:
                raise NotFound(
                    f"transfer {transfer_id} is unknown, and was not opened within {self._unknown_wait_s} s"
                ) from None
            finally:
                if not self._waiters.get(transfer_id, True):
                    del self._waiters[transfer_id]
        return export

    def release(self, transfer_id: str, incarnation: str, reason: str = "was released") -> None:
        """End an export, or forbid to open the id later; idempotent. Does nothing for another incarnation."""
        if incarnation != self.incarnation:
            return
        if (export := self._open.get(transfer_id)) is not None:
            export.end(reason)
        elif transfer_id not in self._ended:
            self._remember(transfer_id, reason)

    def _check_incarnation(self, incarnation: str) -> None:
        """Raise StaleIncarnation if `incarnation` is not the one of this worker."""
        if incarnation != self.incarnation:
            # The message does not name the right one: without tickets, a caller that knows it can release exports.
            raise StaleIncarnation(f"incarnation: the exporter has been restarted, got {preview(incarnation)}")

    def close(self) -> None:
        """End all exports and every fetch that waits for one; nothing can be opened after this."""
        self._closed = True
        for export in list(self._open.values()):
            export.end("ended: its exporter is closing")
        for waiting in list(self._waiters.values()):
            wake_all(waiting)

    async def wait_closed(self) -> None:
        """Wait until no export is left and every `on_closed` was called."""
        while self._unclosed:
            with add_waiter(self._draining) as waiter:
                await waiter

    def _check_new(self, transfer_id: str) -> None:
        if self._closed:
            raise Unavailable("the exporter is closing")
        if transfer_id in self._open:
            raise InvalidRequest("transfer_id", "was exported already", transfer_id)
        if (reason := self._ended.get(transfer_id)) is not None:
            raise TransferError(f"transfer {transfer_id} {reason}")

    def _remember(self, transfer_id: str, reason: str) -> None:
        self._announced.discard(transfer_id)
        self._ended[transfer_id] = reason[:REASON_LENGTH]
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._wake_waiters(transfer_id)

    def _wake_waiters(self, transfer_id: str) -> None:
        wake_all(self._waiters.get(transfer_id, set()))


@contextmanager
def add_waiter(waiting: set[asyncio.Future[None]]) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is in the set while the block runs."""
    waiter = asyncio.get_running_loop().create_future()
    waiting.add(waiter)
    try:
        yield waiter
    finally:
        waiting.discard(waiter)


def wake_all(waiting: set[asyncio.Future[None]]) -> None:
    """Complete every future in the set."""
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
