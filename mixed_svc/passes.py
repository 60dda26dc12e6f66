"""Prompts in the passes of decode's loop: chunks for the engine thread, results for the jobs of prefill.

    asyncio loop (PackedChunks)   compute ─▶ READY prompts in the scheduler's order ─▶ a tuple, replaced at each change
                                                                                          │
    engine thread (MixedPasses)                  record ◀─── pass ◀─── next_chunks ◀──────┘
                                                   │
    asyncio loop (PackedChunks)   jobs go on ◀── _on_pass

The engine thread cuts the chunks of each pass from that tuple, and keeps the position of each prompt itself. So a
prompt goes on in the next pass without a round trip to the asyncio loop. The loop does what follows a pass: it charges
the tenants, orders the prompts anew, and wakes a job when its prompt has ended, has failed, or was computed for about
the time of a chunk of a worker that only prefills (CHUNK_S). A job that is cancelled waits for the end of the pass.

Passes preempt by being short (`mixed_svc.budget`): a shorter prompt is in the next pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from baton.engine.contract import ChunkResult, EngineSpec, OnLayer, PromptChunk
from baton.process.executors import wait_to_end
from baton.rates import DecayingRate
from baton.telemetry import metrics
from baton.worker.health import Watchdog
from decode_svc.loop import DecodeLoop
from mixed_svc.budget import PassBudget, TokenSeconds, next_rows
from prefill_svc.job import PrefillJob
from prefill_svc.scheduler import CHUNK_S, FAR_TOKENS, PrefillScheduler, ScheduledJob

T = TypeVar("T")

SHORT_S = 1.0
"""Expected seconds of the prompts in a pass up to which nothing looks at it before its end."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt that is computed in passes.

    The engine thread changes `position`, `stopped`, `own_rate` and `begun`; the asyncio loop changes the rest.

    position   number of tokens that are computed, or are in a pass in flight
    most       largest number of tokens in one pass
    stopped    whether no more chunks are cut: all are, or the prompt has failed
    own_rate   rate of its tokens from FAR_TOKENS on
    begun      whether its first pass has begun
    told_at    time at which its job was told of progress, on the monotonic clock; None before the first pass
    outcome    the result of its last chunk, or its error
    news       set when its job may have to do something
    """

    job: PrefillJob
    position: int
    most: int
    stopped: bool = False
    own_rate: DecayingRate = field(default_factory=DecayingRate)
    begun: bool = False
    told_at: float | None = None
    outcome: ChunkResult | Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total(self) -> int:
        return len(self.job.token_ids)

    @property
    def rate(self) -> float:
        return self.own_rate.value

    @property
    def is_far(self) -> bool:
        return self.position >= FAR_TOKENS


@dataclass(frozen=True, slots=True)
class _Row:
    """A chunk that was read: its prompt, its tokens, its result, and the seconds that its tokens took in the pass."""

    prompt: _Prompt
    tokens: range
    result: ChunkResult | Exception
    own_s: float = 0.0


class MixedPasses:
    """The PromptSource of decode's loop."""

    def __init__(self, spec: EngineSpec, watchdog: Watchdog, budget: PassBudget) -> None:
        self._spec = spec
        self._watchdog = watchdog
        self._budget = budget
        self._in_flight: dict[int, _Prompt] = {}
        """The prompts of chunks that are not read yet, by the id of the chunk, which the loop keeps."""
        self.ready: tuple[_Prompt, ...] = ()
        """The prompts to compute, in order; the asyncio loop replaces it."""
        self.on_begin: Callable[[_Prompt], object] = lambda prompt: None
        """Called on the engine thread before the first pass of a prompt."""
        self.on_pass: Callable[[Sequence[_Row], float], object] = lambda rows, seconds: None
        """Called on the engine thread with the rows of a pass and its duration in seconds, 0 if it failed."""

    @property
    def waiting(self) -> bool:
        """As in PromptSource."""
        return any(not prompt.stopped for prompt in self.ready)

    def next_chunks(self, running: int) -> Sequence[PromptChunk]:
        """As in PromptSource. Prompts that were aborted or are late fail here, before their next chunk."""
        prompts = self._active()
        budget = self._budget.next(running) if prompts else None
        if budget is None:
            return ()
        chunks, rows = [], next_rows(prompts, budget)
        expected_s = sum((end - prompts[index].position) / budget.rate for index, end in rows)
        is_short = running > 0 and expected_s <= SHORT_S and not any(prompts[index].is_far for index, _ in rows)
        for index, end in rows:
            prompt = prompts[index]
            job, start = prompt.job, prompt.position
            if not running and job.scheduled.in_host:
                # A shorter chunk would wait for the copies of its KV.
                end = max(end, min(start + self._spec.min_overlap_chunk, prompt.total))
            chunk = job.chunk(start, end, None if is_short and job.export is None else self._on_layer(job, end))
            chunks.append(chunk)
            self._in_flight[id(chunk)] = prompt
            prompt.position, prompt.stopped = end, end == prompt.total
            if not prompt.begun:
                prompt.begun = True
                self.on_begin(prompt)
        return chunks

    def record(
        self, chunks: Sequence[PromptChunk], results: Sequence[ChunkResult | Exception], seconds: float, running: int
    ) -> int:
        """As in PromptSource."""
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        far = sum(chunk.end - chunk.start for chunk in chunks if chunk.start >= FAR_TOKENS)
        token_s = self._budget.record(tokens - far, far, running, seconds) if seconds else TokenSeconds(0.0, 0.0)
        rows, ended = list[_Row](), 0
        for chunk, result in zip(chunks, results, strict=True):
            prompt, count, is_far = self._in_flight.pop(id(chunk)), chunk.end - chunk.start, chunk.start >= FAR_TOKENS
            own_s = count * (token_s.far if is_far else token_s.near)
            rows.append(_Row(prompt, range(chunk.start, chunk.end), result, own_s))
            if isinstance(result, Exception):
                prompt.stopped = True
            else:
                ended += chunk.end == prompt.total and _goes_on_here(prompt.job)
                if is_far and own_s:
                    prompt.own_rate.add(count, own_s)
        if rows:
            self.on_pass(rows, seconds)
        return ended

    def is_in_pass(self, prompt: _Prompt) -> bool:
        """Whether a chunk of a prompt is not read yet; called on the engine thread."""
        return prompt in self._in_flight.values()

    def _active(self) -> list[_Prompt]:
        """The prompts that need more chunks, in order; those that may not go on fail."""
        active, failed = list[_Prompt](), list[_Row]()
        for prompt in self.ready:
            if prompt.stopped:
                continue
            try:
                prompt.job.check()
            except Exception as error:
                prompt.stopped = True
                failed.append(_Row(prompt, range(0), error))
            else:
                active.append(prompt)
        if failed:
            self.on_pass(failed, 0.0)
        return active

    def _on_layer(self, job: PrefillJob, end: int) -> OnLayer:
        """The function that follows a chunk layer by layer.

        A pass with a step and short chunks in place has none. So all its layers can be one call of native kernels,
        which does not wait for the interpreter's lock between them, or can be launched ahead.
        """

        def on_layer(layer: int) -> None:
            self._watchdog.record()
            job.check()
            if job.export is not None:
                job.export.mark_final(layer, end)

        return on_layer


