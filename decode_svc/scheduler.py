"""The scheduler of decode: it gives slots to sequences, and decides when each one ends. Pure; engine thread only.

    add ──▶ waiting ──admit──▶ running ──record_tokens──▶ ended
               └───────┬──────────┘
                 drop, preempt

Drafts would not begin here, but in `EngineSequence.next_positions` (`baton.engine.contract`).

Sequences get slots in the order in which they became ready. A waiting sequence already has its KV in its pages, so
admitting it costs no transfer. Its pages have room for its first outputs. When it needs more, it gets pages before the
step that needs them. If too few are left, the youngest sequence is preempted: it ends here, and its router replays its
request, with the tokens that it has, as a new attempt. A request counts as older with each attempt.

Why every request ends.

- No request is replayed for ever: prefill samples a token of every choice in each attempt, and outputs are finite.
- The oldest sequence goes on. It is preempted only if no other sequence is left. Then the other pages belong to
  reservations and to contexts of pending choices. The reservations become sequences, or end at their deadlines. The
  choices are forked one after the other (`decode_svc.admission`).
- A replay comes back only when its pages are free beside those that the batch needs for ROOM_TOKENS more tokens, or to
  its end: admission leaves these pages to the batch. So replays and the batch do not push each other out step by step.
- Each request fits if it has the whole pool: admission has checked that.

A sequence that is preempted takes the other choices of its attempt with it. They are replayed as attempts of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.engine.contract import EngineSequence, EngineSpec, KvHandle
from baton.kv.hashing import RollingBlockHasher
from baton.request import DecodeTimings, FinishReason, SequenceState, TokenInfo, finish_reason

ROOM_TOKENS = 64
"""After a preemption, admission leaves each sequence of the batch room for this many tokens."""


class DecodeSequence(EngineSequence):
    """A choice whose KV is in its pages; times are in seconds.

    `order_key` is that of its attempt: an older one has a smaller key. `hasher` hashes its blocks, and is None if they
    must not be published. `reported` is the number of outputs that the router has, counting those from prefill.
    """

    __slots__ = (
        "fetch_ms",
        "hasher",
        "id",
        "inserted_at",
        "order_key",
        "ready_at",
        "reported",
        "request_id",
        "timings",
    )

    def __init__(
        self,
        number: int,
        handle: KvHandle,
        state: SequenceState,
        *,
        fetch_ms: float = 0.0,
        ready_at: float = 0.0,
        order_key: tuple[int, int] = (0, 0),
        hasher: RollingBlockHasher | None = None,
        request_id: str = "",
    ) -> None:
        """`number` is the id of the sequence."""
        super().__init__(handle, state)
        self.id = number
        self.fetch_ms, self.ready_at = fetch_ms, ready_at
        self.order_key = order_key
        self.hasher = hasher
        self.request_id = request_id
        self.inserted_at = 0.0
        self.reported = len(state.output_ids)
        self.timings: DecodeTimings | None = None

    @property
    def digests(self) -> Sequence[bytes]:
        """Digests of its blocks whose KV is final; empty if they must not be published."""
        return self.hasher.digests if self.hasher is not None else ()

    @property
    def sort_key(self) -> tuple[tuple[int, int], int]:
        """Sort key, from the oldest sequence to the youngest."""
        return self.order_key, self.id


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step for one sequence, beginning with output number `output_index`.

    The first StepOutput of a sequence has `timings`. The last one has the `digests` of its blocks.
    """

    id: int
    output_index: int
    tokens: Sequence[TokenInfo]
    finish: FinishReason | None
    timings: DecodeTimings | None
    digests: Sequence[bytes] = ()


@dataclass(slots=True)
class BatchPages:
    """Pages that are kept for the batch after a preemption. The engine thread sets them; any thread may read them.

    `kept_pages` is the number of free pages that nobody else may take, because the batch needs them for ROOM_TOKENS
    more tokens. It is 0 unless a sequence was preempted, and 0 again as soon as there is room for the batch and for the
    replay of that sequence, which takes `replay_pages`.
    """

    kept_pages: int = 0
    replay_pages: int = 0


