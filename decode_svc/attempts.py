"""Attempts from reservation to end, and the pages they hold. Pure; used on the asyncio loop only.

    take_pages ──▶ RESERVED ─start─▶ TRANSFERRING ─commit─▶ SLOT_WAIT ─▶ DECODING ─(last choice ended)─▶ ENDED
                       └──────────────────┴─────────────────────┴─────────── end ─────────────────────────▶

A reservation takes pages for the context and for the first outputs of one choice, however many choices there are. At
the commit the first choice becomes a sequence. Further choices are pending: a handle of their own (`context_handle`)
keeps the pages of the context, and each choice is forked from it when a slot is free (`decode_svc.admission`). The last
choice takes over that handle. The choices share all pages of the context, except the last page if the context fills it
only in part. The reservation includes a page for a copy of that one (`spare`), unless the first choice alone needs the
whole pool. Then the commit may raise OutOfPages, and the attempt is preempted.

The engine thread takes more pages as generation goes on. A request that could not be generated even with the whole pool
is refused here. Handles are freed here too, in any state of the attempt. This is safe at any time: if the engine thread
uses the pages at that moment, they return to the pool when it is done.

If leading blocks of the context are published in the pool, the reservation pins them. They are shared with their other
owners, and not transferred. Their digests come from the router, so `check_handoff` compares them with the real ones.
The worker publishes the blocks of the context before the commit, so that the next request finds them while this one
runs. The end of each sequence publishes the blocks of its output. Converted KV is never published, because a digest
stands for KV exactly as it was computed.

An attempt is DECODING while one of its choices is in the batch, and in SLOT_WAIT if all its choices wait for a slot or
are pending.
"""

from __future__ import annotations

import itertools
import math
from collections import abc
from dataclasses import dataclass, field

from baton.engine.contract import Engine, EngineSpec, KvHandle
from baton.errors import EngineError, IncompleteTransfer, OutOfPages
from baton.kv.hashing import RollingBlockHasher, chain_root
from baton.ledger import LedgerEntry
from baton.lifecycle import Lifecycle, State
from baton.request import FirstToken, Handoff, SequenceState, check_token_ids, join_ids
from decode_svc.messages import AttemptKey, Failure, FailureKind, Reserve
from decode_svc.reservation import ReservationSize
from decode_svc.scheduler import DecodeSequence


@dataclass(frozen=True, slots=True)
class PublishedBlocks:
    """Digests of the blocks that a sequence published at its end; the first `context_blocks` belong to its context."""

    owner: str
    digests: abc.Sequence[bytes]
    context_blocks: int

    @property
    def new(self) -> int:
        """Number of blocks after the context."""
        return max(len(self.digests) - self.context_blocks, 0)


@dataclass(slots=True)
class ActiveChoice:
    """A choice with a sequence: it waits for a slot or decodes. `since` is the time of the last change of `state`."""

    sequence: DecodeSequence
    since: float
    state: State = State.SLOT_WAIT


@dataclass(eq=False, slots=True)
class PendingChoices:
    """The choices of an attempt that are not forked yet: first tokens by choice index, and the handle of the context.

    `since` is the time of the commit. `fetch_ms` is the duration of the transfer in milliseconds.
    """

    context_handle: KvHandle
    first_tokens: dict[int, FirstToken]
    handoff: Handoff
    hasher: RollingBlockHasher | None
    fetch_ms: float
    since: float


