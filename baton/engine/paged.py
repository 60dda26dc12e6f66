"""What every engine shares: handles, slots, pausing, and the checks at the contract's edge.

`PagedEngine` implements the contract (`baton.engine.contract`) over a page pool and a `KvMemory`; an engine
adds how a chunk and a batch are computed. The batch is dense: a sequence that leaves is replaced by the last
one, and the hooks `_joined` and `_left` let an engine keep its own per-row state in step with that.

A freed handle may still have a row. Rows of dead handles are removed when the next step, insert or resume
begins, on the engine thread; until then they hold a slot, but no page. A step pins its rows' pages until it is
read (`baton.engine.steps`), so a `free` in its midst returns pages only after it.

Locks: the pool has its own; `_paused` and the host pool's count are guarded by `_host_lock`. Rows belong to
the engine thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton.engine.checks import check_blocks, check_parts, check_range
from baton.engine.contract import ChunkResult, EngineSpec, KvHandle, PoolStats
from baton.engine.kv_memory import KvMemory
from baton.engine.steps import Flight, Row, Step
from baton.errors import CorruptFrame, EngineError, NoToken, Overloaded
from baton.kv.cached_blocks import PrefixesChanged
from baton.kv.format import PartData
from baton.kv.pool import PageCopy, PageHandle, PagePool
from baton.request import SequenceState, TokenInfo, check_token_ids


@dataclass(frozen=True, slots=True)
class _Paused:
    row: Row
    saved: Any
    bytes: int
    capacity: int


class PagedEngine(ABC):
    """The contract's bookkeeping; see the module's text."""

    def __init__(self, spec: EngineSpec, memory: KvMemory, host_kv_memory: int, *, neighbours: bool = False) -> None:
        # `neighbours`: pages that follow each other are read faster, so that some more may be evicted to have them.
        self._spec = spec
        self._memory = memory
        self._pool = PagePool(spec.pages, spec.page_size, spec.kv_format.block_size, neighbours)
        self._rows: list[Row] = []
        self._row_of: dict[PageHandle, int] = {}
        self._flight = Flight()
        self._host_lock = threading.Lock()
        self._host_total = self._host_free = host_kv_memory
        self._paused: dict[PageHandle, _Paused] = {}

    @abstractmethod
    def _prefill(
        self,
        pages: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        on_layer: Callable[[int], None],
        sample: Sequence[SequenceState],
        prompt_logprobs: int | None,
    ) -> ChunkResult:
        """Compute a chunk; arguments are checked, pages are pinned."""

    @abstractmethod
    def _launch(self, rows: Sequence[Row]) -> Callable[[], Sequence[TokenInfo | NoToken]]:
        """Begin one forward pass over all rows, whose pages are pinned and have room; nothing has moved if it raises.

        What it returns waits for the pass, and returns a token or an error for each row, or raises. The last tokens of
        rows that have unread ones are known to this engine alone.
        """

    def _must_read_first(self) -> bool:
        """Whether the next step depends on all tokens before it, and so can't be launched ahead of their reading."""
        return False

    @abstractmethod
    def _undone(self) -> None:
        """Steps in flight came to nothing: go on from what the rows say."""

    def _took(self, tokens: Sequence[tuple[Row, TokenInfo]]) -> None:  # noqa: B027
        """Rows that were in a step got their tokens; they may have moved or left since it was launched."""

    @abstractmethod
    def _joined(self, row: Row) -> None:
        """`row` becomes the last of the batch; it does not if this raises."""

    @abstractmethod
    def _left(self, index: int) -> None:
        """Row `index` left, and the last row took its place."""

    @property
    def spec(self) -> EngineSpec:
        """What does not change."""
        return self._spec

    def reserve(self, owner: str, tokens: int, prefix: Sequence[bytes] = (), most: int | None = None) -> PageHandle:
        """See `Engine.reserve`."""
        return self._pool.reserve(owner, tokens, prefix, most, self._copy)

    def publish(self, handle: KvHandle, digests: Sequence[bytes]) -> None:
        """See `Engine.publish`. A paused sequence publishes nothing, until `resume` has put back all of its KV."""
        own = _own(handle)
        with self._host_lock:
            if own not in self._paused:
                self._pool.publish(own, digests)

    def held(self, digests: Sequence[bytes]) -> int:
        """See `Engine.held`."""
        return self._pool.held(digests)

    def watch_prefixes(self, changed: PrefixesChanged | None) -> None:
        """See `Engine.watch_prefixes`."""
        self._pool.watch_prefixes(changed)

    def drop_cached(self) -> int:
        """See `Engine.drop_cached`."""
        return self._pool.drop_cached()

    def retract(self, handle: KvHandle) -> None:
        """See `Engine.retract`."""
        self._pool.retract(_own(handle))

    def extend(self, handle: KvHandle, tokens: int) -> None:
        """See `Engine.extend`."""
        self._pool.extend(_own(handle), tokens)

    def fork(
        self, handle: KvHandle, owner: str, shared_tokens: int, tokens: int, spare: KvHandle | None = None
    ) -> PageHandle:
        """See `Engine.fork`."""
        parent, donor = _own(handle), None if spare is None else _own(spare)
        with self._pool.pinned(parent):
            child, copy = self._pool.fork(parent, owner, shared_tokens, tokens, donor)
            if copy is not None:
                try:
                    self._copy(copy)
                except BaseException:
                    self._pool.free(child)
                    raise
        return child

    def prefill_chunk(
        self,
        handle: KvHandle,
        token_ids: Sequence[int],
        start: int,
        end: int,
        *,
        on_layer: Callable[[int], None],
        sample: Sequence[SequenceState] = (),
        prompt_logprobs: int | None = None,
    ) -> ChunkResult:
        """See `Engine.prefill_chunk`. Raises InvalidRequest for a token id outside the vocabulary."""
        if not 0 <= start < end <= min(len(token_ids), self._spec.max_model_len):
            raise EngineError(
                f"{handle.owner}: chunk [{start}, {end}) of {len(token_ids)} tokens, "
                f"max_model_len is {self._spec.max_model_len}"
            )
        check_token_ids("token_ids", token_ids[start : end + 1], self._spec.vocab_size, start)
        with self._pool.pinned(_own(handle), writes=range(start, end)) as pages:
            return self._prefill(pages, token_ids, start, end, on_layer, sample, prompt_logprobs)

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        """See `Engine.read_kv`. Raises InvalidRequest for a range that the handle does not have."""
        own, kv_format = _own(handle), self._spec.kv_format
        with self._pool.pinned(own) as pages:
            check_range("layer", range(layer, layer + 1), kv_format.layers)
            check_range("tokens", tokens, len(pages) * self._spec.page_size)
            check_range("heads", heads, kv_format.heads)
            return self._memory.read(pages, layer, tokens, heads)

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """See `Engine.write_kv`. Raises CorruptFrame for parts or ranges that don't fit the format or the handle."""
        count = check_parts(self._spec.kv_format, layer, head_start, parts)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self._memory.write(pages, layer, token_start, head_start, parts)

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        """See `Engine.read_blocks`. Raises InvalidRequest for blocks that the handle does not have."""
        size = self._spec.kv_format.block_size
        with self._pool.pinned(_own(handle)) as pages:
            tokens = range(token_start, token_start + count * size)
            check_range("tokens", tokens, len(pages) * self._spec.page_size)
            return self._memory.read_blocks(pages, token_start, size, count)

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: Sequence[bytes | memoryview]) -> None:
        """See `Engine.write_blocks`. Raises CorruptFrame for payloads that don't fit the format or the handle."""
        count = check_blocks(self._spec.kv_format, payloads)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self._memory.write_blocks(pages, token_start, self._spec.kv_format.block_size, payloads)

    def insert(self, handle: KvHandle, state: SequenceState) -> None:
        """See `Engine.insert`."""
        own = _own(handle)
        self._pool.check_alive(own)
        self._remove_dead()
        if own in self._row_of or own in self._paused:
            raise EngineError(f"{own.owner}: was inserted before")
        if not 0 < state.length <= own.capacity + 1:
            raise EngineError(f"{own.owner}: {state.length} tokens in pages for {own.capacity}")
        self._check_length(own, state)
        self._check_slot()
        output_ids = list(state.output_ids)
        self._join(Row(own, replace(state, output_ids=output_ids), output_ids))

    def step(self) -> Step:
        """See `Engine.step`. Raises EngineError naming a sequence without room; then no sequence has moved."""
        ahead = self._spec.steps_ahead
        self._read(0 if self._must_read_first() else ahead)
        with ExitStack() as pins:
            rows = pins.enter_context(self._pinned_rows())
            for row in rows:
                self._check_length(row.handle, row.state)
            wait = self._launch(rows) if rows else list
            step = Step(tuple(rows), wait, pins.pop_all(), self._read_up_to)
        self._flight.add(step)
        if not ahead:
            self._read(0)
        return step

    def pause(self, handle: KvHandle) -> None:
        """See `Engine.pause`."""
        own = _own(handle)
        self._read(0)
        with self._pool.pinned(own) as pages:
            index = self._row_of.get(own)
            if index is None:
                raise EngineError(f"{own.owner}: is not running")
            row = self._rows[index]
            size = row.position * self._spec.kv_format.token_bytes
            with self._host_lock:
                if size > self._host_free:
                    raise Overloaded(f"{own.owner}: needs {size} bytes of host_kv_memory, {self._host_free} are free")
            paused = _Paused(row, self._memory.save(pages, row.position), size, own.capacity)
        with self._host_lock:
            self._paused[own] = paused
            self._host_free -= size
        # Recorded first: a `free` that comes now finds what it has to forget.
        if not self._pool.detach(own):
            self._forget_paused(own)
        self._leave(index)

    def resume(self, handle: KvHandle) -> None:
        """See `Engine.resume`."""
        own = _own(handle)
        self._pool.check_alive(own)
        paused = self._paused.get(own)
        if paused is None:
            raise EngineError(f"{own.owner}: is not paused")
        self._remove_dead()
        self._check_slot()
        self._pool.extend(own, paused.capacity)
        with self._pool.pinned(own) as pages:
            self._memory.restore(pages, paused.saved)
        self._join(paused.row)
        self._forget_paused(own)

    def free(self, handle: KvHandle, digests: Sequence[bytes] = ()) -> None:
        """See `Engine.free`. A paused sequence leaves nothing, until `resume` has put back all of its KV."""
        own = _own(handle)
        self._pool.free(own, digests, but=self._paused)
        self._forget_paused(own)

    def stats(self) -> PoolStats:
        """See `Engine.stats`."""
        return self._pool.stats()

    def host_kv(self) -> dict[str, int]:
        """See `Engine.host_kv`."""
        with self._host_lock:
            return {handle.owner: paused.bytes for handle, paused in self._paused.items()}

    def watch_pages(self, returned: Callable[[], object] | None) -> None:
        """See `Engine.watch_pages`."""
        self._pool.watch(returned)

    def audit(self) -> dict[str, int]:
        """See `Engine.audit`."""
        with self._host_lock:
            held, free = sum(paused.bytes for paused in self._paused.values()), self._host_free
        if held + free != self._host_total:
            raise EngineError(
                f"host memory audit failed: {held} bytes are held and {free} free of {self._host_total}; "
                f"ledger {self.host_kv()}"
            )
        return self._pool.audit()

    def close(self) -> None:
        """See `Engine.close`."""
        self._undo(EngineError("the engine was closed"))
        self._pool.free_all()
        self._remove_dead()
        for handle in list(self._paused):
            self._forget_paused(handle)

    @contextmanager
    def _written(self, handle: KvHandle, tokens: range) -> Iterator[Sequence[int]]:
        """The handle's pages, pinned to write `tokens`; raises CorruptFrame if it does not have them all."""
        own = _own(handle)
        if tokens.start < 0 or (own.alive and tokens.stop > own.capacity):
            raise CorruptFrame(f"tokens {tokens} of {own.owner}, which holds {own.capacity}")
        with self._pool.pinned(own, writes=tokens) as pages:
            yield pages

    def _copy(self, copy: PageCopy) -> None:
        self._memory.copy_page(copy.source, copy.target, copy.tokens)

    def _read(self, keep: int) -> None:
        """Complete the oldest steps, until `keep` are in flight; if one raises, it and the later ones are undone."""
        while len(self._flight) > keep:
            try:
                step = self._flight.complete()
            except BaseException:
                self._undone()
                raise
            self._took([(row, found) for row, found in step.found if not isinstance(found, NoToken)])
            for row, found in step.found:
                if isinstance(found, NoToken) and row.handle in self._row_of:
                    self._leave(self._row_of[row.handle])

    def _read_up_to(self, step: Step) -> None:
        while step in self._flight:
            self._read(len(self._flight) - 1)

    def _undo(self, error: EngineError) -> None:
        if self._flight:
            self._flight.undo(error)
            self._undone()

    @contextmanager
    def _pinned_rows(self) -> Iterator[list[Row]]:
        """The living rows with their pages pinned."""
        while True:
            handles = [row.handle for row in self._rows]
            with self._pool.pinned_batch(handles, [row.position for row in self._rows]) as dead:
                if not dead:
                    yield self._rows
                    return
            self._remove_dead()

    def _remove_dead(self) -> None:
        for handle in [row.handle for row in self._rows if not row.handle.alive]:
            self._leave(self._row_of[handle])

    def _check_length(self, handle: PageHandle, state: SequenceState) -> None:
        if state.length >= self._spec.max_model_len:
            raise EngineError(f"{handle.owner}: has {state.length} tokens, max_model_len is {self._spec.max_model_len}")

    def _check_slot(self) -> None:
        if len(self._rows) >= self._spec.slots:
            raise Overloaded(f"all {self._spec.slots} slots are taken")

    def _join(self, row: Row) -> None:
        # First what may raise: then nothing has joined.
        self._joined(row)
        self._row_of[row.handle] = len(self._rows)
        self._rows.append(row)

    def _leave(self, index: int) -> None:
        row, last = self._rows[index], self._rows.pop()
        if last is not row:
            self._rows[index] = last
            self._row_of[last.handle] = index
        del self._row_of[row.handle]
        self._left(index)

    def _forget_paused(self, handle: PageHandle) -> None:
        with self._host_lock:
            paused = self._paused.pop(handle, None)
            if paused is not None:
                self._host_free += paused.bytes


def _own(handle: KvHandle) -> PageHandle:
    if not isinstance(handle, PageHandle):
        raise EngineError(f"{handle.owner}: the handle is of another engine")
    return handle
