"""One attempt at one prompt: the request, its pages, its progress, and the stream of its events.

A job goes through the states of `baton.lifecycle`, each with a deadline. For its caller it ends once: the last event of
its stream is `Prefilled` or an error. A job with an export is HELD from then on, until the export ends.
`prefill_svc.worker` has the life of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from baton.engine.contract import EngineSpec, KvHandle, OnLayer, PromptChunk
from baton.errors import BatonError, DeadlineExceeded, EngineError, Overloaded, Unavailable
from baton.kv.prefix.contract import Hits
from baton.ledger import LedgerEntry
from baton.lifecycle import PREFILL_TOKEN_S, Lifecycle, State
from baton.request import (
    CachedTokens,
    CachePolicy,
    FirstToken,
    Handoff,
    Prefilled,
    PrefillProgress,
    PrefixSource,
    PromptLogprobs,
    SamplingParams,
    SequenceState,
    TokenInfo,
    finish_reason,
    join_ids,
)
from baton.rpc.channel import HEARTBEAT_S
from baton.transfer.export import Export
from prefill_svc.progress import PrefillEstimate
from prefill_svc.scheduler import ScheduledJob

PREPARING_S, _PREPARING_TOKEN_S = 120.0, 0.002
"""Longest wait for the first chunk in seconds, and the time that each token of the prompt adds to it, because cached
blocks are loaded during this wait. After that, the prompt should go to another worker or back to the router's queue."""

_PREFILLING_S = 60.0

