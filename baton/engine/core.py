"""The engine: it makes plans from the calls of services. KvManager keeps pages and slots, the Executor runs plans.

    services ──▶ EngineCore ──▶ KvManager    pages, handles, cached blocks, slots
                     │ ForwardPlan
                     ▼
                 Executor ──▶ ModelRunner

The engine checks the arguments of calls (`baton.engine.contract`), pins the pages that reads, writes and passes use,
and keeps the passes in flight. `baton.engine.factory` builds it with a model, `baton.engine.fake` with a formula for
tokens.

    launch ──▶ in flight (pages pinned) ──▶ read: tokens appended to the sequences, pages unpinned ──▶ result taken
                      └─ a pass fails: it and all later ones are undone, and the sequences are as before it

To launch a step, the host needs only the lengths of sequences; the device has their newest tokens. So a step need not
wait for the tokens of the step before. The pages of its sequences stay pinned until it is read or undone, because a
sequence may be freed while a step in flight still writes to them.

Slots, plans and passes are used by the engine thread only. The pool has a lock of its own. `memory` may be called from
any thread, for pinned pages.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from baton.engine.contract import ChunkResult, EngineSequence, EngineSpec, KvHandle, OnLayer, PassResult, PromptChunk
from baton.engine.executor import Executor, PassEnded
from baton.engine.plan import ForwardPlan, Growth, Join, PlanResult, PromptInput, Row, RowResult
from baton.errors import BatonError, CorruptFrame, EngineError, InvalidRequest, JoinFailed, NoToken, Overloaded
from baton.kv.cached_blocks import PoolBlocksChanged
from baton.kv.format import DTYPE_BYTES, KvFormat, PartData
from baton.kv.pool import PageCopy, PageHandle, PagePool, PoolStats
from baton.request import TokenInfo, check_token_ids
from baton.telemetry.logs import about

_log = logging.getLogger(__name__)


class EngineCore:
    """The Engine over an executor; `memory` is the executor's KV memory."""

    def __init__(self, spec: EngineSpec, executor: Executor) -> None:
        self.executor = executor
        self.memory = executor.memory
        self._spec = spec
        self._kv = KvManager(spec)
        self._inflight = InflightPasses()
        self._stepping = False
        self._refused: list[tuple[EngineSequence, NoToken]] = []
        """Sequences that could not join the batch, with the errors that the next pass reports."""

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def batch(self) -> list[EngineSequence]:
        """The sequences that have slots and are alive; for the engine thread."""
        return self._kv.batch

    def reserve(
        self, owner: str, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None
    ) -> PageHandle:
        return self._kv.pool.reserve(owner, tokens, prefix, max_cached_tokens, self._copy)

    def evict_for(self, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None) -> bool:
        return self._kv.pool.evict_for(tokens, prefix, max_cached_tokens)

    def share_prefix(self, handle: KvHandle, prefix: Sequence[bytes], max_tokens: int) -> int:
        return self._kv.pool.share_prefix(_page_handle(handle), prefix, max_tokens)

    def publish(self, handle: KvHandle, digests: Sequence[bytes]) -> None:
        self._kv.pool.publish(_page_handle(handle), digests)

    def match_prefix(self, digests: Sequence[bytes]) -> int:
        return self._kv.pool.match_prefix(digests)

    def watch_prefixes(self, changed: PoolBlocksChanged | None) -> None:
        self._kv.pool.watch_prefixes(changed)

    def drop_cached(self) -> int:
        return self._kv.pool.drop_cached()

    def uncache(self, handle: KvHandle) -> None:
        self._kv.pool.uncache(_page_handle(handle))

    def extend(self, handle: KvHandle, tokens: int) -> None:
        self._kv.pool.extend(_page_handle(handle), tokens)

    def fork(
        self, handle: KvHandle, owner: str, shared_tokens: int, tokens: int, spare: KvHandle | None = None
    ) -> PageHandle:
        parent, donor = _page_handle(handle), None if spare is None else _page_handle(spare)
        with self._kv.pool.pin(parent):
            child, copy = self._kv.pool.fork(parent, owner, shared_tokens, tokens, donor)
            if copy is not None:
                try:
                    self._copy(copy)
                except BaseException:
                    self._kv.pool.free(child)
                    raise
        return child

    def launch(self, chunks: Sequence[PromptChunk] = (), *, step: bool = True) -> LaunchedPass:
        """Launch a pass, as the contract says. Raises EngineError if a sequence has no room for its next token."""
        if self._stepping:
            raise EngineError("a pass was launched while one that has a step was under way")
        ahead = self._spec.steps_ahead
        while True:
            self._read(0 if step and self._kv.must_read_first else ahead)
            with ExitStack() as pins:
                own = PassChunks(chunks)
                rows = own.plan(lambda chunk, pins=pins: self._prompt_row(chunk, pins))  # type: ignore[misc]
                step_rows = pins.enter_context(self._kv.pin_batch()) if step else {}
                own.step = bool(step_rows)
                try:
                    wait = self._launch(rows, step_rows, own.on_layer)
                except JoinFailed as error:
                    # No KV has changed, and the next step resets the ModelRunner, so other sequences are not affected.
                    failed = next(each for each in step_rows if each.slot == error.slot)
                    self._kv.remove(failed)
                    self._refused.append((failed, NoToken(f"{failed.handle.owner}: {error}")))
                    continue
                launched = LaunchedPass(own, step_rows, wait, pins.pop_all(), self._read_until, self._refused)
                self._refused = []
            self._inflight.add(launched)
            if not ahead:
                self._read(0)
            return launched

    @property
    def in_flight(self) -> Sequence[LaunchedPass]:
        return self._inflight.passes

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        """Read KV, as the contract says. Raises InvalidRequest for a range outside the handle."""
        own, kv_format = _page_handle(handle), self._spec.kv_format
        with self._kv.pool.pin(own) as pages:
            _check_range("layer", range(layer, layer + 1), kv_format.layers)
            _check_range("tokens", tokens, len(pages) * self._spec.page_size)
            _check_range("heads", heads, kv_format.heads)
            return self.memory.read(pages, layer, tokens, heads)

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Write KV, as the contract says. Raises CorruptFrame for KV that does not fit the format or the handle."""
        count = _check_parts(self._spec.kv_format, layer, head_start, parts)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self.memory.write(pages, layer, token_start, head_start, parts)

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        """Read blocks, as the contract says. Raises InvalidRequest for blocks outside the handle."""
        size = self._spec.kv_format.block_size
        with self._kv.pool.pin(_page_handle(handle)) as pages:
            tokens = range(token_start, token_start + count * size)
            _check_range("tokens", tokens, len(pages) * self._spec.page_size)
            return self.memory.read_blocks(pages, token_start, size, count)

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: Sequence[bytes | memoryview]) -> None:
        """Write blocks, as the contract says. Raises CorruptFrame if one does not fit the format or the handle."""
        count = _check_blocks(self._spec.kv_format, payloads)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self.memory.write_blocks(pages, token_start, self._spec.kv_format.block_size, payloads)

    def insert(self, sequence: EngineSequence) -> None:
        self._kv.insert(sequence, _page_handle(sequence.handle))

    def free(self, handle: KvHandle, digests: Sequence[bytes] = ()) -> None:
        self._kv.pool.free(_page_handle(handle), digests)

    def stats(self) -> PoolStats:
        return self._kv.pool.stats()

    def work_counter(self) -> int:
        return self.executor.work_counter()

    def watch_pages(self, returned: Callable[[], object] | None) -> None:
        self._kv.pool.watch_pages(returned)

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        self.executor.watch_failure(failed)

    def audit(self) -> dict[str, int]:
        return self._kv.pool.audit()

    def close(self) -> None:
        self._inflight.undo(EngineError("the engine was closed"))
        self._kv.forget_plans()
        self._kv.free_all()
        self.executor.close()

    @contextmanager
    def _written(self, handle: KvHandle, tokens: range) -> Iterator[Sequence[int]]:
        """Pin the handle's pages, and yield them. Raises CorruptFrame if `tokens` are outside the handle."""
        own = _page_handle(handle)
        if tokens.start < 0 or (own.alive and tokens.stop > own.capacity):
            raise CorruptFrame(f"tokens {tokens} of {own.owner}, which holds {own.capacity}")
        with self._kv.pool.pin(own, writes=tokens) as pages:
            yield pages

    def _copy(self, copy: PageCopy) -> None:
        self.memory.copy_page(copy.source, copy.target, copy.tokens)

    def _prompt_row(self, chunk: PromptChunk, pins: ExitStack) -> Row:
        """Make the row of a chunk, pinning its pages; raises EngineError for its range, InvalidRequest for its ids."""
        start, end, ids = chunk.start, chunk.end, chunk.token_ids
        if not 0 <= start < end <= min(len(ids), self._spec.max_model_len):
            raise EngineError(
                f"{chunk.handle.owner}: chunk [{start}, {end}) of {len(ids)} tokens, "
                f"max_model_len is {self._spec.max_model_len}"
            )
        check_token_ids("token_ids", ids[start : end + 1], self._spec.vocab_size, start)
        pages = pins.enter_context(self._kv.pool.pin(_page_handle(chunk.handle), writes=range(start, end)))
        prompt = PromptInput(
            tuple(ids[start:end]),
            pages[: self._spec.pages_for(end)],
            tuple(chunk.sample),
            chunk.prompt_logprobs,
            () if chunk.prompt_logprobs is None else tuple(ids[start + 1 : end + 1]),
        )
        return Row(prompt, start, end - start, (end - start - 1,) if chunk.sample else ())

    def _launch(
        self, rows: Sequence[Row], step_rows: Mapping[EngineSequence, Row], on_layer: OnLayer | None
    ) -> Callable[[], PlanResult]:
        if not rows and not step_rows:
            return lambda: PlanResult()
        self._stepping = bool(step_rows)
        try:
            return self.executor.launch(self._kv.plan(rows, step_rows), on_layer)
        except PassEnded:
            # The pass had no step, so it has changed no state of a slot.
            return lambda: PlanResult((RowResult(),) * len(rows))
        except BaseException:
            # Another rank may have failed with a pass before this one.
            self._kv.forget_plans()
            raise
        finally:
            self._stepping = False

    def _read(self, keep: int) -> None:
        """Read the oldest passes until `keep` passes are unread; if one raises, it and all later ones are undone."""
        while len(self._inflight.unread) > keep:
            try:
                oldest = self._inflight.read()
            except BaseException:
                self._kv.forget_plans()
                raise
            for sequence, result in oldest.step_results:
                if isinstance(result, NoToken):
                    self._kv.remove(sequence)

    def _read_until(self, launched: LaunchedPass) -> None:
        """Read all passes up to this one, and take it off the list of passes in flight."""
        while launched in self._inflight.unread:
            self._read(len(self._inflight.unread) - 1)
        self._inflight.remove(launched)


