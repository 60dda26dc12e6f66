"""Attempts from reservation to end, and the pages they hold. Pure; used by the asyncio side alone.

    reserve ──▶ RESERVED ─start─▶ TRANSFERRING ─commit─▶ SLOT_WAIT ─▶ DECODING ⇄ PAUSED ─(last choice ended)─▶ ENDED
                    └──────────────────┴─────────────────────┴─────────── end ──────────────────────────────────▶

A reservation takes the pages of the context and of each choice's first outputs: those of one choice, and for each
further choice what it does not share with the first (`spares`, which the forks take over at the commit, so that no
fork can run out of pages). More is taken by the engine thread as generation goes on; what could not be generated even
with the whole pool for itself is refused here. The handles are freed here, whatever state the attempt is in: that may
be done at any time, and what the engine thread is in the midst of comes back when it has ended.

An attempt is DECODING while one of its choices is in the batch, and PAUSED when none is and some are paused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.engine.contract import Engine, EngineSpec, KvHandle
from baton.errors import IncompleteTransfer, InvalidRequest, OutOfPages
from baton.lifecycle import Lifecycle, State
from baton.request import MAX_CHOICES, Handoff, SequenceState, check_token_ids
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.scheduler import Decoding


@dataclass(slots=True)
class Choice:
    """A choice that still decodes: its sequence, where that is, and since when."""

    sequence: int
    handle: KvHandle
    since: float
    state: State = State.SLOT_WAIT


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt, owned by a session; its pages hold `tokens` tokens of each choice.

    `age` orders attempts from the oldest: a request that was tried before is older than its reservation, so that what
    was given back once is not the first to be given back again. `choices` are those that decode, by index.
    """

    session: int
    age: tuple[int, int]
    request: Reserve
    tokens: int
    handle: KvHandle
    spares: list[KvHandle]
    life: Lifecycle
    reserved_at: float
    cancelled: set[int] = field(default_factory=set)
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def key(self) -> AttemptKey:
        """Its name within the session."""
        return self.request.key

    @property
    def committed(self) -> bool:
        """Whether its KV is there, so that its handles belong to sequences."""
        return self.life.state in (State.SLOT_WAIT, State.DECODING, State.PAUSED)

    @property
    def sequences(self) -> int:
        """Sequences that it has, or will have."""
        return len(self.choices) if self.committed else self.request.choices - len(self.cancelled)


class Refused(InvalidRequest):
    """A reservation that can never be granted; the message says why, with numbers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a reservation takes: tokens of the first choice, and of each further one what it does not share."""

    tokens: int
    spare_tokens: int
    pages: int


def sizes(spec: EngineSpec, request: Reserve, reserve_tokens: int) -> Sizes:
    """Size a reservation of `reserve_tokens` outputs at most for each choice.

    Raises Refused when the request is malformed, when its first outputs could never fit, or when one choice alone
    could never be generated to its end.
    """
    for name, value, limit in (
        ("context_tokens", request.context_tokens, spec.max_model_len - 1),
        ("max_new_tokens", request.max_new_tokens, None),
        ("choices", request.choices, MAX_CHOICES),
    ):
        if value < 1 or (limit is not None and value > limit):
            raise Refused(name, "must be at least 1" + (f" and at most {limit}" if limit else ""), value)
    tokens = min(request.context_tokens + min(request.max_new_tokens, reserve_tokens), spec.max_model_len)
    spare_pages = spec.pages_for(tokens) - request.context_tokens // spec.page_size
    pages = spec.pages_for(tokens) + (request.choices - 1) * spare_pages
    whole = spec.pages_for(min(request.context_tokens + request.max_new_tokens, spec.max_model_len))
    if (most := max(pages, whole)) > spec.pages:
        raise Refused("context_tokens", f"needs {most} pages, there are {spec.pages}", request.context_tokens)
    return Sizes(tokens, spare_pages * spec.page_size, pages)


