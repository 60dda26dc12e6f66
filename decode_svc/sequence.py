"""The data of one attempt at a decode worker: reservation, choices, sequences. Pure.

    Reserve ── ReservationSize ──▶ LocalAttempt ──(its KV is there)──▶ a RunningChoice with its DecodeSequence
                                                                        and PendingChoices for the others

`decode_svc.attempts` has the operations on all attempts of a worker; `decode_svc.worker` has the life of an attempt.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field

from baton.engine.contract import Engine, EngineSpec, KvHandle, Sequence
from baton.errors import IncompleteTransfer, InvalidRequest
from baton.kv.hashing import DIGEST_BYTES, MAX_SALT_BYTES, PackedDigests, block_digests, chain_root
from baton.ledger import LedgerEntry
from baton.lifecycle import Lifecycle, State
from baton.request import MAX_CHOICES, DecodeTimings, FirstToken, Handoff, SequenceState, check_token_ids, join_ids
from decode_svc.messages import AttemptKey, Failure, FailureKind, Reserve


class InvalidReservation(InvalidRequest):
    """A reservation that can never be granted; the message says why, with numbers."""


@dataclass(frozen=True, slots=True)
class ReservationSize:
    """The size of a reservation: room for `tokens` of one choice, and `spare_tokens` for the page that forks can't
    share.

    `pages` is the number of all these pages. It includes pages that may turn out to be shared; those need not be free.
    """

    tokens: int
    spare_tokens: int
    pages: int


def size_reservation(spec: EngineSpec, request: Reserve, reserve_tokens: int) -> ReservationSize:
    """Size a reservation that has room for at most `reserve_tokens` outputs.

    Raises InvalidReservation if the request is malformed, or if even one choice could never be generated to its end.
    """
    for name, value, limit in (
        ("context_tokens", request.context_tokens, spec.max_model_len - 1),
        ("max_new_tokens", request.max_new_tokens, None),
        ("choices", request.choices, MAX_CHOICES),
    ):
        if value < 1 or (limit is not None and value > limit):
            raise InvalidReservation(name, "must be at least 1" + (f" and at most {limit}" if limit else ""), value)
    _check_digests(spec, request)
    longest = request.context_tokens + request.max_new_tokens
    if longest > spec.max_model_len:
        # Routers accept what all workers can hold; this one joined later, with a smaller limit.
        problem = f"with {request.context_tokens} tokens of context it exceeds max_model_len {spec.max_model_len}"
        raise InvalidReservation("max_new_tokens", problem, request.max_new_tokens)
    tokens = request.context_tokens + min(request.max_new_tokens, reserve_tokens)
    pages = spec.pages_for(tokens)
    whole = spec.pages_for(longest)
    if whole > spec.pages:
        raise InvalidReservation(
            "context_tokens", f"needs {whole} pages, there are {spec.pages}", request.context_tokens
        )
    # If the first choice needs all pages, none is left to spare: pending choices are given back at the commit.
    splits = request.choices > 1 and request.context_tokens % spec.page_size > 0 and pages < spec.pages
    return ReservationSize(tokens, spec.page_size if splits else 0, pages + splits)


def pinnable_digests(request: Reserve) -> PackedDigests:
    """Digests of the leading blocks to pin; empty if the request does not read the cache."""
    return PackedDigests(request.prefix_digests if request.cache.reads else b"")


def _check_digests(spec: EngineSpec, request: Reserve) -> None:
    size, most = len(request.prefix_digests), request.context_tokens // spec.kv_format.block_size
    if size % DIGEST_BYTES:
        raise InvalidReservation("prefix_digests", f"its length must be a multiple of {DIGEST_BYTES} bytes", size)
    if size > most * DIGEST_BYTES:
        problem = f"must name at most the {most} full blocks of the context"
        raise InvalidReservation("prefix_digests", problem, size // DIGEST_BYTES)
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise InvalidReservation("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes", len(request.cache_salt))


def context_ids(handoff: Handoff) -> abc.Sequence[int]:
    """All tokens whose KV is handed over."""
    return join_ids(handoff.prompt_ids, handoff.output_ids)


def check_handoff(spec: EngineSpec, request: Reserve, handoff: Handoff) -> None:
    """Raise IncompleteTransfer or InvalidRequest unless the handoff is what the pages were reserved for.

    The token ids of its context were checked when it was read.
    """
    choices = {first.choice_index for first in handoff.first_tokens}
    new_tokens = (handoff.params.max_tokens or 0) - len(handoff.output_ids)
    for what, seen, expected in (
        ("attempt", AttemptKey(handoff.request_id, handoff.attempt), request.key),
        ("context", len(handoff.prompt_ids) + len(handoff.output_ids), request.context_tokens),
        ("first tokens", len(handoff.first_tokens), request.choices),
        ("choices", len(choices), request.choices),
    ):
        if seen != expected:
            raise IncompleteTransfer(f"{request.key}: the handoff's {what} is {seen}, reserved was {expected}")
    if not 1 <= new_tokens <= request.max_new_tokens:
        raise IncompleteTransfer(
            f"{request.key}: the handoff allows {new_tokens} new tokens, reserved was {request.max_new_tokens}"
        )
    handoff.params.check_vocabulary(spec.vocab_size)
    firsts = [first.token.token_id for first in handoff.first_tokens]
    check_token_ids("first_tokens", firsts, spec.vocab_size)


class RollingBlockHasher:
    """Hashes the blocks of a growing sequence. Any thread may read `digests` meanwhile; it only gets longer."""

    def __init__(self, spec: EngineSpec, salt: bytes, digests: abc.Sequence[bytes], rest: abc.Sequence[int]) -> None:
        """`digests` are those of the full blocks so far (`baton.kv.hashing`); `rest` are the tokens after them that
        have KV.
        """
        self.digests = list(digests)
        self._size = spec.kv_format.block_size
        self._parent = self.digests[-1] if digests else chain_root(spec.fingerprint, spec.kv_format.digest, salt)
        self._rest = list(rest)

    def fork(self, token_id: int) -> RollingBlockHasher:
        """A copy of the hasher for a choice that continues with this token."""
        hasher = RollingBlockHasher.__new__(RollingBlockHasher)
        hasher.digests, hasher._size, hasher._parent = list(self.digests), self._size, self._parent
        hasher._rest = list(self._rest)
        hasher.extend([token_id])
        return hasher

    def extend(self, token_ids: abc.Iterable[int]) -> None:
        """Append tokens. The KV of the last one is not written yet: the next step writes it."""
        for token_id in token_ids:
            self._rest.append(token_id)
            if len(self._rest) > self._size:
                (self._parent,) = block_digests(self._parent, self._rest[: self._size], self._size)
                del self._rest[: self._size]
                self.digests.append(self._parent)


class DecodeSequence(Sequence):
    """One choice whose KV is in place; times are in seconds.

    `age` is that of its attempt; a smaller one is older. `hasher` hashes its blocks, if they may be published.
    `reported` counts the outputs that were reported: the first one by prefill.
    """

    __slots__ = ("age", "fetch_ms", "hasher", "id", "inserted_at", "ready_at", "reported", "request_id", "timings")

    def __init__(
        self,
        number: int,
        handle: KvHandle,
        state: SequenceState,
        *,
        fetch_ms: float = 0.0,
        ready_at: float = 0.0,
        age: tuple[int, int] = (0, 0),
        hasher: RollingBlockHasher | None = None,
        request_id: str = "",
    ) -> None:
        """`number` identifies it."""
        super().__init__(handle, state)
        self.id = number
        self.fetch_ms, self.ready_at = fetch_ms, ready_at
        self.age = age
        self.hasher = hasher
        self.request_id = request_id
        self.inserted_at = 0.0
        self.reported = len(state.output_ids)
        self.timings: DecodeTimings | None = None

    @property
    def digests(self) -> abc.Sequence[bytes]:
        """Digests of its blocks whose KV is final; empty if they must not be published."""
        return self.hasher.digests if self.hasher is not None else ()

    @property
    def rank(self) -> tuple[tuple[int, int], int]:
        """Sort key, from the oldest sequence to the youngest."""
        return self.age, self.id


@dataclass(frozen=True, slots=True)
class Published:
    """Blocks that a sequence has published at its end, by digest; the first `context` of them are its context's."""

    owner: str
    digests: abc.Sequence[bytes]
    context: int

    @property
    def new(self) -> int:
        """Number of blocks after the context."""
        return max(len(self.digests) - self.context, 0)


