"""The choice of the next prompt to compute, and of the number of its tokens. Pure; times are passed in.

    admit ─▶ LOOKUP ──finish_lookup──▶ WAITING ──allocate──▶ LOADING ──make_ready──▶ READY ⇄ COMPUTING ─▶ remove
             (prefix cache)            (for pages)           (cached blocks)         (a chunk at a time)

The scheduler returns decisions and calls nobody. `next_allocation` names the prompt that gets pages next, `next_chunk`
the chunk to compute next. The caller acts on them and reports the result.

The number of cached tokens of a prompt is known twice: at the look-up, and when its pages are allocated
(`set_cached_tokens`), because it may have changed in between. A prompt that should wait because another one is about to
compute much of its prefix is `deferred`; the caller decides which ones are.

Tenants share the engine by start-time fair queueing (Goyal, Vin and Cheng, 1996) with equal weights: at each chunk
boundary the tenant that was served least goes next. A tenant that has used less than its share may save up to BURST_S
of it, so that several of its prompts at once don't wait for the long prompts of others; then it takes turns with them.
A tenant's share is remembered while it has no prompt here. So a tenant that sends one prompt at a time gains nothing.
When no prompt is left, all tenants begin anew.

Of the READY prompts of one tenant, the one with the fewest remaining tokens goes next, so that a short prompt does not
wait for a long one. Ageing prevents starvation: a prompt that later prompts of its tenant overtake moves forward by a
tenth of the tokens that are computed for them. So they delay it by at most about ten times its own computing time. Time
spent behind earlier prompts does not age it; otherwise long prompts in a queue would soon go before every short one.

A prompt whose rest is one chunk does not wait for the end of a longer prompt's chunk, if its turn is before that: it
preempts the chunk between two layers.

Pages are allocated in the same order, all pages of a prompt at once, and only to the first PREPARED_AHEAD prompts that
have not started: pages of a prompt that does not run are of no use to anybody. A prompt that still loads cached blocks
counts only against prompts that must load too. So a slow load does not leave the engine idle. If the pages of a prompt
are not free, prompts that fit may go before it. But PATIENCE_S after it was first refused, no other prompt gets pages
before it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest, Overloaded
from baton.rates import UNKNOWN_PREFILL_RATE, DecayingRate

AGEING = 0.1
"""Credit of an overtaken prompt: this part of the tokens that are computed for later prompts."""
PREPARED_AHEAD = 2
"""Largest number of prompts that have pages and could start.

Prompts that still load cached blocks count only against prompts that must load too.
"""
BURST_S = 2.0
"""Unused share of the engine that a tenant may save, in seconds."""
PATIENCE_S = 2.0
"""Seconds after which a prompt whose pages were refused gets pages before all others."""
CHUNK_S = 0.5
"""Longest time of a chunk in seconds, at the measured rate."""
MIN_CHUNK = 256
"""Smallest number of tokens of a chunk, unless it would take longer than MIN_CHUNK_S seconds."""
MIN_CHUNK_S = 5.0
MIN_RATE_TOKENS = 64
"""Smallest number of tokens of a chunk from which the rate is measured."""
FAR_TOKENS = 32_000
"""From this position on, attention to the past is most of a token's time: the rate of other prompts says little."""
_CHUNK_SIZES = ((512_000, 4_096), (128_000, 8_192), (32_000, 16_384))
_RETRY_AFTER_S = (0.1, 60.0)