_LOGPROBS_PER_MESSAGE = 256
"""Largest number of tokens and alternatives of prompt log-probabilities in one message. Such a message takes half a
millisecond to make and to read, and an event loop may handle several of them in one turn."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A router's request to prefill a prompt; `deadline` is in seconds on this process's monotonic clock, or None.

    `output_ids` are tokens that the client already has, if the request is replayed. `transfer_id` is empty if no decode
    worker fetches the KV. `peer_prefix` is a prefix of the prompt that a decode worker offers, or None. If `in_place`,
    this worker also decodes the prompt, and its reservation has the pages.
    """

    request_id: str
    attempt: int
    transfer_id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    choices: Sequence[int]
    params: SamplingParams
    tenant: bytes = b""
    cache_salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    peer_prefix: PrefixSource | None = None
    report_progress: bool = False
    in_place: bool = False
    deadline: float | None = None

    @property
    def reads(self) -> bool:
        """Whether cached KV may be used; not if log-probabilities of the prompt need every position computed."""
        return self.cache.reads and self.params.prompt_logprobs is None

    @property
    def uses_cache(self) -> bool:
        """Whether the request reads or writes caches, so that its blocks need digests."""
        return self.reads or self.cache.writes

    @property
    def name(self) -> str:
        """Its name in the ledger and in logs."""
        return f"{self.request_id}/{self.attempt}"

    def states(self) -> list[SequenceState]:
        """Make the state of each choice for the sampler."""
        return [SequenceState(self.params, self.prompt_ids, self.output_ids, choice) for choice in self.choices]


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive blocks of one tier."""

    tier: str
    blocks: range


@dataclass(eq=False, slots=True)
class PrefixState:
    """State of a job's cached blocks.

    digests         digests of the full blocks of the job's tokens
    looked_up_from  the block at which the look-up in the cache began; the pool had all blocks before it
    hits            blocks that the cache had, from block `looked_up_from` on
    load_plan       the part of `hits` that is loaded
    origins         (tier, tokens) pairs for the KV in the pages, in the order of the tokens
    to_save         for each block, whether the shared store should get it; empty unless the prompt is saved while it
                    is computed
    saved           number of leading blocks that need no more saving
    saving          the task that saves blocks
    """

    digests: Sequence[bytes] = ()
    looked_up_from: int = 0
    hits: Hits = field(default_factory=Hits)
    load_plan: list[TierRun] = field(default_factory=list)
    origins: list[tuple[str, int]] = field(default_factory=list)
    to_save: Sequence[bool] = ()
    saved: int = 0
    saving: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class PrefillJob:
    """An accepted request; used on the asyncio loop.

    The engine thread calls `check` and `chunk`, and reads `handle`, `token_ids`, `export` and `request` of a job that
    it computes. Threads that copy blocks call `is_active`.

    scheduled        the record of the job in the scheduler
    token_ids        prompt and output token ids; the last token is always computed
    lifecycle        its state, and the deadline of the state
    handle           the handle of its pages, None before they are allocated; a job in place has that of its reservation
    export           the export of its KV, None if no decode worker fetches it
    prefix           the state of its cached blocks; only `PrefixLoader` and `LongPromptSaver` change it
    computed_tokens  number of leading tokens whose KV is final
    computing_end    end of the chunk that the engine thread computes, or has computed last
    error            the error that stopped it, or None
    started          whether `serve_task` runs
    finished         whether the last event of its stream was added
    pages_ready      future that is done when the job has its pages
    chunk_assigned   future of the end of the next chunk; done when the job may use the engine
    serve_task       the task that serves the job until everything it held is free
    export_closed    set when nothing uses the export any more
    """

    request: PrefillRequest
    scheduled: ScheduledJob
    token_ids: Sequence[int]
    lifecycle: Lifecycle
    handle: KvHandle | None = None
    export: Export | None = None
    prefix: PrefixState = field(default_factory=PrefixState)
    computed_tokens: int = 0
    computing_end: int = 0
    error: BatonError | None = None
    started: bool = False
    finished: bool = False
    pages_ready: asyncio.Future[None] | None = None
    chunk_assigned: asyncio.Future[int] | None = None
    serve_task: asyncio.Task[None] | None = None
    export_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _estimate: PrefillEstimate | None = None
    _progress: PrefillProgress | None = None
    _unsent_logprobs: deque[TokenInfo] = field(default_factory=deque)
    _sent_logprobs: int = 0
    _outcome: Prefilled | BatonError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def create(cls, request: PrefillRequest, scheduled: ScheduledJob, now: float) -> PrefillJob:
        """Make the job of a request that was just admitted; `now` is on the monotonic clock."""
        deadline = math.inf if request.deadline is None else request.deadline
        ids = join_ids(request.prompt_ids, request.output_ids)
        limit_s = PREPARING_S + _PREPARING_TOKEN_S * len(ids)
        return cls(request, scheduled, ids, Lifecycle(State.PREPARING, now, request_deadline=deadline, limit_s=limit_s))

    def start(self, now: float) -> None:
        """Enter PREFILLING, when the first chunk begins."""
        self.lifecycle.enter(State.PREFILLING, now, _PREFILLING_S + PREFILL_TOKEN_S * len(self.token_ids))
        if self.request.report_progress:
            self._estimate = PrefillEstimate(len(self.token_ids))
            self.report_progress(now)

    def report_progress(self, now: float) -> None:
        """Add the progress to the stream if the caller wants it; it replaces an older one that was not sent yet."""
        if self._estimate is not None and (progress := self._estimate.record(self.computed_tokens, now)) is not None:
            self._progress = progress
            self._changed.set()

    def add_prompt_logprobs(self, tokens: Sequence[TokenInfo]) -> None:
        """Add log-probabilities of the next tokens of the prompt to the stream, if they were asked for."""
        if self.request.params.prompt_logprobs is None:
            return
        if not self._sent_logprobs and not self._unsent_logprobs:
            self._unsent_logprobs.append(TokenInfo(self.token_ids[0]))
        left = len(self.request.prompt_ids) - self._sent_logprobs - len(self._unsent_logprobs)
        self._unsent_logprobs.extend(tokens[:left])
        self._changed.set()

    @property
    def allocated_handle(self) -> KvHandle:
        """The handle of its pages; raises EngineError before the pages are allocated."""
        if self.handle is None:
            raise EngineError(f"{self.request.name} has no pages")
        return self.handle

    @property
    def readable_digests(self) -> Sequence[bytes]:
        """The digests of the blocks that it may take from a cache; empty if its request does not read caches."""
        return self.prefix.digests if self.request.reads else ()

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that were not computed.

        The last token is always computed, because the next one is sampled from it.
        """
        return min(sum(tokens for _, tokens in self.prefix.origins), len(self.token_ids) - 1)

    def cached_by_tier(self) -> CachedTokens:
        """Number of prompt tokens that were not computed, by the tier that they came from."""
        return CachedTokens(**count_by_tier(self.prefix.origins, min(self.cached_tokens, len(self.request.prompt_ids))))

    def chunk(self, start: int, end: int, on_layer: OnLayer | None) -> PromptChunk:
        """Make the chunk of its tokens `[start, end)`; the last one samples a token of each choice."""
        states = self.request.states() if end == len(self.token_ids) else ()
        return PromptChunk(
            self.allocated_handle, self.token_ids, start, end, on_layer, states, self.request.params.prompt_logprobs
        )

    def is_active(self) -> bool:
        """Whether the job is neither aborted nor late; may be called from any thread."""
        return self.error is None and not self.lifecycle.is_overdue(time.monotonic())

    def check(self) -> None:
        """Raise if the job was aborted or the deadline of its state has passed; may be called from any thread."""
        if self.error is not None:
            raise self.error
        if self.lifecycle.is_overdue(time.monotonic()):
            raise overdue_error(self)

    def finish(self, outcome: Prefilled | BatonError) -> None:
        """Add the last event to the stream, once."""
        self.finished = True
        self._outcome = outcome
        self._changed.set()

    async def events(self) -> AsyncIterator[Prefilled | PrefillProgress | PromptLogprobs | None]:
        """Yield progress, prompt log-probabilities in parts, and `Prefilled` as soon as it is known.

        Such parts may follow `Prefilled`. After HEARTBEAT_S seconds without an event, None is yielded. Raises
        the error that ended the job.
        """
        done = False
        while not (done and not self._unsent_logprobs):
            if self._outcome is None and not self._unsent_logprobs:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._changed.wait()
                self._changed.clear()
            progress, self._progress = self._progress, None
            if progress is not None:
                yield progress
            elif isinstance(self._outcome, BatonError):
                raise self._outcome
            elif self._outcome is not None and not done:
                done = True
                yield self._outcome
            else:
                yield self._take_logprobs() if self._unsent_logprobs else None

    def _take_logprobs(self) -> PromptLogprobs:
        """The next part, small enough to become a message without holding the event loop."""
        start, entries, tokens = self._sent_logprobs, 0, list[TokenInfo]()
        while self._unsent_logprobs and entries < _LOGPROBS_PER_MESSAGE:
            tokens.append(self._unsent_logprobs.popleft())
            entries += 1 + len(tokens[-1].top)
        self._sent_logprobs += len(tokens)
        return PromptLogprobs(start, tokens)