@dataclass(eq=False, slots=True)
class DecodeAttempt:
    """An attempt on this worker, owned by a session.

    `tokens` is the capacity of one choice's pages at the start, in tokens: the context and the first outputs. Attempts
    are ordered by `order_key`, the oldest first. A later attempt at a request counts as older than all first attempts,
    so that a request that was preempted is not the first to be preempted again. `choices` has the choices with a
    sequence, by index; `pending` has those that wait to be forked.
    """

    session_number: int
    order_key: tuple[int, int]
    reservation: Reserve
    tokens: int
    handle: KvHandle
    spare: KvHandle | None
    lifecycle: Lifecycle
    reserved_at: float
    cancelled: set[int] = field(default_factory=set)
    choices: dict[int, ActiveChoice] = field(default_factory=dict)
    pending: PendingChoices | None = None
    prefix_transfer_id: str = ""
    """The transfer id of the export of its pinned prefix, or an empty string."""
    in_place_transfer_id: str = ""
    """The id of the transfer by which its prompt is computed in its own pages, or an empty string."""
    has_output: bool = False
    """Whether the worker has sent a token of it."""

    @property
    def key(self) -> AttemptKey:
        """Its name within the session."""
        return self.reservation.key

    @property
    def committed(self) -> bool:
        """Whether its KV is complete, so that its handles belong to sequences."""
        return self.lifecycle.state in (State.SLOT_WAIT, State.DECODING)

    @property
    def pending_choices(self) -> int:
        """Number of choices that are still to be forked."""
        return len(self.pending.first_tokens) if self.pending is not None else 0

    @property
    def handles(self) -> list[KvHandle]:
        """All handles that it holds."""
        if not self.committed:
            return [self.handle] if self.spare is None else [self.handle, self.spare]
        own = [choice.sequence.handle for choice in self.choices.values()]
        return own if self.pending is None else [*own, self.pending.context_handle]

    def overdue_failure(self) -> Failure:
        """The failure of an attempt that stayed in its state for too long."""
        lifecycle = self.lifecycle
        if lifecycle.is_request_deadline():
            given = lifecycle.deadline - self.reserved_at
            message = f"{self.key} was {lifecycle.state.value} at its deadline, {given:.3g} s after its reservation"
            return Failure(FailureKind.DEADLINE, message)
        message = f"{self.key} was still {lifecycle.state.value} after {lifecycle.deadline - lifecycle.since:g} s"
        if lifecycle.state is State.TRANSFERRING:
            message += ", prefill included (--fetch-timeout-s)"
        # The request's deadline has not passed, so another attempt may follow.
        return Failure(FailureKind.TRANSFER, message)


def ledger_entries(attempts: abc.Iterable[DecodeAttempt], engine: Engine, now: float) -> list[LedgerEntry]:
    """Make one ledger entry for each handle of the attempts; `now` is a time on their clock."""
    spec = engine.spec
    page_bytes = spec.page_size * spec.kv_format.token_bytes

    def entry(attempt: DecodeAttempt, handle: KvHandle, state: State, since: float) -> LedgerEntry:
        pages = spec.pages_for(handle.capacity)
        deadline = attempt.lifecycle.deadline
        return LedgerEntry(
            owner=handle.owner,
            kind="kv",
            state=state.value,
            pages=pages,
            bytes=pages * page_bytes,
            age_s=now - since,
            deadline_s=None if math.isinf(deadline) else deadline - now,
        )

    entries = []
    for attempt in attempts:
        if attempt.committed:
            choices = attempt.choices.values()
            entries += [entry(attempt, each.sequence.handle, each.state, each.since) for each in choices]
            if attempt.pending is not None:
                entries.append(entry(attempt, attempt.pending.context_handle, State.SLOT_WAIT, attempt.pending.since))
        else:
            lifecycle = attempt.lifecycle
            entries += [entry(attempt, each, lifecycle.state, lifecycle.since) for each in attempt.handles]
    return entries


def _check_fields(spec: EngineSpec, reservation: Reserve, handoff: Handoff) -> None:
    """Check that a handoff fits the reservation; raises IncompleteTransfer or InvalidRequest.

    The token ids of its context are not checked here, because they were checked when the handoff was decoded.
    """
    choices = {first.choice_index for first in handoff.first_tokens}
    new_tokens = (handoff.params.max_tokens or 0) - len(handoff.output_ids)
    for what, seen, expected in (
        ("attempt", f"{handoff.request_id}/{handoff.attempt}", str(reservation.key)),
        ("context", len(handoff.prompt_ids) + len(handoff.output_ids), reservation.context_tokens),
        ("first tokens", len(handoff.first_tokens), reservation.choices),
        ("choices", len(choices), reservation.choices),
    ):
        if seen != expected:
            raise IncompleteTransfer(f"{reservation.key}: the handoff's {what} is {seen}, reserved was {expected}")
    if not 1 <= new_tokens <= reservation.max_new_tokens:
        raise IncompleteTransfer(
            f"{reservation.key}: the handoff allows {new_tokens} new tokens, reserved was {reservation.max_new_tokens}"
        )
    handoff.params.check_vocabulary(spec.vocab_size)
    firsts = [first.token.token_id for first in handoff.first_tokens]
    check_token_ids("first_tokens", firsts, spec.vocab_size)