@dataclass(slots=True)
class RunningChoice:
    """A choice that still decodes: its sequence, its state, and since when; `hasher` hashes the blocks that it may
    publish.
    """

    sequence: int
    handle: KvHandle
    hasher: RollingBlockHasher | None
    since: float
    state: State = State.SLOT_WAIT


@dataclass(eq=False, slots=True)
class PendingChoices:
    """The choices that are still to be forked: their first tokens by index, and the context that each begins with."""

    context: KvHandle
    first_tokens: dict[int, FirstToken]
    handoff: Handoff
    hasher: RollingBlockHasher | None
    fetch_ms: float
    since: float


@dataclass(eq=False, slots=True)
class LocalAttempt:
    """One attempt as this worker has it, owned by a session; its pages hold `tokens` tokens of one choice.

    `age` orders attempts, the oldest first. A request that was tried before counts as older than its reservation, so
    that a request that was preempted once is not the first to be preempted again. `choices` are those that decode, by
    index; `pending` are those that wait to be forked.
    """

    session: int
    age: tuple[int, int]
    request: Reserve
    tokens: int
    handle: KvHandle
    spare: KvHandle | None
    life: Lifecycle
    reserved_at: float
    cancelled: set[int] = field(default_factory=set)
    choices: dict[int, RunningChoice] = field(default_factory=dict)
    pending: PendingChoices | None = None
    prefix_transfer_id: str = ""
    """The id under which its pinned prefix is exported, if it is."""
    has_output: bool = False
    """Whether the worker has sent a token of it."""

    @property
    def key(self) -> AttemptKey:
        """Its name within the session."""
        return self.request.key

    @property
    def committed(self) -> bool:
        """Whether its KV is complete, so that its handles belong to sequences."""
        return self.life.state in (State.SLOT_WAIT, State.DECODING)

    @property
    def sequences(self) -> int:
        """Number of its sequences; 1 before its KV is complete."""
        return len(self.choices) if self.committed else 1

    @property
    def pending_choices(self) -> int:
        """Number of choices that are still to be forked."""
        return len(self.pending.first_tokens) if self.pending is not None else 0

    @property
    def makes_progress(self) -> bool:
        """Whether it can go on by itself: its transfer goes on, or one of its choices is a sequence."""
        return not self.committed or bool(self.choices)

    @property
    def handles(self) -> list[KvHandle]:
        """All handles that it holds."""
        if not self.committed:
            return [self.handle] if self.spare is None else [self.handle, self.spare]
        own = [choice.handle for choice in self.choices.values()]
        return own if self.pending is None else [*own, self.pending.context]

    def overdue_failure(self) -> Failure:
        """The failure of an attempt that stayed in its state for too long."""
        life = self.life
        if life.is_request_deadline():
            given = life.deadline - self.reserved_at
            message = f"{self.key} was {life.state.value} at its deadline, {given:.3g} s after its reservation"
            return Failure(FailureKind.DEADLINE, message)
        message = f"{self.key} was still {life.state.value} after {life.deadline - life.since:g} s"
        if life.state is State.TRANSFERRING:
            message += ", prefill included (--fetch-timeout-s)"
        # The request's deadline has not passed, so another attempt may follow.
        return Failure(FailureKind.TRANSFER, message)


def ledger_entries(attempts: abc.Iterable[LocalAttempt], engine: Engine, now: float) -> list[LedgerEntry]:
    """One entry for each handle. `now` is on the attempts' clock."""
    spec = engine.spec
    page_bytes = spec.page_size * spec.kv_format.token_bytes

    def entry(attempt: LocalAttempt, handle: KvHandle, state: State, since: float) -> LedgerEntry:
        pages = spec.pages_for(handle.capacity)
        deadline = attempt.life.deadline
        return LedgerEntry(
            owner=handle.owner,
            kind="kv",
            state=state.value,
            pages=pages,
            bytes=pages * page_bytes,
            age_s=now - since,
            deadline_s=None if math.isinf(deadline) else deadline - now,
        )

    found = []
    for attempt in attempts:
        life = attempt.life
        if attempt.committed:
            found += [entry(attempt, each.handle, each.state, each.since) for each in attempt.choices.values()]
            if attempt.pending is not None:
                found.append(entry(attempt, attempt.pending.context, State.SLOT_WAIT, attempt.pending.since))
        else:
            found += [entry(attempt, each, life.state, life.since) for each in attempt.handles]
    return found
