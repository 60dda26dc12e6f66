"""The engine contract: what prefill and decode ask of a model runtime.

    reserve ── prefill_chunk × n ── read_kv ── free            on a prefill worker
    reserve ── write_kv × n ── insert ── step × n ── free      on a decode worker
                                  └ pause ── resume ┘

A `KvHandle` is the right to the pages that hold one sequence's KV. Every page is free, cached, or its reference
count equals the handles that list it. `prefill_chunk`, `insert`, `step`, its `result`, `pause` and `resume` may be
called from the one engine thread; `reserve`, `publish`, `match_prefix`, `drop_cached`, `extend`, `fork`, `read_kv`,
`write_kv`, `read_blocks`, `write_blocks`, `free` and whatever only looks from any. `free` may come at any time: the
handle is dead at once for every later call, and its pages return to the pool when the reads, writes and forward passes
in flight on them have drained. `watch_pages` tells of each return, so that nobody who waits for pages has to ask again
and again.

A step may be launched while `spec.steps_ahead` others are unread: it takes each sequence's last token from where the
step before left it. So a sequence that ends with an unread step is in the next one too. It has to have room there, its
token there is dropped with the freed handle, and its pages return when that step has been read. Tokens are the same
as without steps ahead. Where a step depends on all tokens before it (penalties), `step` waits for them first.

Implementation: `baton.engine.core`, over a model (`baton.engine.factory`) or over tokens computable by hand
(`baton.engine.fake`); one contract suite runs over both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import NoToken
from baton.kv.format import KvFormat, PartData
from baton.kv.pool import PoolStats
from baton.request import SequenceState, TokenInfo


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What does not change while an engine lives.

    `steps_ahead`: steps that are still in flight, at most, when one more may be launched; 0 for an engine whose `step`
    returns when the tokens are there.
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

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


class KvHandle(Protocol):
    """The right to the pages of one sequence."""

    @property
    def owner(self) -> str:
        """Who holds it, for the ledger: "request/attempt" or "request/attempt/choice"."""

    @property
    def capacity(self) -> int:
        """Tokens that its pages hold."""

    @property
    def alive(self) -> bool:
        """False from the moment `free` is called."""

    @property
    def cached(self) -> int:
        """Leading tokens whose KV was there when the pages were reserved."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk yielded.

    `tokens` has one entry for each sampled state. `prompt_logprobs` has one entry for each position `p` of the chunk
    whose successor `token_ids[p + 1]` is known: that successor with its log-probability.
    """

    tokens: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()


class StepHandle(Protocol):
    """A step in flight; its sequences' pages stay theirs until it is read, by `result` or by a later call."""

    def result(self) -> list[tuple[KvHandle, tuple[TokenInfo, ...] | NoToken]]:
        """Wait for the step; 0..k tokens for each sequence that was in the batch and not freed since.

        A sequence whose logits are not finite gets NoToken in their place, and has left the batch: it takes no slot,
        and its pages are the caller's to `free`. The others are not concerned.

        If the step failed, this raises, steps launched after it are undone and raise as well, and no sequence has
        moved since the step before it.
        """