class Attempts:
    """All live attempts of a worker; times are in seconds on the caller's clock.

    `on_published` is called with the blocks that a sequence has published at its end. `shares_kv` is False if fetched
    KV is converted: converted KV is never published.
    """

    def __init__(
        self,
        engine: Engine,
        on_published: abc.Callable[[PublishedBlocks], object] = lambda _: None,
        *,
        shares_kv: bool = True,
    ) -> None:
        self._engine = engine
        self._on_published = on_published
        self._shares_kv = shares_kv
        self._live: dict[tuple[int, AttemptKey], DecodeAttempt] = {}
        self._owners: dict[int, tuple[DecodeAttempt, int]] = {}
        self._coming: dict[DecodeAttempt, int] = {}
        """Attempts whose KV is not complete, and the pages of contexts that will be kept for pending choices."""
        self._pending: dict[DecodeAttempt, int] = {}
        """Attempts with pending choices, the oldest first, and the pages of their contexts."""
        self.changes = 0
        """Number of reservations and commits so far. After each one, other reservations may share other pages."""
        self._numbers = itertools.count()
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> abc.Iterator[DecodeAttempt]:
        return iter(list(self._live.values()))

    @property
    def held_sequences(self) -> int:
        """Number of sequences, counting 1 for each attempt whose KV is not complete. Pending choices do not count."""
        return len(self._owners) + len(self._coming)

    @property
    def pending(self) -> abc.Sequence[DecodeAttempt]:
        """The attempts with choices that are still to be forked, the oldest first."""
        return list(self._pending)

    @property
    def pending_choices(self) -> int:
        """Number of choices that are still to be forked."""
        return sum(attempt.pending_choices for attempt in self._pending)

    @property
    def ready_choices(self) -> int:
        """Number of choices whose KV is complete, pending ones included."""
        return len(self._owners) + self.pending_choices

    @property
    def requests_without_token(self) -> int:
        """Number of attempts that have not received a token from this worker."""
        return sum(not attempt.has_output for attempt in self._live.values())

    @property
    def deadline(self) -> float:
        """The earliest deadline of the states of all attempts; infinite if there is none."""
        return min((attempt.lifecycle.deadline for attempt in self._live.values()), default=math.inf)

    def get(self, session_number: int, key: AttemptKey) -> DecodeAttempt | None:
        """The live attempt with this key, or None."""
        return self._live.get((session_number, key))

    def in_session(self, session_number: int) -> list[DecodeAttempt]:
        """The live attempts of a session."""
        return [attempt for attempt in self._live.values() if attempt.session_number == session_number]

    def find_owner(self, sequence_id: int) -> tuple[DecodeAttempt, int] | None:
        """The attempt of a sequence and the index of its choice; None if the sequence has ended."""
        return self._owners.get(sequence_id)

    def take_pages(
        self,
        session_number: int,
        reservation: Reserve,
        size: ReservationSize,
        now: float,
        limit_s: float = math.inf,
        deadline: float = math.inf,
    ) -> DecodeAttempt:
        """Take all pages of a reservation whose size is `size`; its attempt must be started within `limit_s` seconds.

        `deadline` is the time of the request's deadline. Raises OutOfPages if the pages are not free now; then no page
        is taken.
        """
        key, digests = reservation.key, reservation.pinnable_digests
        taken: list[KvHandle] = []
        try:
            taken.append(self._engine.reserve(str(key), size.tokens, digests, size.pinnable_tokens))
            if size.spare_tokens:
                taken.append(self._engine.reserve(f"{key}/spare", size.spare_tokens))
        except Exception as error:
            self._free(taken)
            if not isinstance(error, OutOfPages):
                raise
            stats = self._engine.stats()
            raise OutOfPages(size.pages, stats.free + stats.cached, stats.total) from None
        lifecycle = Lifecycle(State.RESERVED, now, request_deadline=deadline, limit_s=limit_s)
        order_key = -key.attempt, next(self._numbers)
        spare = taken[1] if size.spare_tokens else None
        attempt = DecodeAttempt(
            session_number, order_key, reservation, size.tokens, taken[0], spare, lifecycle, reserved_at=now
        )
        self._live[session_number, key] = attempt
        self._coming[attempt] = self._context_pages(attempt) if reservation.choices > 1 else 0
        self.changes += 1
        return attempt

    def start(
        self, attempt: DecodeAttempt, now: float, limit_s: float = math.inf, deadline_s: float | None = None
    ) -> None:
        """Record that the attempt's KV is being fetched into its first handle, for at most `limit_s` seconds."""
        if deadline_s is not None:
            attempt.lifecycle.request_deadline = min(attempt.lifecycle.request_deadline, now + deadline_s)
        attempt.lifecycle.enter(State.TRANSFERRING, now, limit_s)

    def needs_digests(self, attempt: DecodeAttempt) -> bool:
        """Whether the commit needs the digests of the context's blocks, to publish them or to check the pinned ones."""
        return self.may_publish(attempt) or attempt.handle.cached_tokens > 0

    def may_publish(self, attempt: DecodeAttempt) -> bool:
        """Whether other requests may use the KV that the attempt computes and fetches."""
        return self._shares_kv and attempt.reservation.cache.writes

    def pinned_blocks(self, attempt: DecodeAttempt) -> int:
        """Number of leading blocks that have pinned tokens; of the last one, all tokens but one may be pinned."""
        return -(-attempt.handle.cached_tokens // self._engine.spec.kv_format.block_size)

    def check_handoff(self, attempt: DecodeAttempt, handoff: Handoff, digests: abc.Sequence[bytes]) -> None:
        """Raise IncompleteTransfer or InvalidRequest if the handoff does not belong to the reservation.

        `digests` are those of all full blocks of the context; they may be empty unless `needs_digests`.
        """
        _check_fields(self._engine.spec, attempt.reservation, handoff)
        pinned = self.pinned_blocks(attempt)
        # The last digest of a chain names all blocks before it too.
        if pinned and digests[pinned - 1 : pinned] != attempt.reservation.pinnable_digests[pinned - 1 : pinned]:
            raise IncompleteTransfer(
                f"{attempt.key}: the {attempt.handle.cached_tokens} pinned tokens are not those of the handoff"
            )

    def commit(
        self,
        attempt: DecodeAttempt,
        handoff: Handoff,
        fetch_ms: float,
        now: float,
        digests: abc.Sequence[bytes] | None = None,
    ) -> DecodeSequence | None:
        """Make a sequence of the first choice that goes on; further choices become pending.

        The caller has checked the handoff (`check_handoff`). `digests` are those of all full blocks of the context,
        which the caller has published if `may_publish`; without them, the sequences publish nothing. Returns None if
        all choices have ended; then the caller must end the attempt. Raises OutOfPages if no page is left to keep the
        context for further choices.
        """
        hasher = None
        if digests is not None and self.may_publish(attempt):
            hasher = self._hasher(attempt, handoff, digests)
        going = [
            first
            for first in handoff.first_tokens
            if first.finish is None and first.choice_index not in attempt.cancelled
        ]
        if not going:
            return None
        pending = None
        if further := {first.choice_index: first for first in going[1:]}:
            pending = PendingChoices(self._context(attempt), further, handoff, hasher, fetch_ms, now)
        if attempt.spare is not None:
            self._engine.free(attempt.spare)
        attempt.lifecycle.enter(State.SLOT_WAIT, now)
        del self._coming[attempt]
        self.changes += 1
        if pending is not None:
            attempt.pending, self._pending[attempt] = pending, self._context_pages(attempt)
        return self._sequence(attempt, going[0], attempt.handle, handoff, hasher, fetch_ms, now)

    def fork_pages(self, attempt: DecodeAttempt) -> int:
        """Number of pages that the attempt's next fork needs."""
        spec, context = self._engine.spec, attempt.reservation.context_tokens
        pending = attempt.pending
        last = pending is not None and len(pending.first_tokens) == 1
        return spec.pages_for(attempt.tokens) - (spec.pages_for(context) if last else context // spec.page_size)

    @property
    def pending_context_pages(self) -> int:
        """Number of pages of the contexts that are kept for pending choices. Shared pages count for each attempt."""
        return sum(self._pending.values())

    @property
    def expected_context_pages(self) -> int:
        """`pending_context_pages`, plus pages of contexts that will be kept for pending choices after their commit."""
        return self.pending_context_pages + sum(self._coming.values())

    def fork(self, attempt: DecodeAttempt) -> DecodeSequence:
        """Make a sequence of the attempt's next pending choice. Raises OutOfPages."""
        pending = attempt.pending
        if pending is None:
            raise EngineError(f"{attempt.key}: no choice is pending")
        index, first = next(iter(pending.first_tokens.items()))
        if len(pending.first_tokens) == 1:
            handle = pending.context_handle
            self._engine.extend(handle, attempt.tokens)
        else:
            context, owner = attempt.reservation.context_tokens, f"{attempt.key}/{index}"
            handle = self._engine.fork(pending.context_handle, owner, context, attempt.tokens)
        del pending.first_tokens[index]
        if not pending.first_tokens:
            del self._pending[attempt]
            attempt.pending = None
        return self._sequence(attempt, first, handle, pending.handoff, pending.hasher, pending.fetch_ms, pending.since)

    def join(self, sequence_id: int, now: float) -> None:
        """Record that a sequence has joined the batch; does nothing if it has ended meanwhile."""
        if (owner := self._owners.get(sequence_id)) is not None:
            attempt, index = owner
            attempt.choices[index].state, attempt.choices[index].since = State.DECODING, now
            self._update_state(attempt, now)

    def cancel_choice(self, attempt: DecodeAttempt, choice: int, now: float) -> list[int]:
        """End one choice, or, before the commit, keep it from starting; returns the ids of sequences to drop."""
        attempt.cancelled.add(choice)
        if attempt.pending is not None and attempt.pending.first_tokens.pop(choice, None) is not None:
            if not attempt.pending.first_tokens:
                self._drop_pending(attempt)
            return []
        if (active := attempt.choices.get(choice)) is None:
            return []
        self.end_sequence(active.sequence.id, now, self._release(active.sequence))
        return [active.sequence.id]

    def end_sequence(self, sequence_id: int, now: float, digests: abc.Sequence[bytes] = ()) -> None:
        """Remove a sequence that has ended or must be dropped; `digests` are those of its published blocks."""
        attempt, index = self._owners.pop(sequence_id)
        sequence = attempt.choices.pop(index).sequence
        self._update_state(attempt, now)
        self._report_published(attempt, sequence, digests)

    def is_finished(self, attempt: DecodeAttempt) -> bool:
        """Whether all choices of the attempt have ended; then the caller must end the attempt."""
        if attempt.committed:
            return not attempt.choices and attempt.pending is None
        return len(attempt.cancelled) >= attempt.reservation.choices

    def end(self, attempt: DecodeAttempt, now: float, *, publish: bool = True) -> list[int]:
        """End an attempt: free everything that it holds, and return the ids of sequences to drop. Idempotent.

        Its final KV is published in the pool, unless `publish` is False.
        """
        held, sequences = attempt.handles, [choice.sequence for choice in attempt.choices.values()]
        if not attempt.lifecycle.end(now):
            return []
        del self._live[attempt.session_number, attempt.key]
        published = [self._release(sequence) if publish else () for sequence in sequences]
        self._free(held)
        self._coming.pop(attempt, None)
        self._pending.pop(attempt, None)
        attempt.pending = None
        attempt.choices.clear()
        for sequence in sequences:
            del self._owners[sequence.id]
        for sequence, digests in zip(sequences, published, strict=True):
            self._report_published(attempt, sequence, digests)
        return [sequence.id for sequence in sequences]

    def _update_state(self, attempt: DecodeAttempt, now: float) -> None:
        """Derive the state of the attempt from the states of its choices."""
        states = {choice.state for choice in attempt.choices.values()}
        if State.DECODING in states:
            state = State.DECODING
        elif states or attempt.pending is not None:
            state = State.SLOT_WAIT
        else:
            return
        if attempt.lifecycle.state is not state:
            attempt.lifecycle.enter(state, now)

    def _sequence(
        self,
        attempt: DecodeAttempt,
        first: FirstToken,
        handle: KvHandle,
        handoff: Handoff,
        hasher: RollingBlockHasher | None,
        fetch_ms: float,
        ready_at: float,
    ) -> DecodeSequence:
        """Make a sequence of a choice whose KV is in place; from now on it decodes."""
        output_ids = (*handoff.output_ids, first.token.token_id)
        sequence = DecodeSequence(
            next(self._ids),
            handle,
            SequenceState(handoff.params, handoff.prompt_ids, output_ids, first.choice_index),
            fetch_ms=fetch_ms,
            ready_at=ready_at,
            order_key=attempt.order_key,
            hasher=hasher and hasher.fork(first.token.token_id),
            request_id=attempt.key.request_id,
        )
        attempt.choices[first.choice_index] = ActiveChoice(sequence, ready_at)
        self._owners[sequence.id] = (attempt, first.choice_index)
        return sequence

    def _context_pages(self, attempt: DecodeAttempt) -> int:
        return self._engine.spec.pages_for(attempt.reservation.context_tokens)

    def _context(self, attempt: DecodeAttempt) -> KvHandle:
        """Make a handle that keeps the pages of the context, with a copy of its last, partly filled page."""
        tokens = attempt.reservation.context_tokens
        return self._engine.fork(attempt.handle, f"{attempt.key}/context", tokens, tokens, attempt.spare)

    def _drop_pending(self, attempt: DecodeAttempt) -> None:
        """Free the context when no choice is pending any more."""
        if attempt.pending is not None:
            self._engine.free(attempt.pending.context_handle)
            del self._pending[attempt]
            attempt.pending = None

    def _hasher(self, attempt: DecodeAttempt, handoff: Handoff, digests: abc.Sequence[bytes]) -> RollingBlockHasher:
        """Make the hasher of a sequence that begins with the context; `digests` are those of its full blocks."""
        spec = self._engine.spec
        root = chain_root(spec.fingerprint, spec.kv_format.digest, attempt.reservation.cache_salt)
        size = spec.kv_format.block_size
        context = join_ids(handoff.prompt_ids, handoff.output_ids)
        return RollingBlockHasher(root, size, digests, context[len(digests) * size :])

    def _release(self, sequence: DecodeSequence) -> abc.Sequence[bytes]:
        """Publish the final blocks of a sequence, free its handle, and return the digests of the blocks.

        Does nothing if the engine thread has freed the handle. The engine does both in one call, because a step in
        between could write to a page that is already published.
        """
        digests = tuple(sequence.digests) if sequence.handle.alive else ()
        self._engine.free(sequence.handle, digests)
        return digests

    def _report_published(self, attempt: DecodeAttempt, sequence: DecodeSequence, digests: abc.Sequence[bytes]) -> None:
        """Report the blocks that a sequence has published at its end."""
        if digests:
            context_blocks = attempt.reservation.context_tokens // self._engine.spec.kv_format.block_size
            self._on_published(PublishedBlocks(sequence.handle.owner, digests, context_blocks))

    def _free(self, handles: list[KvHandle]) -> None:
        for handle in handles:
            self._engine.free(handle)
