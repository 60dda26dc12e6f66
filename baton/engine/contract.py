"""The engine contract: what prefill and decode ask of a model runtime.

    reserve ── launch chunks × n ── read_kv ── free               on a prefill worker
    reserve ── write_kv × n ── insert ── launch × n ── free       on a decode worker

A `KvHandle` is the right to the pages that hold one sequence's KV. A page is free, or cached, or in use. The reference
count of a page in use is the number of handles that list it. Only the engine thread may use `insert`, `launch`,
`in_flight` and the `result` of a pass; `close` is called when it has ended. Any thread may call all other methods.
`free` may be called at any time: later calls with the handle fail at once, and its pages return to the pool when the
reads, writes and forward passes that use them have ended. `watch_pages` reports each return, so waiting for pages needs
no polling.

One forward pass computes chunks of prompts, a step of the generation batch, or both. Steps may be launched while the
results of `spec.steps_ahead` passes before them are unread: a step takes each sequence's last token from device memory,
where the step before left it. So a sequence that ends in an unread step is also part of the next step. It must have
room for that step's token, which is dropped with the freed handle, and its pages return when that step has been read.
Tokens are the same as without steps ahead. If a step depends on all tokens before it (penalties), `launch` waits for
them first.

Implementation: `baton.engine.core`, over a model (`baton.engine.factory`) or over tokens computable by hand
(`baton.engine.fake`); one contract suite runs over both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from baton.errors import EngineError, NoToken
from baton.kv.format import KvFormat, PartData
from baton.request import SequenceState, TokenInfo

if TYPE_CHECKING:
    # Routers load this module, and have no numpy.
    from baton.kv.cached_blocks import PoolBlocksChanged
    from baton.kv.pool import PoolStats


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Properties that do not change while an engine lives.

    `steps_ahead` is the largest number of passes that may be in flight when a step is launched; it is 0 if `launch`
    returns only when the tokens are known. The last `host_pages` of the `pages` pages are in host memory. The KV in
    them is copied to the device while a chunk is computed; a chunk of at least `min_overlap_chunk` tokens takes as long
    as the copies.
    """

    fingerprint: str
    kv_format: KvFormat
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    page_size: int
    pages: int
    slots: int
    steps_ahead: int = 0
    host_pages: int = 0
    min_overlap_chunk: int = 0

    @property
    def device_pages(self) -> int:
        """Pages on the device: those with the lowest numbers."""
        return self.pages - self.host_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


def min_overlap_chunk(flops_per_s: float, bytes_per_s: float, group: int, kv_bits: float) -> int:
    """Number of tokens of the shortest chunk whose attention takes as long as the copy of the KV that it reads.

    `flops_per_s` is the rate of attention, `bytes_per_s` that of the copy; `kv_bits` are those of an element of KV. A
    key and a value of one KV head and `d` elements are `2 d kv_bits / 8` bytes to copy. For each token of the chunk
    they cost 4 d operations (two products) for each of the `group` query heads that share the KV head. So d and the
    length of the context cancel: chunk = flops_per_s / bytes_per_s * kv_bits / 8 / (2 group).
    """
    return math.ceil(flops_per_s / bytes_per_s * kv_bits / (16 * group))


class KvHandle(Protocol):
    """The right to the pages of one sequence."""

    @property
    def owner(self) -> str:
        """Name of its owner, for the ledger; it begins with "request/attempt", except for the worker's own prompt."""

    @property
    def capacity(self) -> int:
        """Tokens for which it has pages."""

    @property
    def alive(self) -> bool:
        """False from the moment `free` is called."""

    @property
    def cached_tokens(self) -> int:
        """Leading tokens whose KV was cached when the pages were reserved."""

    @property
    def in_host(self) -> bool:
        """Whether some of its pages are in host memory."""


class EngineSequence:
    """A choice that is decoded, from `Engine.insert` until its handle is freed; the engine thread owns it.

    `output_ids` are its tokens so far; `state` shows them too. The engine appends those of each pass that is read.
    """

    __slots__ = ("failed", "handle", "in_flight_tokens", "output_ids", "planned_pages", "slot", "state")

    def __init__(self, handle: KvHandle, state: SequenceState) -> None:
        """`state` is copied."""
        self.handle = handle
        self.output_ids = list(state.output_ids)
        self.state = replace(state, output_ids=self.output_ids)
        self.in_flight_tokens = 0
        """Tokens that are sampled for it by passes in flight."""
        self.slot = -1
        self.planned_pages: int | None = None
        """Number of its pages that plans have sent; None before its Join."""
        self.failed = False
        """Whether it got no token in a pass: it has left, and its tokens of later passes mean nothing."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output whose values are known."""
        return self.state.length

    @property
    def next_positions(self) -> range:
        """Positions at which the next step writes KV: that of the newest token, which may be on the device only."""
        newest = len(self.state.prompt_ids) + len(self.output_ids) - 1 + self.in_flight_tokens
        return range(newest, newest + 1)


