"""The Engine: what services ask, turned into bookkeeping (KvManager) and plans (Executor).

    services ──▶ EngineCore ──▶ KvManager    pages, handles, cached blocks, slots
                     │ ForwardPlan
                     ▼
                 Executor ──▶ ModelRunner

It checks what comes in at the contract's edge (`baton.engine.contract`), pins the pages of whatever is under way, and
keeps the passes in flight. `baton.engine.factory` makes it over a model, `baton.engine.fake` over tokens computed by
hand.
"""

from __future__ import annotations

from collections import abc
from contextlib import ExitStack, contextmanager

from baton.engine.checks import check_blocks, check_parts, check_range
from baton.engine.contract import EngineSpec, KvHandle, OnLayer, PromptChunk
from baton.engine.executor import Executor, PassEnded
from baton.engine.inflight import InflightPasses, LaunchedPass, PassChunks
from baton.engine.kv_manager import KvManager
from baton.engine.plan import PlanResult, PromptInput, Row, RowResult
from baton.engine.sequence import Sequence
from baton.errors import CorruptFrame, EngineError, JoinFailed, NoToken
from baton.kv.cached_blocks import PrefixesChanged
from baton.kv.format import PartData
from baton.kv.pool import PageCopy, PageHandle, PoolStats
from baton.request import check_token_ids


