"""The engine thread: admit, make room, launch a step, read one, emit.

While there is work, the loop reads its inbox before each step; otherwise it waits for the inbox. It emits one
`StepReport` for the changes of the batch, then one for the outputs of the step. When a sequence ends, the loop first
publishes its blocks and frees its pages and its slot, so that the next step runs with another sequence in its place.

If a step raises, all sequences of its batch fail and publish nothing, and the engine drops its cached blocks, because
they may be wrong too. The loop then audits the engine's pages: it goes on if the audit passes, and raises otherwise,
which ends the worker. If one sequence can't join the batch, or gets no token, only that sequence fails. If steps give
no token at all, `baton.worker.health` suspects the worker; then nothing joins the batch until there is a token, or
until the batch is empty and the engine has been tested.

While there is a batch, `spec.steps_ahead` steps stay unread, so that the device always has the next step to run. A
sequence that ends has then been in one more step, and the tokens of that step are dropped. No step stays unread when
the batch is empty.

Before a step, each sequence gets the pages that its next tokens need. If too few are free, the loop frees pages held
for no request. Then it reads unread steps, which may end sequences. Then it preempts the youngest sequence. It repeats
this until there are enough. A preempted sequence fails as PREEMPTED, and leaves its blocks cached for its replay.

On a mixed worker, a pass also computes chunks of prompts (`PromptSource`): all its rows are one forward pass. Chunks
are launched and read with the step of their pass, and fail with it. While there is no batch, a pass has chunks only. A
sequence that becomes ready then waits for the end of that pass, so the source keeps it short; nothing is nested in it.
After a pass that ends prompts in place, the loop waits up to HAND_OVER_S for their sequences, so that they are in the
next pass.

The asyncio side may end an attempt and free its handles at any time. An operation that fails here because its handle is
dead is therefore no error: the command that drops the sequence is already on its way.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from baton.engine.contract import ChunkResult, Engine, EngineSequence, ForwardPass, PromptChunk
from baton.errors import NoToken, OutOfPages
from baton.telemetry.logs import about
from baton.worker.health import NoTokenCounter, Watchdog
from decode_svc.messages import FailureKind
from decode_svc.scheduler import BatchPages, DecodeScheduler, DecodeSequence, StepOutput

_log = logging.getLogger(__name__)

T = TypeVar("T")

HAND_OVER_S = 0.005
"""Longest wait, in seconds, for the sequences of prompts that a pass has ended."""


class PromptSource(Protocol):
    """Prompts whose chunks are computed in the passes of the batch. All methods are called on the engine thread."""

    @property
    def waiting(self) -> bool:
        """Whether `next_chunks` would return chunks if the batch were empty."""

    def next_chunks(self, running: int) -> Sequence[PromptChunk]:
        """The chunks of the next pass, at most one of each handle; `running` is the number of sequences in its step."""

    def record(
        self, chunks: Sequence[PromptChunk], results: Sequence[ChunkResult | Exception], seconds: float, running: int
    ) -> int:
        """Take the results of a pass, in the order of its chunks; `seconds` is its duration, 0 if it failed.

        Called for passes without chunks too. Returns the number of sequences that will be added for its prompts.
        """


class _NoPrompts:
    """The source of a worker that only decodes."""

    waiting = False

    def next_chunks(self, running: int) -> Sequence[PromptChunk]:
        return ()

    def record(
        self, chunks: Sequence[PromptChunk], results: Sequence[ChunkResult | Exception], seconds: float, running: int
    ) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class FailedSequence:
    """A sequence that failed, and why."""

    id: int
    kind: FailureKind
    message: str


@dataclass(slots=True)
class StepReport:
    """The results of one step, or a change of the batch before it, with the number of running sequences afterwards.

    `joined` lists the sequences that joined the batch. `batch` and `seconds` are the number of sequences and the
    duration of the step, 0 if no step was read. A duration begins when the step was launched, or when the step before
    it was read if that was later.
    """

    outputs: list[StepOutput] = field(default_factory=list)
    failures: list[FailedSequence] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    batch: int = 0
    seconds: float = 0.0
    running: int = 0


@dataclass(frozen=True, slots=True)
class _Add:
    sequences: Sequence[DecodeSequence]


@dataclass(frozen=True, slots=True)
class _Drop:
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        """Call the function, unless the future was cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except BaseException as error:
                self.future.set_exception(error)


class _Wake:
    pass


class _Stop:
    pass