class Engine(Protocol):
    """A model runtime with one paged KV pool and one generation batch."""

    @property
    def spec(self) -> EngineSpec:
        """What does not change."""

    def reserve(
        self, owner: str, tokens: int, prefix: Sequence[bytes] = (), max_cached_tokens: int | None = None
    ) -> KvHandle:
        """Take pages for `tokens` tokens; raises OutOfPages and takes nothing if they are not there.

        `prefix` are digests of leading full blocks (`baton.kv.hashing`). The longest run of them that was published
        and not evicted since is in the new handle from the start, of which `handle.cached` tells the tokens: at most
        `max_cached_tokens` (all by default). Full units of pages are shared and can't be written; of the last one,
        whose beginning alone is wanted, there is a copy, so that what follows the cached tokens can be written.
        """

    def publish(self, handle: KvHandle, digests: Sequence[bytes]) -> None:
        """Name the handle's leading full blocks, whose KV is final, so that `reserve` finds them.

        Blocks are named as far as they fill whole pages together, in units of lcm(page size, block size) tokens. They
        can't be written any more. They stay when the handle is freed, until their pages are wanted: least recently
        used first, and the end of a chain before its beginning. Idempotent; a dead handle is ignored.
        """

    def match_prefix(self, digests: Sequence[bytes]) -> int:
        """Tokens of the leading blocks that `reserve` would find now."""

    def watch_prefixes(self, changed: Callable[[Sequence[bytes], Sequence[bytes]], object] | None) -> None:
        """Call `changed(stored, dropped)` with the digests of blocks that `reserve` finds from now on, or no longer.

        In the order of events, with the pool's lock held, from any thread: it must be quick, not raise, and not call
        the engine. Blocks that are there already are told at once. There is one watcher; None ends it.
        """

    def drop_cached(self) -> int:
        """Forget all published blocks; returns the pages that are free now because of it: those that no handle uses.

        The others' pages return with their handles, unless these publish them anew.
        """

    def retract(self, handle: KvHandle) -> None:
        """Forget the published blocks in the handle's pages, and all that follow them; a dead handle is ignored.

        For a sequence without a token: what spoiled it may lie in pages that others would share.
        """

    def extend(self, handle: KvHandle, tokens: int) -> None:
        """Grow the handle's capacity to at least `tokens`; raises OutOfPages and changes nothing if it can't."""

    def fork(
        self, handle: KvHandle, owner: str, shared_tokens: int, tokens: int, spare: KvHandle | None = None
    ) -> KvHandle:
        """A new handle of capacity `tokens` whose first `shared_tokens` have the same KV as `handle`.

        Full pages are shared; the last, partly filled one is copied. The new handle takes over the pages of `spare`,
        a handle that nothing was written to and that dies of it, in one go: nobody else can have them in between.
        Raises OutOfPages, changing nothing, when these and the free ones are too few.
        """

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
        """Compute the KV of `token_ids[start:end]` through all layers; `[0, start)` must be there already.

        `on_layer(layer)` is called once the chunk's KV of that layer is final and readable; what it raises ends the
        chunk and is passed on. `sample` asks for one token after position `end - 1` for each of the states.
        `prompt_logprobs` asks for the log-probability of each successor with that many alternatives, and for a call
        of `on_layer` with the last layer after each part of them, since they may take longer than the layers. Raises
        NoToken for logits that are not finite.
        """

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        """Copy out one layer's parts as contiguous `[tokens, heads, ...]`."""

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        """Copy one layer's parts into the handle's pages, converting element types where they differ."""

    def read_blocks(self, handle: KvHandle, token_start: int, count: int) -> list[bytes]:
        """Copy out the payloads (`baton.kv.format`) of `count` prefix blocks from token `token_start` on."""

    def write_blocks(self, handle: KvHandle, token_start: int, payloads: Sequence[bytes | memoryview]) -> None:
        """Copy the payloads of consecutive prefix blocks into the handle's pages, from token `token_start` on.

        Nothing is converted: the digest of `spec.kv_format` is in every block's name, so its element types are ours.
        """

    def insert(self, handle: KvHandle, state: SequenceState) -> None:
        """Give the sequence a slot; KV must cover all but the last of its tokens. Raises Overloaded without a slot."""

    def step(self) -> StepHandle:
        """Launch one forward pass over the batch, which samples the next tokens.

        Each sequence's handle must have room for one more token (`extend` first), and for one of each unread step that
        it is in. What goes wrong is raised here or by the handle's `result`; without steps ahead, here. The engine
        appends what it samples to its own copy of the output ids; ending a sequence is the caller's part (`free`).
        """

    def pause(self, handle: KvHandle) -> None:
        """Move a running sequence's KV to host memory, and give back its slot and pages.

        Raises Overloaded, changing nothing, when the host pool has no room.
        """

    def resume(self, handle: KvHandle) -> None:
        """Undo `pause`; raises OutOfPages or Overloaded, changing nothing, without pages or a slot."""

    def free(self, handle: KvHandle, digests: Sequence[bytes] = ()) -> None:
        """Give up the handle in whatever state it is; idempotent.

        It leaves the blocks that `digests` name, as if they were published: also those that don't fill a unit of pages,
        since nothing is written behind them any more. `reserve` gives copies of these.
        """

    def stats(self) -> PoolStats:
        """Count pages."""

    def host_kv(self) -> dict[str, int]:
        """Bytes of host memory by owner, of the paused sequences."""

    def watch_pages(self, returned: Callable[[], object] | None) -> None:
        """Call `returned` each time that pages have come back to the pool, from whichever thread brought them, with
        no lock held: it must be quick and not raise. There is one watcher; None ends it."""

    def audit(self) -> dict[str, int]:
        """Check that pages and host memory are conserved, and return pages by owner (0 for a paused sequence).

        Raises EngineError with the ledger.
        """

    def close(self) -> None:
        """Free all."""