class DecodeScheduler:
    """Gives `spec.slots` slots to sequences, in the order in which they became ready."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._waiting: dict[DecodeSequence, None] = {}
        self._running: dict[EngineSequence, DecodeSequence] = {}

    @property
    def waiting(self) -> int:
        """Number of sequences that have not had a slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is no sequence."""
        return not (self._running or self._waiting)

    @property
    def batch(self) -> list[DecodeSequence]:
        """The sequences with a slot."""
        return list(self._running.values())

    @property
    def sequences(self) -> list[DecodeSequence]:
        """All sequences."""
        return [*self._waiting, *self._running.values()]

    def add(self, sequences: Iterable[DecodeSequence]) -> None:
        """Queue sequences for a slot."""
        self._waiting.update(dict.fromkeys(sequences))

    def admit(self, now: float) -> list[DecodeSequence]:
        """Give free slots to the sequences that have waited longest; the caller inserts them before the next step."""
        admitted = []
        while self._waiting and len(self._running) < self._spec.slots:
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.inserted_at = now
            self._running[first] = first
            admitted.append(first)
        return admitted

    def sequences_to_extend(self) -> list[DecodeSequence]:
        """Running sequences whose pages have no room for the next tokens, oldest first."""
        short = [each for each in self._running.values() if each.handle.capacity < each.next_positions.stop]
        return sorted(short, key=lambda each: each.sort_key)

    def find_running(self, sequence: EngineSequence) -> DecodeSequence | None:
        """The DecodeSequence of an engine's sequence; None if it is not in the batch any more."""
        return self._running.get(sequence)

    def youngest(self) -> DecodeSequence:
        """The youngest sequence; there must be one."""
        return max(self.sequences, key=lambda each: each.sort_key)

    def missing_pages(self) -> int:
        """Number of pages that the batch lacks to run for ROOM_TOKENS tokens, or to its end if that is sooner."""
        pages_for = self._spec.pages_for
        return sum(
            max(self._target_pages(each) - pages_for(each.handle.capacity), 0) for each in self._running.values()
        )

    def record_tokens(self, sequence: EngineSequence, tokens: Sequence[TokenInfo], now: float) -> StepOutput | None:
        """Record the tokens that a sequence got in a step; returns those up to the token that ends the sequence.

        Returns None if there are no tokens, or the sequence has left the batch. If the sequence ends, it loses its
        slot, and the caller must free its handle.
        """
        running = self._running.get(sequence)
        if running is None or not tokens:
            return None
        first = running.reported
        taken, finish = self._finish(running, first, len(tokens))
        running.reported += taken
        timings = None
        if running.timings is None:
            slot_wait_ms = (running.inserted_at - running.ready_at) * 1e3
            timings = running.timings = DecodeTimings(fetch_ms=running.fetch_ms, slot_wait_ms=slot_wait_ms)
        if running.hasher is not None:
            running.hasher.extend(token.token_id for token in tokens[:taken])
        digests: Sequence[bytes] = ()
        if finish is not None:
            del self._running[running]
            digests = running.digests
        return StepOutput(running.id, first, tokens[:taken], finish, timings, digests)

    def drop(self, ids: Iterable[int]) -> list[DecodeSequence]:
        """Remove sequences from the queue and from the batch; returns those that had not ended yet."""
        wanted = set(ids)
        dropped = [each for each in self.sequences if each.id in wanted]
        for each in dropped:
            if each in self._running:
                del self._running[each]
            else:
                del self._waiting[each]
        return dropped

    def _target_pages(self, sequence: DecodeSequence) -> int:
        """Number of pages that a sequence needs for ROOM_TOKENS more tokens, or to its end if that is sooner."""
        most = self._spec.max_model_len
        if sequence.state.params.max_tokens is not None:
            most = min(most, len(sequence.state.prompt_ids) + sequence.state.params.max_tokens)
        return self._spec.pages_for(min(sequence.length + ROOM_TOKENS, most))

    def _finish(self, sequence: DecodeSequence, first: int, count: int) -> tuple[int, FinishReason | None]:
        """Number of the `count` outputs from index `first` on that the sequence keeps, and the reason if it ends."""
        outputs, prompt = sequence.output_ids, len(sequence.state.prompt_ids)
        for taken in range(1, count + 1):
            end = first + taken
            until = outputs if end == len(outputs) else outputs[:end]
            reason = finish_reason(sequence.state.params, until, self._spec.eos_token_ids)
            if reason is not None:
                return taken, reason
            if prompt + end >= self._spec.max_model_len:
                return taken, FinishReason.LENGTH
        return count, None
