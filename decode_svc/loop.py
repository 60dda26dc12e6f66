"""The engine thread: admit, step, emit.

It sleeps on its inbox while it has no sequence, and looks into it before each step while it has. What a step
yields goes back in one `Report`; a sequence that ended frees its pages and its slot before that, so that the next
step runs with the next sequence in its place. A step that raises fails the sequences of its batch; the loop goes
on only if the engine's pages still audit clean, else it raises and the worker is done.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.engine.contract import Engine
from baton.worker.progress import Progress
from decode_svc.scheduler import Decoding, Scheduler, StepOutput

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Report:
    """What one turn of the loop brought: outputs, failed sequences and why, and the load after it.

    `batch` and `seconds` are the step's sequences and duration, 0 when no step ran.
    """

    outputs: list[StepOutput] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    batch: int = 0
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Add:
    sequences: Sequence[Decoding]


@dataclass(frozen=True, slots=True)
class _Drop:
    ids: Sequence[int]


class _Stop:
    pass


class DecodeLoop:
    """Runs the generation batch of one engine; `add`, `drop` and `stop` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        emit: Callable[[Report], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._emit = emit
        self._clock = clock
        self._scheduler = Scheduler(engine.spec)
        self._inbox: queue.SimpleQueue[_Add | _Drop | _Stop] = queue.SimpleQueue()

    def add(self, sequences: Sequence[Decoding]) -> None:
        """Queue sequences whose KV is there; the loop frees their handles in the end."""
        self._inbox.put(_Add(sequences))

    def drop(self, ids: Sequence[int]) -> None:
        """End sequences before the next step; those that have ended already are ignored."""
        self._inbox.put(_Drop(ids))

    def stop(self) -> None:
        """Make `run` return before the next step."""
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Turn until stopped; raises what made the engine unusable. Frees all that it holds."""
        try:
            while self.turn():
                pass
        finally:
            self._free(self._scheduler.all())
            self._progress.idle()

    def turn(self) -> bool:
        """Take in what has come, waiting for it without sequences, then admit, step, emit; False to stop."""
        if not self._receive():
            return False
        report = Report()
        self._admit(report)
        if self._scheduler.running:
            self._step(report)
        report.running, report.waiting = self._scheduler.running, self._scheduler.waiting
        self._emit(report)
        return True

    def _receive(self) -> bool:
        """Take in all commands, waiting for one if there is nothing to do; False to stop."""
        idle = not (self._scheduler.running or self._scheduler.waiting)
        if idle:
            self._progress.idle()
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                self._progress.moved()
                return True
            idle = False
            match command:
                case _Add(sequences):
                    self._scheduler.add(sequences)
                case _Drop(ids):
                    self._free(ids)
                case _Stop():
                    return False

    def _admit(self, report: Report) -> None:
        for sequence in self._scheduler.admit(self._clock()):
            try:
                self._engine.insert(sequence.handle, sequence.state)
            except Exception as error:
                _log.exception("%s can't be inserted", sequence.handle.owner)
                self._fail([sequence.id], error, report)

    def _step(self, report: Report) -> None:
        report.batch, started = self._scheduler.running, self._clock()
        try:
            results = self._engine.step().result()
        except Exception as error:
            _log.exception("a step over %d sequences failed", report.batch)
            self._fail(self._scheduler.batch(), error, report)
            self._engine.audit()
            return
        now = self._clock()
        report.seconds = now - started
        for handle, tokens in results:
            output = self._scheduler.advance(handle, tokens, now)
            if output is not None:
                report.outputs.append(output)
                if output.finish is not None:
                    self._engine.free(handle)

    def _fail(self, ids: Iterable[int], error: Exception, report: Report) -> None:
        report.failures += [(each, f"{type(error).__name__}: {error}") for each in ids]
        self._free(ids)

    def _free(self, ids: Iterable[int]) -> None:
        for sequence in self._scheduler.drop(ids):
            self._engine.free(sequence.handle)
