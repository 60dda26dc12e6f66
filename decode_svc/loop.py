"""The engine thread: resume, admit, make room, launch a step, read one, emit.

It sleeps on its inbox while it can do nothing, and looks into it before each step while it can. What a step yields
goes back in one `Report`, and what changed in the batch in one before it; a sequence that ended publishes its blocks
and frees its pages and its slot before that, so that the next step runs with the next sequence in its place. A step
that raises fails the sequences of its batch, and publishes nothing of theirs; nothing that was cached is trusted any
more, and the loop goes on only if the engine's pages still audit clean, else it raises and the worker is done. A
sequence that gets no token in a step fails alone; `baton.worker.faults` says when that is the worker's fault.

The step that is read is the one just launched, or one before it: `spec.steps_ahead` steps stay unread while there is a
batch, so that the device has the next one when this one is done. With a step ahead, a sequence that ends has been in
one step more, whose token is dropped. Nothing stays unread when the batch is empty, or when somebody has to be paused.

Before a step each sequence gets the page that its next token needs. If there is none, those that are held for no
request are given back, and unread steps are read, which may end sequences; if that is not enough, the youngest is
paused, and the youngest again, until there is one; if host memory can't take it either, it fails as preempted, and its
router replays it. A sequence that is alone and still can't grow is paused as well: what holds the pages then is on its
way here, or given up and draining, and `wake` tells when pages have returned.

The other side frees the handles of what it has ended at any time. What fails here because its handle is dead has not
failed: it was ended, and its drop is on the way.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import abc, deque
from dataclasses import dataclass, field

from baton.engine.contract import Engine, KvHandle, StepHandle
from baton.errors import NoToken, OutOfPages, Overloaded
from baton.lifecycle import State
from baton.request import TokenInfo
from baton.worker.faults import Faults
from baton.worker.progress import Progress
from decode_svc.messages import FailureKind
from decode_svc.scheduler import Scheduler, StepOutput
from decode_svc.sequence import Sequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """A sequence that failed, and why."""

    id: int
    kind: FailureKind
    message: str


@dataclass(slots=True)
class Report:
    """What a step brought, or the change of the batch before it: outputs, failed sequences, and the load after it.

    `states` tell in order which sequences joined the batch (DECODING) or were paused (PAUSED); `resumed` how many of
    them had been paused. `batch` and `seconds` are the step's sequences and duration, 0 when no step was read; a
    duration begins with the launch, or with the reading of the step before if that came later.
    """

    outputs: list[StepOutput] = field(default_factory=list)
    failures: list[Lost] = field(default_factory=list)
    states: list[tuple[int, State]] = field(default_factory=list)
    resumed: int = 0
    batch: int = 0
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    paused: int = 0


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be launched; its turn comes after those that could."""

    error: Exception

    def result(self) -> list[tuple[KvHandle, tuple[TokenInfo, ...] | NoToken]]:
        raise self.error


@dataclass(frozen=True, slots=True)
class _Launched:
    step: StepHandle
    batch: int
    at: float


@dataclass(frozen=True, slots=True)
class _Add:
    sequences: abc.Sequence[Sequence]


@dataclass(frozen=True, slots=True)
class _Drop:
    ids: abc.Sequence[int]


class _Wake:
    pass


class _Stop:
    pass