class PackedChunks:
    """The Chunks of a mixed worker's `jobs`: several prompts share a pass, also with a step of decode's batch."""

    def __init__(
        self,
        passes: MixedPasses,
        decode_loop: DecodeLoop,
        chunk_size: int,
        scheduler: PrefillScheduler,
        jobs: Mapping[ScheduledJob, PrefillJob],
    ) -> None:
        """`chunk_size` is the largest number of tokens of a prompt in one pass, 0 if only the budget limits it."""
        self._passes = passes
        self._decode_loop = decode_loop
        self._chunk_size = chunk_size
        self._scheduler = scheduler
        self._jobs = jobs
        self._prompts: dict[ScheduledJob, _Prompt] = {}
        loop = asyncio.get_running_loop()
        passes.on_begin = lambda prompt: loop.call_soon_threadsafe(prompt.news.set)
        passes.on_pass = lambda rows, seconds: loop.call_soon_threadsafe(self._on_pass, rows, seconds)

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """As in Chunks."""
        return asyncio.wrap_future(self._decode_loop.call(function))

    async def compute(self, job: PrefillJob, begin: Callable[[], object]) -> ChunkResult:
        """As in Chunks; returns when the prompt has ended, or was computed for about CHUNK_S seconds.

        The engine goes on with the prompt meanwhile.
        """
        prompt = self._prompts.get(job.scheduled)
        if prompt is None:
            prompt = _Prompt(job, job.computed_tokens, self._chunk_size or len(job.token_ids))
            self._prompts[job.scheduled] = prompt
            self._scheduler.make_ready(job.scheduled, job.computed_tokens)
            self._publish()
            self._decode_loop.wake()
        try:
            while prompt.outcome is None:
                await prompt.news.wait()
                prompt.news.clear()
                if prompt.told_at is None and prompt.begun:
                    begin()
                    prompt.told_at = time.monotonic()
                elif prompt.told_at is not None and time.monotonic() - prompt.told_at >= CHUNK_S:
                    prompt.told_at = time.monotonic()
                    break
        except asyncio.CancelledError:
            del self._prompts[job.scheduled]
            self._publish()
            await self._wait_out(prompt)
            if isinstance(prompt.outcome, Exception) and prompt.outcome is not job.error:
                # Its KV may be wrong, which counts more than the end of the job.
                raise prompt.outcome from None
            raise
        if prompt.outcome is None:
            return ChunkResult()
        del self._prompts[job.scheduled]
        if isinstance(prompt.outcome, ChunkResult):
            return prompt.outcome
        raise prompt.outcome

    async def _wait_out(self, prompt: _Prompt) -> None:
        """Wait until no pass has a chunk of a prompt: its pages are in use until then, and its tokens count.

        The caller was cancelled; that it is cancelled again, as by its deadline, does not end the wait.
        """
        in_pass = True
        while in_pass:
            looking = self.run(lambda: self._passes.is_in_pass(prompt))
            with contextlib.suppress(asyncio.CancelledError):
                await wait_to_end(looking)
            # If the loop has ended, nothing is in a pass.
            in_pass = not looking.cancelled() and looking.result()

    def _on_pass(self, rows: Sequence[_Row], seconds: float) -> None:
        """Count what a pass has computed, and tell the jobs; called on the asyncio loop."""
        counted = [row for row in rows if row.prompt.job.scheduled in self._jobs]
        own_s = sum(row.own_s for row in rows)
        for row in counted:
            job = row.prompt.job
            if own_s:
                self._scheduler.charge(job.scheduled, seconds * row.own_s / own_s)
            if isinstance(row.result, Exception):
                row.prompt.outcome = row.prompt.outcome or row.result
            elif row.prompt.outcome is None:
                metrics.PREFILL_TOKENS.labels("computed").inc(len(row.tokens))
                job.computed_tokens = job.computing_end = row.tokens.stop
                job.add_prompt_logprobs(row.result.prompt_logprobs)
                if row.tokens.stop == row.prompt.total:
                    row.prompt.outcome = row.result
            row.prompt.news.set()
        computed = [row for row in counted if isinstance(row.result, ChunkResult)]
        self._scheduler.finish_rows([(row.prompt.job.scheduled, row.tokens.stop) for row in computed], seconds)
        self._publish()

    def _publish(self) -> None:
        """Replace the tuple of the engine thread."""
        ready = (self._prompts.get(scheduled) for scheduled in self._scheduler.ready_order())
        self._passes.ready = tuple(prompt for prompt in ready if prompt is not None and prompt.outcome is None)


def _goes_on_here(job: PrefillJob) -> bool:
    """Whether decode will get a sequence of a prompt that has just ended; it may also end with its first token."""
    request = job.request
    return request.in_place and len(request.output_ids) + 1 != request.params.max_tokens