def chunk_size(prompt_tokens: int, configured: int, rate: float, min_overlap: int = 0) -> int:
    """Tokens of the next chunk of a prompt; `rate` is in tokens/s, 0 while unknown.

    If `configured` is 0, it depends on the length of the prompt: the whole prompt below 32,000 tokens, then 16,384,
    from 128,000 on 8,192, and from 512,000 on 4,096. It is also at most the number of tokens that take CHUNK_S at the
    measured rate, or UNKNOWN_PREFILL_RATE, so that a layer ends long before the worker counts as stalled. But it is at
    least MIN_CHUNK, since smaller chunks use a processor badly, unless that would take longer than MIN_CHUNK_S. It is
    never below MIN_RATE_TOKENS, or the length of a shorter prompt, so that the rate is measured again when a slow phase
    is over.

    `min_overlap` is the smallest number of tokens whose computation takes as long as the copies of KV from host memory,
    or 0 if the prompt has no KV there. Shorter chunks would wait for the copies, and copy the same KV more often. So
    the chunks of such a prompt never get shorter than that, and do not shrink with its length.
    """
    if configured:
        return configured
    sizes = _CHUNK_SIZES[-1:] if min_overlap else _CHUNK_SIZES
    size = next((size for least, size in sizes if prompt_tokens >= least), prompt_tokens)
    rate = rate or UNKNOWN_PREFILL_RATE
    least = max(MIN_RATE_TOKENS, min(MIN_CHUNK, int(rate * MIN_CHUNK_S)))
    return min(prompt_tokens, max(min_overlap, min(size, max(least, int(rate * CHUNK_S)))))


class PromptStage(enum.Enum):
    """The stages of a prompt."""

    LOOKUP = "lookup"
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    COMPUTING = "computing"


@dataclass(eq=False, slots=True)
class ScheduledJob:
    """The scheduler's record of a job, which computes one prompt. Times are in seconds.

    `covered_tokens` is the number of tokens that are computed, or will be loaded from a cache. `overtaken_s` is the
    time for which the engine has computed later prompts of the same tenant. `rate` is the rate of its last chunk in
    tokens/s, or 0. `in_host` is whether some of its pages are in host memory. `needs_load` is whether cached blocks
    must be loaded before it is READY. `order` is the order of admission.
    """

    tokens: int
    pages: int
    order: int
    tenant: bytes = b""
    stage: PromptStage = PromptStage.LOOKUP
    covered_tokens: int = 0
    started: bool = False
    overtaken_s: float = 0.0
    rate: float = 0.0
    refused_at: float | None = None
    in_host: bool = False
    needs_load: bool = False

    @property
    def remaining(self) -> int:
        """Number of tokens still to be computed."""
        return self.tokens - self.covered_tokens


