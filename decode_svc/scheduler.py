"""Which sequences wait for a slot, run, or are paused, and when each one ends. Pure; used by the engine thread alone.

    add ──▶ waiting ──admit──▶ running ──advance──▶ ended
               │          pause ▼ ▲ resume            ▲
               │                paused                │
               └────────── drop ──┴───────────────────┘

Slots go in the order of readiness: a sequence waits with its KV already in its pages, so that admitting it costs no
transfer. Its pages hold its first outputs; for more it grows, a page at a time, before the step that needs it. When no
page is left the youngest running sequence is paused, and gives back slot and pages.

Why everything ends: paused sequences come back oldest first, and before waiting ones, as soon as there is a slot, and
room in the pool for the whole batch to go on for RESUME_TOKENS steps or to its end. So each return is paid for with
progress, and the oldest is never paused while another one could be. While it can't come back, waiting ones take the
slots: they hold their pages anyhow, and give them back only by running. While anything is paused no reservation is
granted, and no choice is forked as long as anything moves, so pages only come free. When nothing moves any more, the
pages in use are those that pending choices keep of their contexts: these choices are then forked one after the other,
and run, or are paused as well, until no context is kept (`decode_svc.admission`). In the end the oldest has the pool
for itself, which by the terms of its reservation is large enough.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from baton.engine.contract import EngineSpec, KvHandle
from baton.request import FinishReason, TokenInfo, finish_reason
from baton.worker.messages import DecodeTimings
from decode_svc.sequence import Sequence

RESUME_TOKENS = 64
"""Steps that there must be room for, for each sequence of the batch, before a paused one joins it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step yielded for one sequence; `timings` come with its first, `digests` of its blocks with its last."""

    id: int
    output_index: int
    tokens: abc.Sequence[TokenInfo]
    finish: FinishReason | None
    timings: DecodeTimings | None
    digests: abc.Sequence[bytes] = ()


class Scheduler:
    """Hands `spec.slots` slots to sequences, first ready first."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._paused: dict[int, Sequence] = {}
        self._by_handle: dict[int, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Sequences that have not had a slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def paused(self) -> int:
        """Sequences that were taken out of the batch; may be asked from any thread."""
        return len(self._paused)

    def add(self, sequences: abc.Iterable[Sequence]) -> None:
        """Queue sequences for a slot."""
        self._waiting.update((sequence.id, sequence) for sequence in sequences)

    def idle(self, free_pages: int) -> bool:
        """Whether there is nothing to do until something comes: a sequence, a drop, or pages."""
        return not (self._running or self._waiting or self.resumable(free_pages))

    def admit(self, now: float) -> list[Sequence]:
        """Give the free slots to those that have waited longest; to be inserted before the next step."""
        admitted = []
        while self._waiting and len(self._running) < self._spec.slots:
            sequence = self._waiting.pop(next(iter(self._waiting)))
            sequence.inserted_at = now
            self._run(sequence)
            admitted.append(sequence)
        return admitted

    def short(self) -> list[Sequence]:
        """Running sequences whose pages lack room for the next token, oldest first."""
        lacking = [each for each in self._running.values() if each.handle.capacity < each.length + each.unread]
        return sorted(lacking, key=lambda each: each.rank)

    def runs(self, sequence: Sequence) -> bool:
        """Whether it has a slot."""
        return sequence.id in self._running

    def pause(self) -> Sequence:
        """Take the youngest out of the batch, which must not be empty; its handle is the caller's to pause."""
        sequence = max(self._running.values(), key=lambda each: each.rank)
        self._leave(sequence)
        sequence.held = self._spec.pages_for(sequence.handle.capacity)
        self._paused[sequence.id] = sequence
        return sequence

    def resumable(self, free_pages: int) -> Sequence | None:
        """The oldest paused sequence, if there is a slot for it and room for all to make progress."""
        if not self._paused or len(self._running) >= self._spec.slots:
            return None
        sequence = min(self._paused.values(), key=lambda each: each.rank)
        return sequence if self.wanted() + max(self._goal(sequence), sequence.held) <= free_pages else None

    def wanted(self) -> int:
        """Pages that the batch lacks to go on for RESUME_TOKENS steps, or to its end."""
        has = self._spec.pages_for
        return sum(max(self._goal(each) - has(each.handle.capacity), 0) for each in self._running.values())

    def resume(self, sequence: Sequence) -> None:
        """Take a paused sequence back into the batch."""
        del self._paused[sequence.id]
        self._run(sequence)

    def launched(self) -> int:
        """A step over the running sequences, of which this is the number, is on its way: each has one more unread."""
        for each in self._running.values():
            each.unread += 1
        return len(self._running)

    def find(self, handle: KvHandle) -> Sequence | None:
        """The running sequence with this handle, if it has not left."""
        return self._by_handle.get(id(handle))

    def advance(self, handle: KvHandle, tokens: abc.Sequence[TokenInfo], now: float) -> StepOutput | None:
        """Append a step's tokens, up to the one that ends the sequence; None when there is nothing to tell.

        A sequence that ended has lost its slot; its handle is the caller's to free.
        """
        sequence = self._by_handle.get(id(handle))
        if sequence is None:
            return None
        sequence.unread -= 1
        if not tokens:
            return None
        first, finish, taken = len(sequence.output_ids), None, 0
        while taken < len(tokens) and finish is None:
            sequence.output_ids.append(tokens[taken].token_id)
            taken += 1
            finish = self._finish(sequence)
        timings = None
        if sequence.timings is None:
            timings = sequence.timings = DecodeTimings(
                fetch_ms=sequence.fetch_ms,
                slot_wait_ms=(sequence.inserted_at - sequence.ready_at) * 1e3,
            )
        if sequence.hasher is not None:
            sequence.hasher.extend(token.token_id for token in tokens[:taken])
        digests: abc.Sequence[bytes] = ()
        if finish is not None:
            self._leave(sequence)
            digests = sequence.digests
        return StepOutput(sequence.id, first, tokens[:taken], finish, timings, digests)

    def drop(self, ids: abc.Iterable[int]) -> list[Sequence]:
        """Take sequences out, wherever they are; returns those that had not ended yet."""
        dropped = []
        for each in ids:
            sequence = self._waiting.pop(each, None) or self._paused.pop(each, None)
            if sequence is None and (sequence := self._running.get(each)) is not None:
                self._leave(sequence)
            if sequence is not None:
                dropped.append(sequence)
        return dropped

    def batch(self) -> list[int]:
        """Ids of the running sequences."""
        return list(self._running)

    def all(self) -> list[int]:
        """Ids of all sequences."""
        return [*self._waiting, *self._running, *self._paused]

    def _run(self, sequence: Sequence) -> None:
        self._running[sequence.id] = self._by_handle[id(sequence.handle)] = sequence

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        del self._by_handle[id(sequence.handle)]

    def _goal(self, sequence: Sequence) -> int:
        """Pages with which it can go on for RESUME_TOKENS steps, or to its end."""
        most = self._spec.max_model_len
        if sequence.state.params.max_tokens is not None:
            most = min(most, len(sequence.state.prompt_ids) + sequence.state.params.max_tokens)
        return self._spec.pages_for(min(sequence.length + RESUME_TOKENS, most))

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        reason = finish_reason(sequence.state.params, sequence.output_ids, self._spec.eos_token_ids)
        if reason is None and sequence.length >= self._spec.max_model_len:
            return FinishReason.LENGTH
        return reason