class DecodeLoop:
    """Runs the generation batch of one engine; `add`, `drop`, `wake` and `stop` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        emit: abc.Callable[[Report], object],
        clock: abc.Callable[[], float] = time.monotonic,
        reclaim: abc.Callable[[], bool] = lambda: False,
    ) -> None:
        """`reclaim` gives back pages that are held for no request, from this thread; True if there were any."""
        self._engine = engine
        self._progress = progress
        self._emit = emit
        self._clock = clock
        self._reclaim = reclaim
        self._scheduler = Scheduler(engine.spec)
        self._unread: deque[_Launched] = deque()
        self._read_at = 0.0
        self._inbox: queue.SimpleQueue[_Add | _Drop | _Wake | _Stop] = queue.SimpleQueue()
        self._gave_back = False
        self._faults = Faults()

    @property
    def short_of_pages(self) -> bool:
        """Whether a sequence had to leave for want of pages, and there is no room yet to take one on."""
        return self._gave_back or self._scheduler.paused > 0

    @property
    def paused(self) -> int:
        """Sequences that are paused at this moment."""
        return self._scheduler.paused

    def add(self, sequences: abc.Sequence[Sequence]) -> None:
        """Queue sequences whose KV is there; the loop frees their handles in the end."""
        self._inbox.put(_Add(sequences))

    def drop(self, ids: abc.Sequence[int]) -> None:
        """End sequences before the next step; those that have ended already are ignored."""
        self._inbox.put(_Drop(ids))

    def wake(self) -> None:
        """Pages have returned: paused sequences may go on."""
        if self._scheduler.paused:
            self._inbox.put(_Wake())

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
            self._abandon()
            self._progress.idle()

    def turn(self) -> bool:
        """Take in what has come, waiting for it when nothing can be done, then launch, read, emit; False to stop."""
        if not self._receive():
            return False
        changes = Report()
        self._resume(changes)
        self._admit(changes)
        self._make_room(changes)
        if changes.states or changes.failures:
            self._tell(changes)
        self._read(self._launch())
        return True

    def _tell(self, report: Report) -> None:
        report.running, report.waiting = self._scheduler.running, self._scheduler.waiting
        report.paused = self._scheduler.paused
        self._emit(report)

    def _receive(self) -> bool:
        """Take in all commands, waiting for one if there is nothing to do; False to stop."""
        free = self._free_pages()
        self._gave_back = self._gave_back and self._scheduler.wanted() > free
        idle = self._scheduler.idle(free) and not self._unread
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

    def _resume(self, report: Report) -> None:
        while (sequence := self._scheduler.resumable(self._free_pages())) is not None:
            try:
                self._engine.resume(sequence.handle)
            except Overloaded:
                # Somebody took the pages in between; their return will wake the loop.
                return
            except Exception as error:
                self._lose(sequence, error, report)
            else:
                self._scheduler.resume(sequence)
                report.states.append((sequence.id, State.DECODING))
                report.resumed += 1

    def _admit(self, report: Report) -> None:
        for sequence in self._scheduler.admit(self._clock()):
            try:
                self._engine.insert(sequence.handle, sequence.state)
            except Exception as error:
                self._lose(sequence, error, report)
            else:
                report.states.append((sequence.id, State.DECODING))

    def _make_room(self, report: Report) -> None:
        """Let every sequence of the batch have room for its next token, the oldest first."""
        for sequence in self._scheduler.short():
            while self._scheduler.runs(sequence) and not self._extend(sequence, report):
                if self._reclaim():
                    continue
                if self._unread:
                    self._read(0)
                else:
                    self._pause(report)

    def _extend(self, sequence: Sequence, report: Report) -> bool:
        """False when there is no page for it."""
        try:
            self._engine.extend(sequence.handle, sequence.length + sequence.unread)
        except OutOfPages:
            return False
        except Exception as error:
            self._lose(sequence, error, report)
        return True

    def _pause(self, report: Report) -> None:
        sequence = self._scheduler.pause()
        try:
            self._engine.pause(sequence.handle)
        except Overloaded as error:
            message = f"no page is left, and host memory is full: {error}"
            _log.warning("%s", message)
            self._gave_back = True
            self._engine.free(sequence.handle, sequence.digests)
            self._fail([sequence.id], FailureKind.PREEMPTED, message, report)
        except Exception as error:
            self._lose(sequence, error, report)
        else:
            report.states.append((sequence.id, State.PAUSED))

    def _launch(self) -> int:
        """Launch a step over the batch, if there is one; how many steps may stay unread now."""
        if not self._scheduler.running:
            return 0
        at, ahead = self._clock(), self._engine.spec.steps_ahead
        step: StepHandle
        try:
            step = self._engine.step()
        except Exception as error:
            step, ahead = _Failed(error), 0
        self._unread.append(_Launched(step, self._scheduler.launched(), at))
        return ahead

    def _read(self, keep: int) -> None:
        """Read the oldest steps until `keep` are unread, none if the batch becomes empty; emit after each, or once."""
        due = True
        while due:
            report = Report()
            if self._due(keep):
                self._take(self._unread.popleft(), report)
            self._tell(report)
            due = self._due(keep)

    def _due(self, keep: int) -> bool:
        return len(self._unread) > (keep if self._scheduler.running else 0)

    def _take(self, launched: _Launched, report: Report) -> None:
        report.batch, started = launched.batch, max(launched.at, self._read_at)
        try:
            results = launched.step.result()
        except Exception as error:
            _log.exception("a step over %d sequences failed", report.batch)
            self._unread.clear()
            self._engine.drop_cached()
            self._fail(self._scheduler.batch(), FailureKind.ENGINE, f"{type(error).__name__}: {error}", report)
            self._engine.audit()
            return
        now = self._read_at = self._clock()
        report.seconds = now - started
        lost = [(handle, found) for handle, found in results if isinstance(found, NoToken)]
        if len(lost) < len(results):
            self._faults.computed()
        for handle, reason in lost:
            self._lose_alone(handle, reason, report, counts=len(lost) == len(results))
        for handle, tokens in results:
            if isinstance(tokens, NoToken):
                continue
            output = self._scheduler.advance(handle, tokens, now)
            if output is not None:
                report.outputs.append(output)
                if output.finish is not None:
                    self._engine.free(handle, output.digests)

    def _abandon(self) -> None:
        """Wait for what is unread, which nobody wants."""
        while self._unread:
            with contextlib.suppress(Exception):
                self._unread.popleft().step.result()

    def _free_pages(self) -> int:
        """Pages that could be had, as far as anybody is in need of some."""
        if not self.short_of_pages:
            return 0
        stats = self._engine.stats()
        return stats.free + stats.cached

    def _lose(self, sequence: Sequence, error: Exception, report: Report) -> None:
        """The engine refused a sequence: a fault, unless it was ended meanwhile."""
        if not sequence.handle.alive:
            self._free([sequence.id])
            return
        _log.error("%s can't go on", sequence.handle.owner, exc_info=error)
        self._fail([sequence.id], FailureKind.ENGINE, f"{type(error).__name__}: {error}", report)

    def _lose_alone(self, handle: KvHandle, error: NoToken, report: Report, counts: bool) -> None:
        """A sequence got no token; raises if that `counts` against the worker, and is one too many."""
        sequence = self._scheduler.find(handle)
        if sequence is None:
            return
        self._engine.retract(handle)
        self._lose(sequence, error, report)
        if counts:
            self._faults.failed(sequence.request_id)

    def _fail(self, ids: abc.Iterable[int], kind: FailureKind, message: str, report: Report) -> None:
        report.failures += [Lost(each, kind, message) for each in ids]
        self._free(ids)

    def _free(self, ids: abc.Iterable[int]) -> None:
        for sequence in self._scheduler.drop(ids):
            self._engine.free(sequence.handle)