@dataclass(slots=True)
class PrefillScheduler:
    """Scheduler of all prompts of one worker, from admission to end; all times come from the caller's clock."""

    spec: EngineSpec
    chunk_size: int
    max_waiting: int
    rate: DecayingRate = field(default_factory=DecayingRate)
    _jobs: dict[ScheduledJob, None] = field(default_factory=dict)
    _orders: itertools.count[int] = field(default_factory=itertools.count)
    _served_s: dict[bytes, float] = field(default_factory=dict)
    """Seconds for which the engine has served each tenant, on one scale for all tenants."""
    _fair_s: float = 0.0
    """Virtual time of start-time fair queueing, in seconds of service; it never decreases."""
    _row_tokens: int = 0
    _row_seconds: float = 0.0

    @property
    def waiting(self) -> int:
        """Number of prompts without a computed chunk."""
        return sum(not job.started for job in self._jobs)

    @property
    def pending_tokens(self) -> int:
        """Number of tokens still to be computed, of all prompts."""
        return sum(job.remaining for job in self._jobs)

    @property
    def pending_seconds(self) -> float:
        """Time in seconds that these tokens take, at the measured rate or UNKNOWN_PREFILL_RATE."""
        return self.pending_tokens / (self.rate.value or UNKNOWN_PREFILL_RATE)

    def admit(self, tokens: int, tenant: bytes = b"") -> ScheduledJob:
        """Add a prompt of `tenant`.

        Raises InvalidRequest if it can never be computed here, Overloaded if too many prompts wait.
        """
        if tokens >= self.spec.max_model_len:
            raise InvalidRequest(
                "prompt_token_ids",
                f"with output_token_ids must leave room for a token in {self.spec.max_model_len}",
                tokens,
            )
        pages = self.spec.pages_for(tokens)
        if pages > self.spec.pages:
            raise InvalidRequest(
                "prompt_token_ids",
                f"with output_token_ids need {pages} pages, the prefill worker's KV memory has {self.spec.pages}, "
                f"which hold {self.spec.pages * self.spec.page_size} tokens (--kv-memory)",
                tokens,
            )
        if self.waiting >= self.max_waiting:
            low, high = _RETRY_AFTER_S
            problem = f"{self.waiting} prompts are waiting, the limit is {self.max_waiting}"
            raise Overloaded(problem, min(high, max(low, self.pending_seconds)))
        job = ScheduledJob(tokens, pages, next(self._orders), tenant)
        self._jobs[job] = None
        earliest = self._fair_s - BURST_S
        self._served_s[tenant] = max(self._served_s.get(tenant, earliest), earliest)
        return job

    def finish_lookup(self, job: ScheduledJob, cached: int, *, needs_load: bool = False) -> None:
        """End the look-up: about `cached` leading tokens are cached, and some must be loaded if `needs_load`."""
        job.covered_tokens, job.stage, job.needs_load = cached, PromptStage.WAITING, needs_load

    def next_allocation(
        self, now: float, deferred: Collection[ScheduledJob] = (), refused: Collection[ScheduledJob] = ()
    ) -> ScheduledJob | None:
        """The WAITING prompt that gets pages next; None if no prompt may get pages now.

        `deferred` prompts wait for another one to compute their prefix. `refused` ones were tried in this round, and
        their pages are not free.
        """
        prepared = loading = 0
        for job in self._allocation_order(now, deferred):
            if job.stage is not PromptStage.WAITING:
                waits = job.stage is PromptStage.LOADING and job.needs_load
                prepared, loading = prepared + (not waits), loading + waits
            elif prepared + loading * job.needs_load < PREPARED_AHEAD and job not in deferred and job not in refused:
                return job
        return None

    def waiting_for_pages(self) -> list[ScheduledJob]:
        """All WAITING prompts."""
        return [job for job in self._jobs if job.stage is PromptStage.WAITING]

    def record_allocation(
        self, job: ScheduledJob, cached: int, *, in_host: bool = False, needs_load: bool = False
    ) -> None:
        """Record that the prompt has its pages, some `in_host` memory, and `cached` tokens in them or to be loaded."""
        job.stage, job.in_host, job.needs_load = PromptStage.LOADING, in_host, needs_load
        self.set_cached_tokens(job, cached)

    def mark_refused(self, job: ScheduledJob, now: float) -> None:
        """Record that the prompt's pages are not free."""
        if job.refused_at is None:
            job.refused_at = now

    def set_cached_tokens(self, job: ScheduledJob, cached: int) -> None:
        """Set how many leading tokens are in the prompt's pages or will be loaded."""
        job.covered_tokens = cached

    def make_ready(self, job: ScheduledJob, computed_tokens: int) -> None:
        """Record that the KV of the first `computed_tokens` is in place, so that the next chunk may be computed."""
        job.covered_tokens, job.stage = computed_tokens, PromptStage.READY

    def next_chunk(self, running: ScheduledJob | None = None) -> tuple[ScheduledJob, int] | None:
        """The prompt to compute next and the end of its chunk; None if no prompt is READY.

        While `running` computes a chunk, the result is a prompt that preempts it after a layer, or None. Such a prompt
        comes before `running`, is shorter, and needs one chunk.
        """
        ready = [job for job in self._jobs if job.stage is PromptStage.READY]
        if not ready:
            return None
        job = self._turn_order(ready if running is None else [running, *ready])[0]
        if job is running:
            return None
        min_overlap = self.spec.min_overlap_chunk if job.in_host else 0
        size = chunk_size(job.tokens, self.chunk_size, job.rate or self.rate.value, min_overlap)
        if not job.rate and not self.chunk_size and job.covered_tokens >= FAR_TOKENS:
            # Resumed from cached blocks: nothing is known of its tokens' time.
            size = min(size, MIN_RATE_TOKENS)
        end = min(job.tokens, job.covered_tokens + size)
        if running is not None and (end < job.tokens or job.remaining >= running.tokens):
            return None
        return job, end

    def start_chunk(self, job: ScheduledJob) -> None:
        """Record that a chunk of the prompt is being computed."""
        job.stage = PromptStage.COMPUTING

    def finish_chunk(self, job: ScheduledJob, end: int, seconds: float) -> None:
        """Record that a chunk up to `end` took `seconds`.

        A chunk of fewer than MIN_RATE_TOKENS is mostly overhead, unless all chunks are that short. It may raise a known
        rate, but it neither lowers nor sets it. Otherwise short prompts and the rests of cached ones would make the
        worker look slow.
        """
        tokens = end - job.covered_tokens
        significant = tokens >= min(self.chunk_size or MIN_RATE_TOKENS, MIN_RATE_TOKENS)
        if significant or 0 < self.rate.value * seconds < tokens:
            self.rate.add(tokens, seconds)
        if significant and seconds > 0:
            job.rate = tokens / seconds
        job.covered_tokens, job.started = end, True

    def ready_order(self) -> list[ScheduledJob]:
        """The READY prompts, in the order in which they should be computed."""
        return self._turn_order(job for job in self._jobs if job.stage is PromptStage.READY)

    def finish_rows(self, rows: Sequence[tuple[ScheduledJob, int]], seconds: float) -> None:
        """Record that a pass computed several prompts, each up to its end, in `seconds`.

        The rate is measured from MIN_RATE_TOKENS tokens on, of several passes if they have fewer. It is that at which
        prompts go on here, beside the steps of decode's batch.
        """
        self._row_tokens += sum(end - job.covered_tokens for job, end in rows)
        self._row_seconds += seconds
        if self._row_tokens >= MIN_RATE_TOKENS:
            self.rate.add(self._row_tokens, self._row_seconds)
            self._row_tokens, self._row_seconds = 0, 0.0
        for job, end in rows:
            job.covered_tokens, job.started = end, True

    def charge(self, job: ScheduledJob, seconds: float) -> None:
        """Charge `seconds` of the engine to the prompt's tenant; the prompts that it has overtaken earn credit."""
        self._fair_s = max(self._fair_s, self._served_s[job.tenant])
        self._served_s[job.tenant] += seconds
        earliest = self._fair_s - BURST_S
        self._served_s = {tenant: max(served, earliest) for tenant, served in self._served_s.items()}
        for other in self._jobs:
            if other.tenant == job.tenant and other.order < job.order:
                other.overtaken_s += seconds

    def priority(self, job: ScheduledJob) -> float:
        """Remaining tokens less the credit for being overtaken; of a tenant, the lowest value goes first."""
        return job.remaining - AGEING * (self.rate.value or UNKNOWN_PREFILL_RATE) * job.overtaken_s

    def remove(self, job: ScheduledJob) -> None:
        """Remove a prompt that is finished or given up."""
        self._jobs.pop(job, None)
        present = {other.tenant for other in self._jobs}
        if present:
            forgotten = self._fair_s - BURST_S
            self._served_s = {
                tenant: served for tenant, served in self._served_s.items() if tenant in present or served > forgotten
            }
        else:
            self._served_s, self._fair_s = {}, 0.0

    def _allocation_order(self, now: float, deferred: Collection[ScheduledJob]) -> list[ScheduledJob]:
        """Prompts that have not started and whose look-up is over; only one if it was refused for PATIENCE_S."""
        jobs = [job for job in self._jobs if not job.started and job.stage is not PromptStage.LOOKUP]
        starved = [
            job
            for job in jobs
            if job.stage is PromptStage.WAITING
            and job.refused_at is not None
            and now - job.refused_at >= PATIENCE_S
            and job not in deferred
        ]
        return sorted(starved, key=lambda job: job.order)[:1] or self._turn_order(jobs)

    def _turn_order(self, jobs: Iterable[ScheduledJob]) -> list[ScheduledJob]:
        """Order prompts by what their tenants will have been served when each starts."""
        start_s, rate = dict(self._served_s), self.rate.value or UNKNOWN_PREFILL_RATE
        keyed: list[tuple[float, int, ScheduledJob]] = []
        for job in sorted(jobs, key=lambda job: (self.priority(job), job.order)):
            keyed.append((start_s[job.tenant], len(keyed), job))
            start_s[job.tenant] += job.remaining / rate
        return [job for *_, job in sorted(keyed, key=lambda each: each[:2])]
