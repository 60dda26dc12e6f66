"""Attempts from reservation to end, and the pages they hold. Pure; used by the asyncio side alone.

    reserve ──▶ RESERVED ─start─▶ TRANSFERRING ─commit─▶ SLOT_WAIT ─▶ DECODING ⇄ PAUSED ─(last choice ended)─▶ ENDED
                    └──────────────────┴─────────────────────┴─────────── end ──────────────────────────────────▶

A reservation takes the pages of the context and of each choice's first outputs: those of one choice, and for each
further choice what it does not share with the first (`spares`, which the forks take over at the commit, so that no
fork can run out of pages). More is taken by the engine thread as generation goes on; what could not be generated even
with the whole pool for itself is refused here. The handles are freed here, whatever state the attempt is in: that may
be done at any time, and what the engine thread is in the midst of comes back when it has ended.

Leading blocks of the context that are published in the pool are pinned by the reservation, shared with whoever else has
them, and not transferred. Their names were the router's; the commit is held against them. It publishes the context's
own blocks, so that the next request finds them while this one runs, and the end of each sequence publishes those of its
output. Where KV comes compressed or converted nothing is published: names are those of KV as it was computed.

An attempt is DECODING while one of its choices is in the batch, and PAUSED when none is and some are paused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.engine.contract import Engine, KvHandle
from baton.errors import IncompleteTransfer, OutOfPages
from baton.lifecycle import Lifecycle, State
from baton.request import Handoff, SequenceState, check_token_ids
from decode_svc.chain import Chain
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.reservation import Refused, Sizes, pinnable, sizes
from decode_svc.scheduler import Decoding

Left = Callable[[str, Sequence[bytes], int], object]
"""Gets a sequence's owner at its end, the names of its final blocks, and how many of these are the context's."""


@dataclass(slots=True)
class Choice:
    """A choice that still decodes: its sequence, where that is, and since when; `chain` names what it may publish."""

    sequence: int
    handle: KvHandle
    chain: Chain | None
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


def context_ids(handoff: Handoff) -> Sequence[int]:
    """All tokens whose KV is handed over; prompts may be long, and most have no output yet."""
    return (*handoff.prompt_ids, *handoff.output_ids) if handoff.output_ids else handoff.prompt_ids


class Attempts:
    """All live attempts of a worker; times are seconds on the caller's clock.

    `left` is told what ends leave behind; nothing is left unless the KV that is fetched is `exact`.
    """

    def __init__(
        self,
        engine: Engine,
        reserve_tokens: int,
        left: Left = lambda owner, digests, found: None,
        *,
        exact: bool = True,
    ) -> None:
        self._engine = engine
        self._reserve_tokens = reserve_tokens
        self._left = left
        self._exact = exact
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
            prefix, most = pinnable(request), request.context_tokens
            taken.append(self._engine.reserve(str(request.key), need.tokens, prefix, most))
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

    def named(self, attempt: Attempt) -> bool:
        """Whether the commit needs the names of the context's blocks: to publish them, or to check pinned ones."""
        return self._publishes(attempt) or attempt.handle.cached > 0

    def commit(
        self,
        attempt: Attempt,
        handoff: Handoff,
        fetch_ms: float,
        now: float,
        digests: Sequence[bytes] | None = None,
    ) -> list[Decoding]:
        """Turn a fetched attempt into one sequence for each choice that goes on, the KV shared by forks.

        `digests` name all full blocks of the context; without them nothing is published. Raises IncompleteTransfer or
        InvalidRequest when the handoff is not the one that pages were reserved for. Yields nothing when no choice is
        left; the attempt is to be ended then.
        """
        self._check(attempt, handoff)
        self._check_pinned(attempt, digests or ())
        chain = None
        if digests is not None and self._publishes(attempt):
            self._engine.publish(attempt.handle, digests)
            chain = self._chain(attempt, handoff, digests)
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
            own = chain and chain.forked(first.token.token_id)
            sequence = Decoding(next(self._ids), handle, state, output_ids, fetch_ms, now, attempt.age, own)
            attempt.choices[first.choice_index] = Choice(sequence.id, handle, own, now)
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
        self._release(attempt, going)
        self.sequence_ended(going.sequence, now)
        return [going.sequence]

    def sequence_ended(self, sequence: int, now: float, digests: Sequence[bytes] = ()) -> None:
        """Forget a sequence that is gone from the engine thread, where it published these blocks, or told to go."""
        attempt, choice = self._owners.pop(sequence)
        self._leave(attempt, attempt.choices.pop(choice), digests)
        self._settle(attempt, now)

    def over(self, attempt: Attempt) -> bool:
        """Whether no choice of the attempt is left, so that it is to be ended."""
        return attempt.sequences <= 0

    def end(self, attempt: Attempt, now: float, *, sound: bool = True) -> list[int]:
        """End an attempt once: frees all that it holds, and returns the sequences to drop.

        What is final of its KV is left for others, unless that is not `sound`.
        """
        committed = attempt.committed
        if not attempt.life.end(now):
            return []
        del self._live[attempt.session, attempt.key]
        if not committed:
            self._free([attempt.handle, *attempt.spares])
        dropped = [choice.sequence for choice in attempt.choices.values()]
        if sound:
            for choice in attempt.choices.values():
                self._release(attempt, choice)
        self._free([choice.handle for choice in attempt.choices.values()])
        for sequence in dropped:
            del self._owners[sequence]
        attempt.choices.clear()
        return dropped

    def _publishes(self, attempt: Attempt) -> bool:
        """Whether others may find what the attempt computes and fetches."""
        return self._exact and attempt.request.cache.writes

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

    def _chain(self, attempt: Attempt, handoff: Handoff, digests: Sequence[bytes]) -> Chain:
        """The chain of the context, whose full blocks have these names."""
        spec = self._engine.spec
        rest = context_ids(handoff)[len(digests) * spec.kv_format.block_size :]
        return Chain(spec, attempt.request.cache_salt, digests, rest)

    def _release(self, attempt: Attempt, choice: Choice) -> None:
        """Free a sequence, and leave what is final of its KV to others; of one that has ended, the engine thread has.

        In one go: a step in between would find its last page published.
        """
        chain = choice.chain if choice.handle.alive else None
        digests = tuple(chain.digests) if chain is not None else ()
        self._engine.free(choice.handle, digests)
        self._leave(attempt, choice, digests)

    def _leave(self, attempt: Attempt, choice: Choice, digests: Sequence[bytes]) -> None:
        """Tell of what a sequence has published at its end."""
        if digests:
            found = attempt.request.context_tokens // self._engine.spec.kv_format.block_size
            self._left(choice.handle.owner, digests, found)

    def _check_pinned(self, attempt: Attempt, digests: Sequence[bytes]) -> None:
        """Hold the pinned blocks against the ids that they are said to be of."""
        pinned = pinnable(attempt.request)[: attempt.handle.cached // self._engine.spec.kv_format.block_size]
        if pinned != list(digests[: len(pinned)]):
            raise IncompleteTransfer(
                f"{attempt.key}: the {attempt.handle.cached} tokens that were pinned are not those of the handoff"
            )

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