class DecodeLoop:
    """Runs the generation batch of one engine; any thread may call `add`, `drop`, `call`, `wake` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        watchdog: Watchdog,
        emit: Callable[[StepReport], object],
        clock: Callable[[], float] = time.monotonic,
        reclaim: Callable[[], bool] = lambda: False,
        batch_pages: BatchPages | None = None,
        prompts: PromptSource | None = None,
    ) -> None:
        """`reclaim` frees pages that no request holds; it is called on the engine thread, and returns True if it
        freed any. The loop counts `batch_pages`. `prompts` is None if the worker only decodes.
        """
        self._engine = engine
        self._watchdog = watchdog
        self._emit = emit
        self._clock = clock
        self._reclaim = reclaim
        self._scheduler = DecodeScheduler(engine.spec)
        self._read_at = 0.0
        self._inbox: queue.SimpleQueue[_Add | _Drop | _Call | _Wake | _Stop] = queue.SimpleQueue()
        self._prompts = prompts or _NoPrompts()
        self._chunks: dict[ForwardPass, Sequence[PromptChunk]] = {}
        """The chunks of the passes in flight."""
        self._handed_over = 0
        """Number of sequences that will be added soon, because their prompts have just ended."""
        self._ended = False
        self._batch_pages = batch_pages or BatchPages()
        self._no_tokens = NoTokenCounter()

    def add(self, sequences: Sequence[DecodeSequence]) -> None:
        """Queue sequences whose KV is complete; the loop frees their handles at the end."""
        self._inbox.put(_Add(sequences))

    def drop(self, ids: Sequence[int]) -> None:
        """End sequences before the next step; ignores those that have ended."""
        self._inbox.put(_Drop(ids))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function on the engine thread before the next pass; the future is cancelled if the loop has ended."""
        future: Future[T] = Future()
        self._inbox.put(_Call(function, future))
        if self._ended:
            self._cancel_calls()
        return future

    def wake(self) -> None:
        """Look for prompts, if the loop is idle."""
        self._inbox.put(_Wake())

    def stop(self) -> None:
        """Make `run` return before the next step."""
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Run until stopped. Frees all handles at the end; raises the error that made the engine unusable."""
        try:
            while self.run_once():
                pass
        finally:
            self._free([sequence.id for sequence in self._scheduler.sequences])
            self._discard_in_flight()
            self._watchdog.set_idle()
            self._ended = True
            self._cancel_calls()

    def run_once(self) -> bool:
        """Take in commands, waiting if there is nothing else to do; then launch a pass, read and emit.

        Returns False to stop.
        """
        if not self._receive():
            return False
        changes = StepReport()
        if not self._no_tokens.suspected:
            self._admit(changes)
        self._ensure_pages(changes)
        if changes.joined or changes.failures:
            self._emit_report(changes)
        self._launch()
        if not self._read(self._engine.spec.steps_ahead):
            self._emit_report(StepReport())
        if self._no_tokens.suspected and not self._scheduler.running:
            self._no_tokens.run_self_test(self._engine, self._watchdog, step=True)
        return True

    def _emit_report(self, report: StepReport) -> None:
        report.running = self._scheduler.running
        if self._batch_pages.replay_pages:
            self._count_kept_pages()
        self._emit(report)

    def _receive(self) -> bool:
        """Take in all commands, waiting for one if there is nothing to do. Returns False to stop."""
        idle = self._scheduler.idle and not self._engine.in_flight and not self._prompts.waiting
        if idle:
            self._watchdog.set_idle()
        until = time.monotonic() + HAND_OVER_S if self._handed_over > 0 else 0.0
        while True:
            try:
                if self._handed_over > 0 and (wait_s := until - time.monotonic()) > 0:
                    command = self._inbox.get(timeout=wait_s)
                else:
                    command = self._inbox.get(block=idle)
            except queue.Empty:
                self._handed_over = 0
                self._watchdog.record()
                return True
            idle = False
            match command:
                case _Add(sequences):
                    self._scheduler.add(sequences)
                    self._handed_over -= len(sequences)
                case _Drop(ids):
                    self._free(ids)
                case _Call():
                    command.run()
                case _Stop():
                    return False

    def _cancel_calls(self) -> None:
        """Cancel the calls that will not run any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get(block=False)
                if isinstance(command, _Call):
                    command.future.cancel()

    def _admit(self, report: StepReport) -> None:
        for sequence in self._scheduler.admit(self._clock()):
            try:
                self._engine.insert(sequence)
            except Exception as error:
                self._fail_sequence(sequence, error, report)
            else:
                report.joined.append(sequence.id)

    def _ensure_pages(self, report: StepReport) -> None:
        """Give each sequence of the batch room for its next tokens, the oldest first."""
        for sequence in self._scheduler.sequences_to_extend():
            while self._scheduler.find_running(sequence) and not self._extend(sequence, report):
                if not self._reclaim() and not self._read(0):
                    self._preempt(report)

    def _extend(self, sequence: DecodeSequence, report: StepReport) -> bool:
        """Extend a sequence by the pages that it needs; False if too few are free."""
        try:
            self._engine.extend(sequence.handle, sequence.next_positions.stop)
        except OutOfPages:
            return False
        except Exception as error:
            self._fail_sequence(sequence, error, report)
        return True

    def _preempt(self, report: StepReport) -> None:
        """End the youngest sequence; its router replays it."""
        sequence, total = self._scheduler.youngest(), self._engine.stats().total
        freed = self._batch_pages.replay_pages = self._engine.spec.pages_for(sequence.handle.capacity)
        # Until they are counted.
        self._batch_pages.kept_pages = total
        owner = sequence.handle.owner
        message = f"{owner} is preempted and frees {freed} of {total} pages: the batch needs pages and none is free"
        _log.info("%s", message, extra=about(sequence.request_id))
        self._engine.free(sequence.handle, sequence.digests)
        self._fail_sequences([sequence.id], FailureKind.PREEMPTED, message, report)

    def _count_kept_pages(self) -> None:
        """Count the pages to keep for the batch: none if it has room beside a replay of what was preempted last."""
        stats, missing = self._engine.stats(), self._scheduler.missing_pages()
        if not self._scheduler.running or missing + self._batch_pages.replay_pages <= stats.free + stats.cached:
            missing = self._batch_pages.replay_pages = 0
        self._batch_pages.kept_pages = missing

    def _launch(self) -> None:
        """Launch a pass over the batch and chunks of prompts, if there are any."""
        running = self._scheduler.running
        chunks = self._prompts.next_chunks(running)
        if not running and not chunks:
            return
        at = self._clock()
        try:
            launched = self._engine.launch(chunks, step=running > 0)
        except Exception as error:
            self._read(0)
            report = StepReport()
            self._fail_chunks(chunks, error)
            self._fail_batch(error, report)
            self._emit_report(report)
        else:
            launched.launched_at = at
            self._chunks[launched] = chunks

    def _read(self, max_in_flight: int) -> int:
        """Read the oldest steps until so many are in flight, or none if the batch is empty; emits a report of each.

        Returns their number.
        """
        count = 0
        while len(self._engine.in_flight) > (max_in_flight if self._scheduler.running else 0):
            report = StepReport()
            self._process_step(self._engine.in_flight[0], report)
            self._emit_report(report)
            count += 1
        return count

    def _process_step(self, step: ForwardPass, report: StepReport) -> None:
        batch, started = len(step.batch), max(step.launched_at, self._read_at)
        chunks = self._chunks.pop(step, ())
        try:
            result = step.result()
        except Exception as error:
            self._fail_chunks(chunks, error)
            self._fail_batch(error, report)
            return
        results, now = result.sequences, self._clock()
        self._read_at = now
        self._handed_over += self._prompts.record(chunks, result.chunks, now - started, batch)
        if batch:
            report.batch, report.seconds = batch, now - started
        lost = [(sequence, result) for sequence, result in results if isinstance(result, NoToken)]
        if len(lost) < len(results):
            self._no_tokens.record_success()
        for sequence, reason in lost:
            self._fail_without_token(sequence, reason, report, is_suspicious=len(lost) == len(results))
        for sequence, tokens in results:
            if isinstance(tokens, NoToken):
                continue
            output = self._scheduler.record_tokens(sequence, tokens, now)
            if output is not None:
                report.outputs.append(output)
                if output.finish is not None:
                    self._engine.free(sequence.handle, output.digests)

    def _fail_chunks(self, chunks: Sequence[PromptChunk], error: Exception) -> None:
        """Fail the chunks of a pass that failed, and those of later passes, which the engine has undone."""
        for each in (chunks, *self._chunks.values()):
            self._prompts.record(each, [error] * len(each), 0.0, 0)
        self._chunks.clear()

    def _fail_batch(self, error: Exception, report: StepReport) -> None:
        """A pass failed: nobody in the batch goes on, nothing cached is trusted, and all pages must add up."""
        batch = self._scheduler.batch
        ids, extra = [sequence.id for sequence in batch], about(*(sequence.request_id for sequence in batch))
        _log.error("a pass over %d sequences failed", len(ids), exc_info=error, extra=extra)
        self._engine.drop_cached()
        self._fail_sequences(ids, FailureKind.ENGINE, f"{type(error).__name__}: {error}", report)
        self._engine.audit()

    def _discard_in_flight(self) -> None:
        """Wait for the steps in flight, and drop their results."""
        while self._engine.in_flight:
            with contextlib.suppress(Exception):
                self._engine.in_flight[0].result()

    def _fail_sequence(self, sequence: DecodeSequence, error: Exception, report: StepReport) -> None:
        """Fail a sequence that the engine refused; if it was ended meanwhile, only drop it."""
        if not sequence.handle.alive:
            self._free([sequence.id])
            return
        _log.error("%s can't continue", sequence.handle.owner, exc_info=error, extra=about(sequence.request_id))
        self._fail_sequences([sequence.id], FailureKind.ENGINE, f"{type(error).__name__}: {error}", report)

    def _fail_without_token(
        self, sequence: EngineSequence, error: NoToken, report: StepReport, *, is_suspicious: bool
    ) -> None:
        """Fail a sequence that got no token; `is_suspicious` if that speaks against the worker."""
        running = self._scheduler.find_running(sequence)
        if running is None:
            return
        self._engine.uncache(running.handle)
        self._fail_sequence(running, error, report)
        if is_suspicious:
            self._no_tokens.record_failure(running.request_id)

    def _fail_sequences(self, ids: Iterable[int], kind: FailureKind, message: str, report: StepReport) -> None:
        report.failures += [FailedSequence(each, kind, message) for each in ids]
        self._free(ids)

    def _free(self, ids: Iterable[int]) -> None:
        for sequence in self._scheduler.drop(ids):
            self._engine.free(sequence.handle)
