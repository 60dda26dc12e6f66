"""Which sequences wait for a slot, which run, and when each one ends. Pure; used by the engine thread alone.

    add ──▶ waiting ──admit──▶ running ──advance──▶ ended
               └────────── drop ──┴──────────────────▶

Slots go in the order of readiness: a sequence waits with its KV already in its pages, so that admitting it
costs no transfer. Its pages hold all that it may still generate, so a running sequence never runs out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.engine.contract import EngineSpec, KvHandle
from baton.request import FinishReason, SequenceState, TokenInfo, finish_reason
from decode_svc.messages import DecodeTimings


@dataclass(eq=False, slots=True)
class Decoding:
    """One choice with its KV in place; `output_ids` are all tokens chosen so far, times are in seconds."""

    id: int
    handle: KvHandle
    state: SequenceState
    output_ids: list[int]
    fetch_ms: float
    ready_at: float
    inserted_at: float = 0.0
    timings: DecodeTimings | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step yielded for one sequence; `timings` come with its first."""

    id: int
    output_index: int
    tokens: Sequence[TokenInfo]
    finish: FinishReason | None
    timings: DecodeTimings | None


class Scheduler:
    """Hands `spec.slots` slots to sequences, first ready first."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._waiting: dict[int, Decoding] = {}
        self._running: dict[int, Decoding] = {}
        self._by_handle: dict[int, Decoding] = {}

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def add(self, sequences: Iterable[Decoding]) -> None:
        """Queue sequences for a slot."""
        self._waiting.update((sequence.id, sequence) for sequence in sequences)

    def admit(self, now: float) -> list[Decoding]:
        """Give the free slots to those that have waited longest; to be inserted before the next step."""
        admitted = []
        while self._waiting and len(self._running) < self._spec.slots:
            sequence = self._waiting.pop(next(iter(self._waiting)))
            sequence.inserted_at = now
            self._running[sequence.id] = self._by_handle[id(sequence.handle)] = sequence
            admitted.append(sequence)
        return admitted

    def advance(self, handle: KvHandle, tokens: Sequence[TokenInfo], now: float) -> StepOutput | None:
        """Append a step's tokens, up to the one that ends the sequence; None when there is nothing to tell.

        A sequence that ended has lost its slot; its handle is the caller's to free.
        """
        sequence = self._by_handle.get(id(handle))
        if sequence is None or not tokens:
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
                first_step_ms=(now - sequence.inserted_at) * 1e3,
            )
        if finish is not None:
            self._leave(sequence)
        return StepOutput(sequence.id, first, tokens[:taken], finish, timings)

    def drop(self, ids: Iterable[int]) -> list[Decoding]:
        """Take sequences out, wherever they are; returns those that had not ended yet."""
        dropped = []
        for each in ids:
            sequence = self._waiting.pop(each, None)
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
        return [*self._waiting, *self._running]

    def _leave(self, sequence: Decoding) -> None:
        del self._running[sequence.id]
        del self._by_handle[id(sequence.handle)]

    def _finish(self, sequence: Decoding) -> FinishReason | None:
        reason = finish_reason(sequence.state.params, sequence.output_ids, self._spec.eos_token_ids)
        length = len(sequence.state.prompt_ids) + len(sequence.output_ids)
        if reason is None and length >= self._spec.max_model_len:
            return FinishReason.LENGTH
        return reason