class Attempts:
    """All live attempts of a worker; times are seconds on the caller's clock."""

    def __init__(self, engine: Engine, reserve_tokens: int) -> None:
        self._engine = engine
        self._reserve_tokens = reserve_tokens
        self._live: dict[tuple[int, AttemptKey], Attempt] = {}
        self._owners: dict[int, tuple[Attempt, int]] = {}
        self._numbers = itertools.count()
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._live.values()))

    @property
    def sequences(self) -> int:
        """Sequences of all attempts, those to come included."""
        return sum(attempt.sequences for attempt in self._live.values())

    def get(self, session: int, key: AttemptKey) -> Attempt | None:
        """The live attempt of that name."""
        return self._live.get((session, key))

    def of(self, session: int) -> list[Attempt]:
        """The live attempts of a session."""
        return [attempt for attempt in self._live.values() if attempt.session == session]

    def owner(self, sequence: int) -> tuple[Attempt, int] | None:
        """Attempt and choice of a sequence that still decodes."""
        return self._owners.get(sequence)

    def check(self, session: int, request: Reserve) -> Sizes:
        """What the reservation would take. Raises Refused when it can never be granted."""
        if (live := self.get(session, request.key)) is not None:
            raise Refused("key", f"attempt {request.key} is {live.life.state.value} already")
        return sizes(self._engine.spec, request, self._reserve_tokens)

    def reserve(self, session: int, request: Reserve, now: float, limit_s: float = math.inf) -> Attempt:
        """Take an attempt's pages, all or none; it has `limit_s` seconds to be started.

        Raises OutOfPages when they are not free now, Refused when they can never be.
        """
        need = self.check(session, request)
        taken: list[KvHandle] = []
        try:
            taken.append(self._engine.reserve(str(request.key), need.tokens))
            for choice in range(1, request.choices):
                owner = f"{request.key}/spare{choice}"
                handle = self._engine.reserve(owner, need.spare_tokens)
                taken.append(handle)
        except Exception as error:
            self._free(taken)
            if not isinstance(error, OutOfPages):
                raise
            stats = self._engine.stats()
            raise OutOfPages(need.pages, stats.free + stats.cached, stats.total) from None
        deadline = math.inf if request.deadline_s is None else now + request.deadline_s
        life = Lifecycle(State.RESERVED, now, request_deadline=deadline, limit_s=limit_s)
        age = -request.key.attempt, next(self._numbers)
        attempt = Attempt(session, age, request, need.tokens, taken[0], taken[1:], life, now)
        self._live[session, request.key] = attempt
        return attempt

    def start(self, attempt: Attempt, now: float, limit_s: float = math.inf, deadline_s: float | None = None) -> None:
        """The attempt's KV is being fetched into its first handle, for `limit_s` seconds at most."""
        if deadline_s is not None:
            attempt.life.request_deadline = min(attempt.life.request_deadline, now + deadline_s)
        attempt.life.enter(State.TRANSFERRING, now, limit_s)

    def commit(self, attempt: Attempt, handoff: Handoff, fetch_ms: float, now: float) -> list[Decoding]:
        """Turn a fetched attempt into one sequence for each choice that goes on, the KV shared by forks.

        Raises IncompleteTransfer or InvalidRequest when the handoff is not the one that pages were reserved
        for. Yields nothing when no choice is left; the attempt is to be ended then.
        """
        self._check(attempt, handoff)
        going = [
            first
            for first in handoff.first_tokens
            if first.finish is None and first.choice_index not in attempt.cancelled
        ]
        if not going:
            return []
        handles = self._fork(attempt, [f"{attempt.key}/{first.choice_index}" for first in going[1:]])
        attempt.life.enter(State.SLOT_WAIT, now)
        sequences = []
        for first, handle in zip(going, handles, strict=True):
            output_ids = [*handoff.output_ids, first.token.token_id]
            state = SequenceState(handoff.params, handoff.prompt_ids, tuple(output_ids), first.choice_index)
            sequence = Decoding(next(self._ids), handle, state, output_ids, fetch_ms, now, attempt.age)
            attempt.choices[first.choice_index] = Choice(sequence.id, handle, now)
            self._owners[sequence.id] = (attempt, first.choice_index)
            sequences.append(sequence)
        return sequences

    def moved(self, sequence: int, state: State, now: float) -> None:
        """A sequence is in the batch, or paused; ignored for one that was ended meanwhile."""
        if (owner := self._owners.get(sequence)) is not None:
            attempt, index = owner
            attempt.choices[index].state, attempt.choices[index].since = state, now
            self._settle(attempt, now)

    def cancel_choice(self, attempt: Attempt, choice: int, now: float) -> list[int]:
        """End one choice, now or at the commit; returns the sequences to drop."""
        attempt.cancelled.add(choice)
        if (going := attempt.choices.get(choice)) is None:
            return []
        self._engine.free(going.handle)
        self.sequence_ended(going.sequence, now)
        return [going.sequence]

    def sequence_ended(self, sequence: int, now: float) -> None:
        """Forget a sequence that is gone from the engine thread or told to go."""
        attempt, choice = self._owners.pop(sequence)
        del attempt.choices[choice]
        self._settle(attempt, now)

    def over(self, attempt: Attempt) -> bool:
        """Whether no choice of the attempt is left, so that it is to be ended."""
        return attempt.sequences <= 0

    def end(self, attempt: Attempt, now: float) -> list[int]:
        """End an attempt once: frees all that it holds, and returns the sequences to drop."""
        committed = attempt.committed
        if not attempt.life.end(now):
            return []
        del self._live[attempt.session, attempt.key]
        if not committed:
            self._free([attempt.handle, *attempt.spares])
        dropped = [choice.sequence for choice in attempt.choices.values()]
        self._free([choice.handle for choice in attempt.choices.values()])
        for sequence in dropped:
            del self._owners[sequence]
        attempt.choices.clear()
        return dropped

    def _settle(self, attempt: Attempt, now: float) -> None:
        """Let the attempt's state follow from those of its choices."""
        states = {choice.state for choice in attempt.choices.values()}
        if State.DECODING in states:
            state = State.DECODING
        elif State.PAUSED in states:
            state = State.PAUSED
        elif states and attempt.life.state is State.PAUSED:
            state = State.SLOT_WAIT
        else:
            return
        if attempt.life.state is not state:
            attempt.life.enter(state, now)

    def _fork(self, attempt: Attempt, owners: list[str]) -> list[KvHandle]:
        """The first handle and, in the pages of the spares, a fork of it for each of `owners`."""
        handles = [attempt.handle]
        context = attempt.request.context_tokens
        try:
            for owner in owners:
                spare = attempt.spares.pop()
                try:
                    handles.append(self._engine.fork(attempt.handle, owner, context, attempt.tokens, spare))
                finally:
                    self._engine.free(spare)
        except Exception:
            self._free(handles[1:])
            raise
        self._free(attempt.spares)
        attempt.spares.clear()
        return handles

    def _check(self, attempt: Attempt, handoff: Handoff) -> None:
        request, spec = attempt.request, self._engine.spec
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
        handoff.params.check_model(spec.vocab_size)
        check_token_ids("prompt_token_ids", handoff.prompt_ids, spec.vocab_size)
        check_token_ids("output_token_ids", handoff.output_ids, spec.vocab_size)
        firsts = [first.token.token_id for first in handoff.first_tokens]
        check_token_ids("first_tokens", firsts, spec.vocab_size)

    def _free(self, handles: list[KvHandle]) -> None:
        for handle in handles:
            self._engine.free(handle)