def _page_handle(handle: KvHandle) -> PageHandle:
    if not isinstance(handle, PageHandle):
        raise EngineError(f"{handle.owner}: the handle is of another engine")
    return handle


class KvManager:
    """Bookkeeping of sequences and their KV, without tensors.

        reserve ─▶ handle ─▶ insert ─▶ in a slot ─▶ remove

    `pool` has the pages, handles and cached blocks. The KvManager has the sequences of the generation batch. Each has a
    slot, and the ModelRunner keeps its page table, parameters and tokens under the number of that slot. So the
    KvManager also remembers the state of the ModelRunner, and puts only the changes into each plan
    (`baton.engine.plan`).

    A sequence whose handle is dead keeps its slot until the next step or insert begins.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.pool = PagePool(spec.pages, spec.page_size, spec.kv_format.block_size, spec.host_pages)
        self._spec = spec
        self._free_slots = list(range(spec.slots))
        self._running: dict[EngineSequence, PageHandle] = {}
        self._left: list[int] = []
        self._reset = False

    @property
    def batch(self) -> list[EngineSequence]:
        """The sequences that have slots and are alive."""
        return [sequence for sequence in self._running if sequence.handle.alive]

    @property
    def must_read_first(self) -> bool:
        """Whether the next step can be launched only when the tokens of all passes before it are known."""
        return self._reset or any(sequence.state.params.penalizes for sequence in self._running)

    def insert(self, sequence: EngineSequence, handle: PageHandle) -> None:
        """Give a slot to a sequence with this handle; raises EngineError, or Overloaded if no slot is free."""
        handle.check_alive()
        self._remove_dead()
        if handle in self._running.values():
            raise EngineError(f"{handle.owner}: was inserted before")
        if not 0 < sequence.length <= handle.capacity + 1:
            raise EngineError(f"{handle.owner}: {sequence.length} tokens in pages for {handle.capacity}")
        self._check_length(sequence)
        if not self._free_slots:
            raise Overloaded(f"all {self._spec.slots} slots are taken")
        sequence.slot = heapq.heappop(self._free_slots)
        self._running[sequence] = handle

    def remove(self, sequence: EngineSequence) -> None:
        """Free the slot of a sequence; does nothing if it has none."""
        if self._running.pop(sequence, None) is None:
            return
        heapq.heappush(self._free_slots, sequence.slot)
        if sequence.planned_pages is not None:
            self._left.append(sequence.slot)
            sequence.planned_pages = None

    @contextmanager
    def pin_batch(self) -> Iterator[dict[EngineSequence, Row]]:
        """Pin the pages of the batch, and yield its sequences with their rows; EngineError if one has no room."""
        while True:
            writes = [each.next_positions for each in self._running]
            step_rows = dict(zip(self._running, map(_step_row, self._running, writes), strict=True))
            with self.pool.pin_batch(list(self._running.values()), writes) as dead:
                if not dead:
                    for each in step_rows:
                        self._check_length(each)
                    yield step_rows
                    return
            self._remove_dead()

    def plan(self, prompts: Sequence[Row], step_rows: Mapping[EngineSequence, Row]) -> ForwardPlan:
        """Make a plan from the rows of prompts and of a step; `step_rows` is empty or has all sequences of the batch.

        The plan of a step has the changes of slots since the last one. The caller must launch it, or call
        `forget_plans`.
        """
        if not step_rows:
            return ForwardPlan(rows=tuple(prompts))
        joined, grew = [], []
        for each in step_rows:
            pages = self._running[each].pages
            count = len(pages)
            if each.planned_pages is None:
                state = replace(each.state, output_ids=tuple(each.output_ids))
                joined.append(Join(each.slot, pages[:count], state))
            elif count > each.planned_pages:
                grew.append(Growth(each.slot, pages[each.planned_pages : count]))
            each.planned_pages = count
        rows = (*prompts, *step_rows.values())
        plan = ForwardPlan(self._reset, tuple(self._left), tuple(joined), tuple(grew), rows)
        self._reset, self._left = False, []
        return plan

    def forget_plans(self) -> None:
        """After a failed step: make the plan of the next one reset the ModelRunner and join all sequences again."""
        self._reset, self._left = True, []
        for each in self._running:
            each.planned_pages = None

    def free_all(self) -> None:
        """Free all handles, and drop all cached blocks."""
        self.pool.free_all()
        self._remove_dead()

    def _remove_dead(self) -> None:
        for sequence in [each for each, handle in self._running.items() if not handle.alive]:
            self.remove(sequence)

    def _check_length(self, sequence: EngineSequence) -> None:
        if sequence.length >= (most := self._spec.max_model_len):
            raise EngineError(f"{sequence.handle.owner}: has {sequence.length} tokens, max_model_len is {most}")


def _step_row(sequence: EngineSequence, positions: range) -> Row:
    """The row of a sequence in the next step; a token is sampled after each new token."""
    count = len(positions)
    return Row(sequence.slot, positions.start, count, tuple(range(count)))


class PassChunks:
    """The chunks of a pass, with their errors. The `on_layer` of a failed chunk is not called any more."""

    def __init__(self, chunks: Sequence[PromptChunk]) -> None:
        self.chunks = chunks
        self.step = False
        """Whether the pass also has a step; then it goes on after all chunks have failed."""
        self._errors: list[Exception | None] = [None] * len(chunks)
        self._planned: list[int] = []

    def plan(self, row_of: Callable[[PromptChunk], Row]) -> list[Row]:
        """Make the rows of the chunks. A chunk for which `row_of` raises has failed, and gets no row."""
        rows = []
        for index, chunk in enumerate(self.chunks):
            try:
                rows.append(row_of(chunk))
            except Exception as error:
                self._errors[index] = _without_frames(error, chunk)
            else:
                self._planned.append(index)
        return rows

    @property
    def on_layer(self) -> OnLayer | None:
        """The `on_layer` of the pass, which calls those of the chunks; None if no chunk with a row has one."""
        return None if all(self.chunks[index].on_layer is None for index in self._planned) else self._call

    def _call(self, layer: int) -> None:
        for index in self._planned:
            on_layer = self.chunks[index].on_layer
            if on_layer is None or self._errors[index] is not None:
                continue
            try:
                on_layer(layer)
            except Exception as error:
                self._errors[index] = _without_frames(error, self.chunks[index])
        if not self.step and all(self._errors[index] is not None for index in self._planned):
            raise PassEnded

    def results(self, rows: Sequence[RowResult]) -> tuple[list[ChunkResult | Exception], Sequence[RowResult]]:
        """Results or errors of the chunks, and the remaining rows, which belong to the step."""
        own = dict(zip(self._planned, rows[: len(self._planned)], strict=True))
        results = [
            error or _chunk_result(chunk, own[index])
            for index, (chunk, error) in enumerate(zip(self.chunks, self._errors, strict=True))
        ]
        return results, rows[len(own) :]


def _without_frames(error: Exception, chunk: PromptChunk) -> Exception:
    """The error without its traceback, whose frames would keep the pass in memory until garbage is collected."""
    if not isinstance(error, BatonError):
        owner = chunk.handle.owner
        _log.error("%s: a chunk ends with an unexpected error", owner, exc_info=error, extra=about(owner))
    return error.with_traceback(None)


def _chunk_result(chunk: PromptChunk, row: RowResult) -> ChunkResult | NoToken:
    if row.problem:
        return NoToken(f"{chunk.handle.owner}: {row.problem}")
    return ChunkResult(row.tokens, row.prompt_logprobs)


class LaunchedPass:
    """A pass in flight: the ForwardPass of EngineCore. It pins pages until it is read or undone."""

    def __init__(
        self,
        chunks: PassChunks,
        step_rows: Mapping[EngineSequence, Row],
        wait: Callable[[], PlanResult],
        pins: ExitStack,
        read_until: Callable[[LaunchedPass], object],
        refused: Sequence[tuple[EngineSequence, NoToken]] = (),
    ) -> None:
        """`step_rows` has the sequences of the step with their rows. `wait` waits for the device and returns the result
        of the plan, or raises.

        `pins` holds the pages. `read_until` reads all passes up to this one. `refused` lists sequences that could not
        join the batch, with their errors.
        """
        self.launched_at = 0.0
        self.batch = list(step_rows)
        self.sampled = [len(row.sampled) for row in step_rows.values()]
        """Number of tokens that are sampled for each sequence of `batch`."""
        self.was_read = False
        self.step_results: list[tuple[EngineSequence, tuple[TokenInfo, ...] | NoToken]] = [*refused]
        self._chunks = chunks
        self._chunk_results: list[ChunkResult | Exception] = []
        self._wait, self._waited = wait, False
        self._pins = pins
        self._read_until = read_until
        self._error: BaseException | None = None

    def result(self) -> PassResult:
        """Wait for the pass. Raises the error of the pass, or EngineError if it was undone."""
        self._read_until(self)
        if self._error is not None:
            raise self._error
        alive = [(each, found) for each, found in self.step_results if each.handle.alive]
        return PassResult(self._chunk_results, alive)

    def read(self) -> None:
        """Wait for the device, append the tokens to the sequences, and, unless this raises, unpin the pages."""
        self._waited = True
        self._chunk_results, rows = self._chunks.results(self._wait().rows)
        for each, sampled, row in zip(self.batch, self.sampled, rows, strict=True):
            each.in_flight_tokens -= sampled
            if each.failed:
                continue
            if row.problem:
                each.failed = True
                self.step_results.append((each, NoToken(f"{each.handle.owner}: {row.problem}")))
            else:
                each.output_ids.extend(info.token_id for info in row.tokens)
                self.step_results.append((each, row.tokens))
        self.was_read = True
        self._pins.close()

    def undo(self, error: BaseException) -> None:
        """Drop the tokens of the pass; its `result` raises `error`. Waits for the device, then unpins the pages."""
        if self._error is None:
            self._error = error
            if not self._waited:
                # The device may still write to the pages.
                with contextlib.suppress(Exception):
                    self._wait()
            self._pins.close()


class InflightPasses:
    """Passes whose results the caller has not taken yet, oldest first: the read ones come before the unread ones."""

    def __init__(self) -> None:
        self.passes: deque[LaunchedPass] = deque()

    @property
    def unread(self) -> list[LaunchedPass]:
        """Passes that are not read yet."""
        return [launched for launched in self.passes if not launched.was_read]

    def add(self, launched: LaunchedPass) -> None:
        """Add the newest pass, and count its sampled tokens as in flight."""
        self.passes.append(launched)
        for each, sampled in zip(launched.batch, launched.sampled, strict=True):
            each.in_flight_tokens += sampled

    def read(self) -> LaunchedPass:
        """Read the oldest unread pass and return it; if it raises, all unread passes are undone."""
        oldest = self.unread[0]
        try:
            oldest.read()
        except BaseException as error:
            self.undo(error)
            raise
        return oldest

    def remove(self, launched: LaunchedPass) -> None:
        """Remove a pass whose result was returned, or that was undone."""
        if launched in self.passes:
            self.passes.remove(launched)

    def undo(self, error: BaseException) -> None:
        """Undo all unread passes; `error` becomes the error of the oldest one, and the cause of the others."""
        for index, launched in enumerate(self.unread):
            for each, sampled in zip(launched.batch, launched.sampled, strict=True):
                each.in_flight_tokens -= sampled
            cause = EngineError(f"undone, because a pass before it failed: {error}")
            launched.undo(cause if index else error)
            self.remove(launched)


def _check_parts(kv_format: KvFormat, layer: int, head_start: int, parts: Sequence[PartData]) -> int:
    """Check KV that is to be written; returns its number of tokens.

    `parts` must have each part of `kv_format` once, in any supported dtype. Raises CorruptFrame with the value that
    does not fit.
    """
    if not 0 <= layer < kv_format.layers:
        raise CorruptFrame(f"layer {layer}, expected one of {kv_format.layers}")
    if sorted(part.name for part in parts) != sorted(part.name for part in kv_format.parts):
        raise CorruptFrame(f"parts {[part.name for part in parts]}, expected {[p.name for p in kv_format.parts]}")
    expected = {part.name: part for part in kv_format.parts}
    leading = parts[0].shape[:2]
    for part in parts:
        rest = expected[part.name].shape[1:]
        if len(part.shape) != 2 + len(rest) or part.shape[:2] != leading or part.shape[2:] != rest:
            raise CorruptFrame(f"part {part.name}: shape {part.shape}, expected (tokens, heads, {rest})")
        if part.dtype not in DTYPE_BYTES:
            raise CorruptFrame(f"part {part.name}: dtype {part.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        size = math.prod(part.shape) * DTYPE_BYTES[part.dtype]
        if memoryview(part.data).nbytes != size:
            raise CorruptFrame(f"part {part.name}: {memoryview(part.data).nbytes} bytes, expected {size}")
    tokens, heads = leading
    if tokens < 1 or heads < 1 or head_start < 0 or head_start + heads > kv_format.heads:
        raise CorruptFrame(f"{tokens} tokens of heads [{head_start}, {head_start + heads}), expected {kv_format.heads}")
    return tokens


def _check_blocks(kv_format: KvFormat, payloads: Sequence[bytes | memoryview]) -> int:
    """Check payloads of prefix blocks; returns their number of tokens. Raises CorruptFrame if one has a wrong size."""
    if not payloads:
        raise CorruptFrame("no blocks, expected one or more")
    for index, payload in enumerate(payloads):
        if memoryview(payload).nbytes != kv_format.block_bytes:
            raise CorruptFrame(f"block {index}: {memoryview(payload).nbytes} bytes, expected {kv_format.block_bytes}")
    return len(payloads) * kv_format.block_size


def _check_range(name: str, value: range, limit: int) -> None:
    """Raise InvalidRequest unless `value` is a range of consecutive numbers within `[0, limit)`."""
    if value.step != 1 or not 0 <= value.start < value.stop <= limit:
        raise InvalidRequest(name, f"must be a range within [0, {limit})", value)