OnLayer = Callable[[int], None]
"""Called with the index of a layer when the chunk's KV of that layer is final. If it raises, the chunk ends.

In a pipeline it is called for all layers when the pass has ended, so the pass can't be shortened.
"""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `[start, end)` of a prompt, whose KV is to be computed in all layers.

    KV of `[0, start)` must be in the handle's pages already. With `on_layer`, the pass stops after each layer to call
    it; a pipeline calls it for all layers at the end of the pass. For each state of `sample` one token is sampled after
    position `end - 1`.

    With `prompt_logprobs`, the pass also computes the log-probability of the token after each position, with that many
    alternatives. This is done in parts. After each part, the `on_layer` of each chunk of the pass is called again with
    the last layer, because a part may take longer than a layer.
    """

    handle: KvHandle
    token_ids: Sequence[int]
    start: int
    end: int
    on_layer: OnLayer | None = None
    sample: Sequence[SequenceState] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of a chunk.

    `tokens` has one entry for each sampled state. `prompt_logprobs` has one entry for each position `p` of the chunk
    whose successor `token_ids[p + 1]` is known: that successor with its log-probability.
    """

    tokens: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class PassResult:
    """The results of a forward pass, chunk by chunk and sequence by sequence.

    A chunk has its result, or its error: NoToken for logits that are not finite, what its `on_layer` raised, or why it
    can't be computed. A sequence that was in the batch and was not freed since has 0..k tokens. One whose logits are
    not finite, or that could not join the batch, has NoToken instead: it has left the batch and its slot, and the
    caller must `free` it. An error of one does not affect the others.
    """

    chunks: Sequence[ChunkResult | Exception] = ()
    sequences: Sequence[tuple[EngineSequence, tuple[TokenInfo, ...] | NoToken]] = ()


class ForwardPass(Protocol):
    """A pass in flight; the pages of its sequences stay allocated until it is read, by `result` or by a later launch.

    `launched_at` is for the caller: when it was launched, on the caller's clock. `batch`: the sequences of its step.
    """

    launched_at: float

    @property
    def batch(self) -> Sequence[EngineSequence]: ...

    def result(self) -> PassResult:
        """Wait for the pass.

        If the pass itself failed, this raises. Then passes launched after it are undone and raise too, and all
        sequences are as they were before it.
        """


