"""Exports: KV that this worker lets others fetch, from its first chunk until it is released.

    announce ──▶ open ── advance × n ── commit ── lease ──▶ ended ── on_closed
       │           └──────── fail, close, release ────────────▲
       └── withdraw ──────────────────────────────────────────┘   (never opened: no on_closed)

A FetchKv may arrive before the prefill that it waits for. If its id is unknown, it waits `unknown_wait_s` for the id to
be announced or opened. If its id is announced, it waits as long as its caller does, because a prompt may wait in a
queue.

An export ends once. It is then not listed any more, and its streams end with an error. When none of its reads is
running any more, `on_closed` is called, once, and the owner frees the handle. Ids that ended are remembered, so that a
late message of a dead attempt can't open them again: the last `REMEMBERED` ids, each with the first `REASON_LENGTH`
characters of why it ended. The RPCs accept ids of at most `MAX_ID_LENGTH` characters, so this takes about 35 MB at
most.

Everything runs on one asyncio loop, except `Export.advance`, which any thread may call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.engine.contract import Engine, KvHandle
from baton.errors import InvalidRequest, NotFound, StaleIncarnation, TransferError, Unavailable, preview
from baton.kv.format import Shard
from baton.telemetry.metrics import EXPORTS_OPEN
from baton.transfer.export import Export
from baton.transfer.waiters import add_waiter, wake_all

REMEMBERED = 65_536
REASON_LENGTH = 160


class ExportRegistry:
    """The exports of one worker, by transfer id."""

    def __init__(
        self,
        engine: Engine,
        incarnation: str,
        *,
        lease_s: float = 10.0,
        unknown_wait_s: float = 2.0,
        frame_bytes: int = 4 << 20,
        shards: Sequence[Shard] = (),
    ) -> None:
        """`shards` are all shards of the worker; each is exported by its own process. By default there is one."""
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
        """Say that the id will be opened or withdrawn; fetches of it wait as long as their callers do.

        Raises the errors of `open`, and InvalidRequest if another prompt has announced the id.
        """
        self._check_new(transfer_id)
        if transfer_id in self._announced:
            raise InvalidRequest("transfer_id", "was announced already", transfer_id)
        self._announced.add(transfer_id)
        self._wake_waiters(transfer_id)

    def withdraw(self, transfer_id: str, reason: str) -> None:
        """Say that an announced id won't be opened; fetches of it end with NOT_FOUND. Ignored if it was opened."""
        if transfer_id in self._announced:
            self._remember(transfer_id, reason)

    def open(
        self, transfer_id: str, handle: KvHandle, tokens: int, *, on_closed: Callable[[], object] = lambda: None
    ) -> Export:
        """Export the first `tokens` tokens of the handle; `on_closed` is called once, when the export is closed.

        It is called on the loop, perhaps from within `release`, `fail` or `close`. Raises InvalidRequest if the id is
        open, TransferError if it has ended (also if it ended before it was opened), Unavailable after `close`.
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
        """The open export with this id; waits for it if necessary. Raises StaleIncarnation or NotFound."""
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
        """End an export; idempotent. An id that is not open can't be opened later. Ignored for another incarnation."""
        if incarnation != self.incarnation:
            return
        if (export := self._open.get(transfer_id)) is not None:
            export.end(reason)
        elif transfer_id not in self._ended:
            self._remember(transfer_id, reason)

    def _check_incarnation(self, incarnation: str) -> None:
        """Raise StaleIncarnation if the caller means another incarnation of this worker."""
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
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._wake_waiters(transfer_id)

    def _wake_waiters(self, transfer_id: str) -> None:
        wake_all(self._waiters.get(transfer_id, set()))