def count_by_tier(sources: Sequence[tuple[str, int]], limit: int) -> dict[str, int]:
    """Count the first `limit` tokens of (tier, tokens) pairs by tier; tiers are fields of `CachedTokens`."""
    counts: dict[str, int] = {}
    for tier, tokens in sources:
        counts[tier] = counts.get(tier, 0) + min(tokens, limit)
        limit -= min(tokens, limit)
    return counts


def make_result(
    job: PrefillJob, tokens: Sequence[TokenInfo], eos_token_ids: frozenset[int]
) -> tuple[Handoff, Prefilled]:
    """Make the handoff for decode and the result for the router; `tokens` has one sampled token for each choice."""
    request, cached = job.request, job.cached_by_tier()
    first_tokens = tuple(
        FirstToken(choice, token, finish_reason(request.params, [*request.output_ids, token.token_id], eos_token_ids))
        for choice, token in zip(request.choices, tokens, strict=True)
    )
    handoff = Handoff(
        request.request_id,
        request.attempt,
        request.prompt_ids,
        request.output_ids,
        request.params,
        first_tokens,
    )
    return handoff, Prefilled(first_tokens, cached.total, cached)


def overdue_error(job: PrefillJob) -> BatonError:
    """The error of a job whose deadline has passed: the request's own deadline, or the limit of the state."""
    done = f"{job.computed_tokens} of {len(job.token_ids)} tokens prefilled"
    if job.lifecycle.is_request_deadline():
        return DeadlineExceeded(f"the deadline passed with {done}")
    if job.lifecycle.state is State.PREPARING:
        limit_s = job.lifecycle.deadline - job.lifecycle.since
        return Overloaded(f"no chunk of the prompt was computed within {limit_s:.3g} s", retry_after=1.0)
    return Unavailable(f"the prefill was given up with {done}")


def ledger_entries(jobs: Iterable[PrefillJob], spec: EngineSpec, now: float) -> list[LedgerEntry]:
    """Make one ledger entry for each job that runs or holds pages; `now` is a time on the jobs' clock."""
    return [_ledger_entry(job, spec, now) for job in dict.fromkeys(jobs)]


def _ledger_entry(job: PrefillJob, spec: EngineSpec, now: float) -> LedgerEntry:
    pages = spec.pages_for(len(job.token_ids)) if job.handle is not None and not job.request.in_place else 0
    kind, state, deadline_s, detail = "kv", job.lifecycle.state, job.lifecycle.deadline - now, ""
    if job.finished:
        kind, state, deadline_s, detail = _describe_finished(job)
    elif job.request.transfer_id:
        detail = f"transfer {job.request.transfer_id}"
    return LedgerEntry(
        job.request.name,
        kind,
        state.value,
        pages,
        pages * spec.page_size * spec.kv_format.token_bytes,
        now - job.lifecycle.since,
        None if math.isinf(deadline_s) else deadline_s,
        detail=detail,
    )


def _describe_finished(job: PrefillJob) -> tuple[str, State, float, str]:
    """Kind, state, seconds until the deadline, and detail of a finished job whose pages are still in use."""
    if job.export is None or job.export.closed:
        return "kv", State.ENDED, math.inf, "cached blocks on their way"
    detail = f"transfer {job.request.transfer_id}"
    if job.export.ended:
        return "draining", State.ENDED, math.inf, detail
    return "export", job.lifecycle.state, job.export.lease_left, detail