class Engine(Protocol):
    """A model runtime with one paged KV pool and one generation batch."""

    @property
    def spec(self) -> EngineSpec:
        """Properties that do not change."""

    def reserve(
        self, owner: str, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None
    ) -> KvHandle:
        """Allocate pages for `tokens` tokens; raises OutOfPages, and then allocates nothing.

        `prefix` are digests of leading full blocks (`baton.kv.hashing`). The new handle contains the longest run of
        them that is cached, up to `max_cached_tokens` (all by default); `handle.cached_tokens` is its length. A unit is
        lcm(page size, block size) tokens. Pages of full units are shared and can't be written. A last unit that is
        needed in part is copied, so that the tokens after the cached ones can be written.
        """

    def evict_for(self, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None) -> bool:
        """Evict a slice of the cached blocks that `reserve` would evict with these arguments, but none of `prefix`.

        True if `reserve` would evict more. If it would raise OutOfPages, nothing is evicted. A long sequence may
        replace the blocks of thousands of others, which takes many milliseconds: a caller may yield after each slice.
        """

    def share_prefix(self, handle: KvHandle, prefix: Sequence[bytes], max_tokens: int) -> int:
        """Let a handle without KV of its own share pages of blocks that were cached since it was reserved.

        These are the full units (as for `reserve`) of the longest cached run of `prefix`, up to `max_tokens` tokens.
        They take the place of its own pages, which return to the pool. Returns the number of tokens in shared pages.
        If the handle is dead or in use, or if one of the pages to be replaced is shared or published, returns 0, and
        nothing changes.
        """

    def publish(self, handle: KvHandle, digests: Sequence[bytes]) -> None:
        """Cache the handle's leading full blocks, whose KV is final, under these digests, so that `reserve` finds them.

        Only blocks of full units (as for `reserve`) are cached. They can't be written any more. They stay cached when
        the handle is freed, until their pages are evicted: least recently used first, and the end of a chain before its
        beginning. Idempotent; a dead handle is ignored.
        """

    def match_prefix(self, digests: Sequence[bytes]) -> int:
        """Number of tokens of the leading blocks that are cached now."""

    def watch_prefixes(self, changed: PoolBlocksChanged | None) -> None:
        """Call `changed(stored, dropped)` with the digests of blocks that are cached from now on, or no longer.

        `dropped` is None if all are. Calls come in the order of events, from any thread, with the pool's lock held:
        `changed` must be quick, not raise, and not call the engine. Blocks that are cached already are reported at
        once. There is one watcher; None removes it.
        """

    def drop_cached(self) -> int:
        """Forget all cached blocks; returns the number of pages that this frees: those that no handle uses.

        Pages that handles use return when the handles are freed, unless they are published again.
        """

    def uncache(self, handle: KvHandle) -> None:
        """Forget the cached blocks in the handle's pages, and all that follow them; a dead handle is ignored.

        Call it for a sequence that got no token: the cause may be KV in pages that other sequences would share.
        """

    def extend(self, handle: KvHandle, tokens: int) -> None:
        """Grow the handle's capacity to at least `tokens`; raises OutOfPages, and then changes nothing."""

    def fork(
        self, handle: KvHandle, owner: str, shared_tokens: int, tokens: int, spare: KvHandle | None = None
    ) -> KvHandle:
        """A new handle of capacity `tokens` whose first `shared_tokens` have the same KV as `handle`.

        Full pages are shared; the last page is copied if it is partly filled. The new handle takes over the pages of
        `spare`, an unused handle, which this frees; no other caller can get them in between. Raises OutOfPages, and
        then changes nothing, if these and the free pages are too few.
        """

    def launch(self, chunks: Sequence[PromptChunk] = (), *, step: bool = True) -> ForwardPass:
        """Launch one forward pass: over `chunks` of prompts, and with `step` a step of the generation batch.

        A step samples the next tokens of all sequences that have slots. The handle of each must have room for its
        `next_positions` (`extend` first). When the pass is read, the sampled tokens are appended to the sequences; the
        caller ends a sequence (`free`).

        Errors of the pass are raised here or by its `result`; without steps ahead, here. If a pass before this one
        fails when it is read here, its error is raised, and nothing is launched. A chunk that can't be computed,
        because its handle was freed or an id is outside the vocabulary, fails alone, in its result. A chunk's
        `on_layer` may launch passes of other handles, unless the pass that calls it has a step. If it raises, the chunk
        ends; the pass ends too, unless it has other chunks or a step.
        """

    @property
    def in_flight(self) -> Sequence[ForwardPass]:
        """The passes whose results were not returned yet, oldest first, without those that were undone."""

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        """Copy the parts of one layer, each contiguous `[tokens, heads, ...]`."""

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Copy the parts of one layer into the handle's pages, and convert their element types if they differ."""

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        """Copy the payloads (`baton.kv.format`) of `count` prefix blocks from token `token_start` on."""

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: Sequence[bytes | memoryview]) -> None:
        """Copy the payloads of consecutive prefix blocks into the handle's pages, from token `token_start` on.

        Nothing is converted: a block's name contains the digest of `spec.kv_format`, so its element types are the same.
        """

    def insert(self, sequence: EngineSequence) -> None:
        """Give the sequence a slot; all its tokens but the last must have KV. Raises Overloaded if no slot is free."""

    def free(self, handle: KvHandle, digests: Sequence[bytes] = ()) -> None:
        """Free the handle, in any state; idempotent.

        Blocks with `digests` stay cached, as after `publish`. This includes the last ones, which do not fill a unit of
        pages, because nothing is written after them any more. `reserve` copies these.
        """

    def stats(self) -> PoolStats:
        """Count pages."""

    def work_counter(self) -> int:
        """Number that changes while the engine computes, also within a layer if the kernels count their work.

        It stays the same while there is no work, and while a kernel hangs.
        """

    def watch_pages(self, returned: Callable[[], object] | None) -> None:
        """Call `returned` when pages have returned to the pool, from any thread, without a lock.

        It must be quick and not raise. There is one watcher; None removes it.
        """

    def watch_failure(self, failed: Callable[[EngineError], object]) -> None:
        """Call `failed`, from any thread, when the engine can't compute any more, because another process has died.

        It must be quick and not raise. There is one watcher.
        """

    def audit(self) -> dict[str, int]:
        """Check that pages are conserved, and return pages by owner. Raises EngineError with the ledger."""

    def close(self) -> None:
        """Free everything."""


def compute_chunk(engine: Engine, chunk: PromptChunk) -> ChunkResult:
    """Compute one chunk in a pass of its own. Raises what the chunk or the pass raised."""
    (result,) = engine.launch((chunk,), step=False).result().chunks
    if not isinstance(result, Exception):
        return result
    try:
        raise result
    finally:
        # Its traceback has this frame, which would keep it until garbage is collected.
        del result
