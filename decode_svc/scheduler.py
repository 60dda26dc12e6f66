"""The sequences that wait for a slot and those that run, and the end of each. Pure; used by the engine thread alone.

    add ──▶ waiting ──admit──▶ running ──advance──▶ ended
               └───────┬──────────┘
                 drop, preempt

Sequences get slots in the order in which they became ready. A waiting sequence already has its KV in its pages, so
admitting it costs no transfer. Its pages have room for its first outputs. When it needs more, it gets one page before
the step that needs it. If no page is left, the youngest sequence is preempted: it ends here, and its router replays
its request, with the tokens that it has, as a new attempt. A request counts as older with each attempt.

Why every request ends.

- No request is replayed for ever: prefill samples a token of every choice in each attempt, and outputs are finite.
- The oldest sequence goes on. It is preempted only if no other sequence is left. Then the other pages belong to
  reservations, which become sequences or end at their deadlines, and to contexts that are kept for pending choices,
  which are then forked one after the other (`decode_svc.admission`).
- A replay comes back only when its pages are free beside those that the batch needs for ROOM_TOKENS more steps, or to
  its end: until then nothing is granted or forked. So replays and the batch do not push each other out step by step.
- Each request fits if it has the whole pool: admission has checked that.

A sequence that is preempted takes the other choices of its attempt with it. They are replayed as attempts of their own.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from baton.engine.contract import EngineSpec, KvHandle
from baton.request import FinishReason, TokenInfo, finish_reason
from baton.worker.messages import DecodeTimings
from decode_svc.sequence import Sequence

ROOM_TOKENS = 64
"""After a preemption, each sequence of the batch must have room for so many steps before anything is granted."""


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
        self._by_handle: dict[int, Sequence] = {}

    @property
    def waiting(self) -> int:
        """Number of sequences that have not had a slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._running)

    def add(self, sequences: abc.Iterable[Sequence]) -> None:
        """Queue sequences for a slot."""
        self._waiting.update((sequence.id, sequence) for sequence in sequences)

    @property
    def idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self._running or self._waiting)

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

    def youngest(self) -> Sequence:
        """The youngest sequence; there must be one."""
        return max([*self._waiting.values(), *self._running.values()], key=lambda each: each.rank)

    def missing_pages(self) -> int:
        """Pages that the batch needs beyond its own, to run for ROOM_TOKENS steps or to its end."""
        has = self._spec.pages_for
        return sum(max(self._target_pages(each) - has(each.handle.capacity), 0) for each in self._running.values())

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
            sequence = self._waiting.pop(each, None)
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
        return [*self._waiting, *self._running]

    def _run(self, sequence: Sequence) -> None:
        self._running[sequence.id] = self._by_handle[id(sequence.handle)] = sequence

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        del self._by_handle[id(sequence.handle)]

    def _target_pages(self, sequence: Sequence) -> int:
        """Pages that the sequence needs to run for ROOM_TOKENS steps or to its end."""
        most = self._spec.max_model_len
        if sequence.state.params.max_tokens is not None:
            most = min(most, len(sequence.state.prompt_ids) + sequence.state.params.max_tokens)
        return self._spec.pages_for(min(sequence.length + ROOM_TOKENS, most))

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        reason = finish_reason(sequence.state.params, sequence.output_ids, self._spec.eos_token_ids)
        if reason is None and sequence.length >= self._spec.max_model_len:
            return FinishReason.LENGTH
        return reason
