"""The sequences that wait for a slot, run, or are paused, and the end of each. Pure; used by the engine thread
alone.

    add ──▶ waiting ──admit──▶ running ──advance──▶ ended
               │          pause ▼ ▲ resume            ▲
               │                paused                │
               └────────── drop ──┴───────────────────┘

Sequences get slots in the order in which they became ready. A waiting sequence already has its KV in its pages, so
admitting it costs no transfer. Its pages have room for its first outputs. When it needs more, it gets one page before
the step that needs it. If no page is left, the youngest running sequence is paused: it gives back its slot and its
pages.

Why every sequence ends. Paused sequences are resumed before waiting ones are admitted, the oldest first, as soon as
there is a slot and enough free pages for the whole batch to run for RESUME_TOKENS steps or to its end. So every resume
is followed by progress, and the oldest sequence is never paused while a younger one could be. While the oldest paused
sequence can't be resumed, waiting sequences get the slots: they hold their pages anyway, and free them only by running.
While any sequence is paused, no reservation is granted, and no choice is forked as long as any sequence makes progress.
So the number of free pages only grows. If nothing makes progress any more, the used pages belong to contexts that are
kept for pending choices. These choices are then forked one after the other, and run or are paused too, until no context
is kept (`decode_svc.admission`). In the end the oldest sequence has the whole pool, which is large enough for it:
admission has checked that.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from baton.engine.contract import EngineSpec, KvHandle
from baton.request import DecodeTimings, FinishReason, TokenInfo, finish_reason
from decode_svc.sequence import Sequence

RESUME_TOKENS = 64
"""Steps that each sequence of the batch must have room for before a paused sequence may join it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step for one sequence; `timings` come with its first output, `digests` of its blocks with its
    last.
    """

    id: int
    output_index: int
    tokens: abc.Sequence[TokenInfo]
    finish: FinishReason | None
    timings: DecodeTimings | None
    digests: abc.Sequence[bytes] = ()


class DecodeScheduler:
    """Gives `spec.slots` slots to sequences, in the order in which they became ready."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._paused: dict[int, Sequence] = {}
        self._by_handle: dict[int, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Number of sequences that have not had a slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._running)

    @property
    def paused(self) -> int:
        """Number of paused sequences; may be called from any thread."""
        return len(self._paused)

    def add(self, sequences: abc.Iterable[Sequence]) -> None:
        """Queue sequences for a slot."""
        self._waiting.update((sequence.id, sequence) for sequence in sequences)

    def is_idle(self, free_pages: int) -> bool:
        """Whether nothing can be done before a sequence, a drop, or pages come."""
        return not (self._running or self._waiting or self.next_to_resume(free_pages))

    def admit(self, now: float) -> list[Sequence]:
        """Give the free slots to the sequences that have waited longest; the caller must insert them before the next
        step.
        """
        admitted = []
        while self._waiting and len(self._running) < self._spec.slots:
            sequence = self._waiting.pop(next(iter(self._waiting)))
            sequence.inserted_at = now
            self._run(sequence)
            admitted.append(sequence)
        return admitted

    def sequences_to_extend(self) -> list[Sequence]:
        """Running sequences whose pages have no room for the next token, oldest first."""
        short = [each for each in self._running.values() if each.handle.capacity < each.length + each.unread]
        return sorted(short, key=lambda each: each.rank)

    def is_running(self, sequence: Sequence) -> bool:
        """Whether the sequence has a slot."""
        return sequence.id in self._running

    def pause(self) -> Sequence:
        """Take the youngest sequence out of the batch, which must not be empty; the caller pauses its handle."""
        sequence = max(self._running.values(), key=lambda each: each.rank)
        self._leave(sequence)
        sequence.paused_pages = self._spec.pages_for(sequence.handle.capacity)
        self._paused[sequence.id] = sequence
        return sequence

    def next_to_resume(self, free_pages: int) -> Sequence | None:
        """The oldest paused sequence, if a slot is free for it and pages suffice for all to make progress."""
        if not self._paused or len(self._running) >= self._spec.slots:
            return None
        sequence = min(self._paused.values(), key=lambda each: each.rank)
        return (
            sequence
            if self.missing_pages() + max(self._target_pages(sequence), sequence.paused_pages) <= free_pages
            else None
        )

    def missing_pages(self) -> int:
        """Pages that the batch needs beyond its own, to run for RESUME_TOKENS steps or to its end."""
        has = self._spec.pages_for
        return sum(max(self._target_pages(each) - has(each.handle.capacity), 0) for each in self._running.values())

    def resume(self, sequence: Sequence) -> None:
        """Put a paused sequence back into the batch."""
        del self._paused[sequence.id]
        self._run(sequence)

    def mark_launched(self) -> int:
        """Count a launched step as unread for each running sequence; returns the number of these sequences."""
        for each in self._running.values():
            each.unread += 1
        return len(self._running)

    def find(self, handle: KvHandle) -> Sequence | None:
        """The running sequence with this handle, if there is one."""
        return self._by_handle.get(id(handle))

    def advance(self, handle: KvHandle, tokens: abc.Sequence[TokenInfo], now: float) -> StepOutput | None:
        """Append the tokens of a step, up to the one that ends the sequence; None if there is nothing to report.

        A sequence that ended has lost its slot; the caller must free its handle.
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
        """Remove sequences from wherever they are; returns those that had not ended yet."""
        dropped = []
        for each in ids:
            sequence = self._waiting.pop(each, None) or self._paused.pop(each, None)
            if sequence is None and (sequence := self._running.get(each)) is not None:
                self._leave(sequence)
            if sequence is not None:
                dropped.append(sequence)
        return dropped

    def running_ids(self) -> list[int]:
        """Ids of the running sequences."""
        return list(self._running)

    def all_ids(self) -> list[int]:
        """Ids of all sequences."""
        return [*self._waiting, *self._running, *self._paused]

    def _run(self, sequence: Sequence) -> None:
        self._running[sequence.id] = self._by_handle[id(sequence.handle)] = sequence

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        del self._by_handle[id(sequence.handle)]

    def _target_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence needs to run for RESUME_TOKENS steps or to its end."""
        most = self._spec.max_model_len
        if sequence.state.params.max_tokens is not None:
            most = min(most, len(sequence.state.prompt_ids) + sequence.state.params.max_tokens)
        return self._spec.pages_for(min(sequence.length + RESUME_TOKENS, most))

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        reason = finish_reason(sequence.state.params, sequence.output_ids, self._spec.eos_token_ids)
        if reason is None and sequence.length >= self._spec.max_model_len:
            return FinishReason.LENGTH
        return reason