class EngineCore:
    """Engine that runs on `executor` and `memory`."""

    def __init__(self, spec: EngineSpec, executor: Executor) -> None:
        self.executor = executor
        self.memory = executor.memory
        self._spec = spec
        self._kv = KvManager(spec)
        self._inflight = InflightPasses()
        self._stepping = False
        self._refused: list[tuple[Sequence, NoToken]] = []
        """Sequences that could not join, until a pass reports them."""

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def batch(self) -> list[Sequence]:
        """The sequences that have slots and are alive; for the engine thread."""
        return self._kv.batch

    def reserve(
        self, owner: str, tokens: int, prefix: abc.Sequence[bytes] = (), max_cached_tokens: int | None = None
    ) -> PageHandle:
        return self._kv.pool.reserve(owner, tokens, prefix, max_cached_tokens, self._copy)

    def evict_for(self, tokens: int, prefix: abc.Sequence[bytes] = (), max_cached_tokens: int | None = None) -> bool:
        return self._kv.pool.evict_for(tokens, prefix, max_cached_tokens)

    def publish(self, handle: KvHandle, digests: abc.Sequence[bytes]) -> None:
        self._kv.pool.publish(_page_handle(handle), digests)

    def match_prefix(self, digests: abc.Sequence[bytes]) -> int:
        return self._kv.pool.match_prefix(digests)

    def watch_prefixes(self, changed: PrefixesChanged | None) -> None:
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

    def launch(self, chunks: abc.Sequence[PromptChunk] = (), *, batch: bool = True) -> LaunchedPass:
        """Raises EngineError naming a sequence without room; then no sequence has moved."""
        if self._stepping:
            raise EngineError("a pass was launched while one that has a step was under way")
        ahead = self._spec.steps_ahead
        while True:
            self._read(0 if batch and self._kv.must_read_first else ahead)
            with ExitStack() as pins:
                own = PassChunks(chunks)
                rows = own.plan(lambda chunk, pins=pins: self._prompt_row(chunk, pins))  # type: ignore[misc]
                sequences = pins.enter_context(self._kv.pin_batch()) if batch else []
                own.step = bool(sequences)
                try:
                    wait = self._launch(rows, sequences, own.on_layer)
                except JoinFailed as error:
                    # No KV has changed, and the next plan resets what runs it: the others don't notice.
                    failed = next(each for each in sequences if each.slot == error.slot)
                    self._kv.remove(failed)
                    self._refused.append((failed, NoToken(f"{failed.handle.owner}: {error}")))
                    continue
                launched = LaunchedPass(own, sequences, wait, pins.pop_all(), self._take, self._refused)
                self._refused = []
            self._inflight.add(launched)
            if not ahead:
                self._read(0)
            return launched

    @property
    def in_flight(self) -> abc.Sequence[LaunchedPass]:
        return self._inflight.passes

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        """Raises InvalidRequest for a range that the handle does not have."""
        own, kv_format = _page_handle(handle), self._spec.kv_format
        with self._kv.pool.pin(own) as pages:
            check_range("layer", range(layer, layer + 1), kv_format.layers)
            check_range("tokens", tokens, len(pages) * self._spec.page_size)
            check_range("heads", heads, kv_format.heads)
            return self.memory.read(pages, layer, tokens, heads)

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: abc.Sequence[PartData]
    ) -> None:
        """Raises CorruptFrame for parts or ranges that don't fit the format or the handle."""
        count = check_parts(self._spec.kv_format, layer, head_start, parts)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self.memory.write(pages, layer, token_start, head_start, parts)

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        """Raises InvalidRequest for blocks that the handle does not have."""
        size = self._spec.kv_format.block_size
        with self._kv.pool.pin(_page_handle(handle)) as pages:
            tokens = range(token_start, token_start + count * size)
            check_range("tokens", tokens, len(pages) * self._spec.page_size)
            return self.memory.read_blocks(pages, token_start, size, count)

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: abc.Sequence[bytes | memoryview]) -> None:
        """Raises CorruptFrame for payloads that don't fit the format or the handle."""
        count = check_blocks(self._spec.kv_format, payloads)
        with self._written(handle, range(token_start, token_start + count)) as pages:
            self.memory.write_blocks(pages, token_start, self._spec.kv_format.block_size, payloads)

    def insert(self, sequence: Sequence) -> None:
        self._kv.insert(sequence, _page_handle(sequence.handle))

    def free(self, handle: KvHandle, digests: abc.Sequence[bytes] = ()) -> None:
        self._kv.pool.free(_page_handle(handle), digests)

    def stats(self) -> PoolStats:
        return self._kv.pool.stats()

    def heartbeat(self) -> int:
        return self.executor.heartbeat()

    def watch_pages(self, returned: abc.Callable[[], object] | None) -> None:
        self._kv.pool.watch(returned)

    def audit(self) -> dict[str, int]:
        return self._kv.pool.audit()

    def close(self) -> None:
        self._inflight.undo(EngineError("the engine was closed"))
        self._kv.forget_plans()
        self._kv.free_all()

    @contextmanager
    def _written(self, handle: KvHandle, tokens: range) -> abc.Iterator[abc.Sequence[int]]:
        """The handle's pages, pinned to write `tokens`; raises CorruptFrame if it does not have them all."""
        own = _page_handle(handle)
        if tokens.start < 0 or (own.alive and tokens.stop > own.capacity):
            raise CorruptFrame(f"tokens {tokens} of {own.owner}, which holds {own.capacity}")
        with self._kv.pool.pin(own, writes=tokens) as pages:
            yield pages

    def _copy(self, copy: PageCopy) -> None:
        self.memory.copy_page(copy.source, copy.target, copy.tokens)

    def _prompt_row(self, chunk: PromptChunk, pins: ExitStack) -> Row:
        """The row of a chunk, its pages pinned.

        Raises EngineError for a range that the handle does not have, InvalidRequest for an id outside the vocabulary.
        """
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
        self, rows: abc.Sequence[Row], batch: abc.Sequence[Sequence], on_layer: OnLayer | None
    ) -> abc.Callable[[], PlanResult]:
        if not rows and not batch:
            return lambda: PlanResult()
        self._stepping = bool(batch)
        try:
            return self.executor.launch(self._kv.plan(rows, batch), on_layer)
        except PassEnded:
            # It had no step, so it has changed nothing that the next plan builds upon.
            return lambda: PlanResult((RowResult(),) * len(rows))
        except BaseException:
            if batch:
                self._kv.forget_plans()
            raise
        finally:
            self._stepping = False

    def _read(self, keep: int) -> None:
        """Read the oldest passes, until `keep` are in flight; if one raises, it and the later ones are undone."""
        while len(self._inflight.unread) > keep:
            try:
                oldest = self._inflight.complete()
            except BaseException:
                self._kv.forget_plans()
                raise
            for sequence, found in oldest.found:
                if isinstance(found, NoToken):
                    self._kv.remove(sequence)

    def _take(self, launched: LaunchedPass) -> None:
        """Read passes up to this one, whose result is taken now."""
        while launched in self._inflight.unread:
            self._read(len(self._inflight.unread) - 1)
        self._inflight.take(launched)


def _page_handle(handle: KvHandle) -> PageHandle:
    if not isinstance(handle, PageHandle):
        raise EngineError(f"{handle.owner}: the handle is of another engine")
    return handle
