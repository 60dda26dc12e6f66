"""One attempt at one prompt: what was asked, what it holds, and the stream of what happens to it.

A job goes through the states of `baton.lifecycle`, each with a deadline. It ends once for its caller, with
`PrefillDone` or an error as the last event of its stream; one with an export is HELD from then on, until the export
ends. `prefill_svc.worker` has its life.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from baton.engine.contract import KvHandle
from baton.errors import BatonError, DeadlineExceeded, EngineError, Overloaded, Unavailable
from baton.kv.prefix.contract import Hits
from baton.lifecycle import Lifecycle, State
from baton.request import (
    CachedTokens,
    CachePolicy,
    FirstToken,
    Handoff,
    SamplingParams,
    SequenceState,
    TokenInfo,
    finish_reason,
)
from baton.transfer.export import Export
from baton.transfer.remote import PrefixSource
from prefill_svc.plan import Run
from prefill_svc.scheduler import Prompt

PROGRESS_S = 1.0
"""Longest silence of a job that is alive."""

QUEUED_S = 120.0
"""Longest wait for the first chunk; what waits longer is better off at another worker, or in the router's line."""

_PREFILLING_S, _PREFILLING_TOKEN_S = 60.0, 0.1


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """What a router asks for; `deadline` is on this process's monotonic clock, in seconds.

    `output_ids` are tokens that the client has already: a replay. `transfer_id` is empty when no decode
    follows. `source` is where a prefix may be had if no cache has it.
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
    source: PrefixSource | None = None
    deadline: float | None = None

    @property
    def reads(self) -> bool:
        """Whether cached KV may be used: log-probabilities of the prompt need every position computed."""
        return self.cache.reads and self.params.prompt_logprobs is None

    @property
    def uses_cache(self) -> bool:
        """Whether its blocks need names."""
        return self.reads or self.cache.writes

    @property
    def name(self) -> str:
        """For the ledger and for logs."""
        return f"{self.request_id}/{self.attempt}"

    def states(self) -> list[SequenceState]:
        """What the sampler must know of each choice."""
        return [SequenceState(self.params, self.prompt_ids, self.output_ids, choice) for choice in self.choices]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`computed` of `total` tokens have final KV; `cached` prompt tokens came from the prefix cache."""

    computed: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The end of a prefill; `prompt_tokens` is empty unless log-probabilities were asked for."""

    first_tokens: tuple[FirstToken, ...]
    cached: CachedTokens
    prompt_tokens: tuple[TokenInfo, ...]


@dataclass(eq=False, slots=True)
class Job:
    """An accepted task; belongs to the asyncio loop, but for `check`.

    `entry` is the prompt as the scheduler knows it, `handle` the right to its pages. `digests` name the full blocks of
    `ids`; `hits` are those that the cache had from block `searched_from` on, and `plan` is what of them is loaded.
    `sources` tells where the KV in the pages came from, as (tier, tokens) one after the other. The first `computed`
    tokens have final KV; with the chunk that is on the engine thread, or was last, `computing` have. `turn` is what the
    job waits for: its pages, or the end of its next chunk. `begun` says that its coroutine runs, `over` that the stream
    has its last event.
    """

    task: PrefillTask
    entry: Prompt
    ids: Sequence[int]
    life: Lifecycle
    handle: KvHandle | None = None
    export: Export | None = None
    digests: Sequence[bytes] = ()
    searched_from: int = 0
    hits: Hits = field(default_factory=Hits)
    plan: list[Run] = field(default_factory=list)
    sources: list[tuple[str, int]] = field(default_factory=list)
    computed: int = 0
    computing: int = 0
    prompt_tokens: list[TokenInfo] = field(default_factory=list)
    error: BatonError | None = None
    begun: bool = False
    over: bool = False
    turn: asyncio.Future[int] | None = None
    running: asyncio.Task[None] | None = None
    export_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _events: asyncio.Queue[PrefillProgress | PrefillDone | BatonError] = field(default_factory=asyncio.Queue)

    @classmethod
    def of(cls, task: PrefillTask, entry: Prompt, now: float) -> Job:
        """The job of a task that was just admitted."""
        deadline = math.inf if task.deadline is None else task.deadline
        life = Lifecycle(State.QUEUED, now, request_deadline=deadline, limit_s=QUEUED_S)
        return cls(task, entry, [*task.prompt_ids, *task.output_ids], life)

    def start(self, now: float) -> None:
        """The first chunk begins."""
        self.life.enter(State.PREFILLING, now, _PREFILLING_S + _PREFILLING_TOKEN_S * len(self.ids))

    @property
    def pages(self) -> KvHandle:
        """Its handle; raises EngineError before it has one."""
        if self.handle is None:
            raise EngineError(f"{self.task.name} has no pages")
        return self.handle

    @property
    def found(self) -> int:
        """Tokens that were not computed; the last token always is, to sample from."""
        return min(sum(tokens for _, tokens in self.sources), len(self.ids) - 1)

    def cached(self) -> CachedTokens:
        """Where the prompt's KV came from, as far as it was not computed."""
        return CachedTokens(**by_tier(self.sources, min(self.found, len(self.task.prompt_ids))))

    def goes_on(self) -> bool:
        """Whether it is neither aborted nor late; from any thread."""
        return self.error is None and not self.life.overdue(time.monotonic())

    def check(self) -> None:
        """Raise if the job was aborted or its state's deadline has passed; from any thread."""
        if self.error is not None:
            raise self.error
        if self.life.overdue(time.monotonic()):
            raise overdue(self)

    def progress(self) -> PrefillProgress:
        """How far it has come."""
        return PrefillProgress(self.computed, len(self.ids), min(self.found, len(self.task.prompt_ids)))

    def tell(self, event: PrefillProgress | PrefillDone | BatonError) -> None:
        """Add an event to the stream."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[PrefillProgress | PrefillDone]:
        """Progress, at least every PROGRESS_S, then `PrefillDone`; raises what ended the job instead."""
        while True:
            try:
                async with asyncio.timeout(PROGRESS_S):
                    event = await self._events.get()
            except TimeoutError:
                event = self.progress()
            if isinstance(event, BatonError):
                raise event
            yield event
            if isinstance(event, PrefillDone):
                return


def by_tier(sources: Sequence[tuple[str, int]], most: int) -> dict[str, int]:
    """Tokens by tier, of the first `most`. The tiers are fields of `CachedTokens`."""
    counts: dict[str, int] = {}
    for tier, tokens in sources:
        counts[tier] = counts.get(tier, 0) + min(tokens, most)
        most -= min(tokens, most)
    return counts


def finished(job: Job, tokens: Sequence[TokenInfo], eos_token_ids: frozenset[int]) -> tuple[Handoff, PrefillDone]:
    """What decode and what the router get of a computed job, given one token for each choice."""
    task, cached = job.task, job.cached()
    first_tokens = tuple(
        FirstToken(choice, token, finish_reason(task.params, [*task.output_ids, token.token_id], eos_token_ids))
        for choice, token in zip(task.choices, tokens, strict=True)
    )
    prompt_tokens: tuple[TokenInfo, ...] = ()
    if task.params.prompt_logprobs is not None:
        prompt_tokens = (TokenInfo(job.ids[0]), *job.prompt_tokens)[: len(task.prompt_ids)]
    handoff = Handoff(
        task.request_id,
        task.attempt,
        task.prompt_ids,
        task.output_ids,
        task.params,
        first_tokens,
    )
    return handoff, PrefillDone(first_tokens, cached, prompt_tokens)


def overdue(job: Job) -> BatonError:
    """The error of a job whose state's deadline has passed: the request's own, or the limit of the state."""
    done = f"{job.computed} of {len(job.ids)} tokens prefilled"
    if job.life.of_request():
        return DeadlineExceeded(f"the deadline passed with {done}")
    if job.life.state is State.QUEUED:
        return Overloaded(f"no chunk of the prompt was computed within {QUEUED_S:g} s", retry_after=1.0)
    return Unavailable(f"the prefill was given up with {done}")
