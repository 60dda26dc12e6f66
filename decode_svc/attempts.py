"""Attempts from reservation to end, and the pages they hold. Pure; used by the asyncio side alone.

    reserve ──▶ RESERVED ──start──▶ FETCHING ──commit──▶ DECODING ──(last choice ended)──▶ ENDED
                    └───────────────────┴──────────────────────┴────────── end ───────────▶

A reservation takes all the pages that the attempt can ever need: context and new tokens of one choice, and for
each further choice what it does not share with the first (`spares`, handed over to the forks at the commit). So
neither fork nor step can run out of pages. Until the commit the attempt's handles are freed here, by `end`; from
the commit on each belongs to a sequence on the engine thread, and `end` names the sequences that it must still
drop. Pages are taken on this side only, so between a spare's return and its fork nobody else can take them.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.engine.contract import Engine, EngineSpec, KvHandle
from baton.errors import IncompleteTransfer, InvalidRequest, OutOfPages
from baton.request import MAX_CHOICES, Handoff, SequenceState, check_token_ids
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.scheduler import Decoding


class AttemptState(enum.Enum):
    """Where an attempt is in its life."""

    RESERVED = "reserved"
    FETCHING = "fetching"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Attempt:
    """One attempt, owned by a session; its pages hold `tokens` tokens of each choice.

    `sequences` maps the choices that still decode to the ids of their sequences.
    """

    session: int
    request: Reserve
    tokens: int
    handle: KvHandle
    spares: list[KvHandle]
    state: AttemptState = AttemptState.RESERVED
    cancelled: set[int] = field(default_factory=set)
    sequences: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> AttemptKey:
        """Its name within the session."""
        return self.request.key


class Refused(InvalidRequest):
    """A reservation that can never be granted; the message says why, with numbers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a reservation takes: tokens of the first choice, and of each further one what it does not share."""

    tokens: int
    spare_tokens: int
    pages: int


def sizes(spec: EngineSpec, request: Reserve) -> Sizes:
    """Size a reservation; raises Refused when the request is malformed or could never fit."""
    for name, value, limit in (
        ("context_tokens", request.context_tokens, spec.max_model_len - 1),
        ("max_new_tokens", request.max_new_tokens, None),
        ("choices", request.choices, MAX_CHOICES),
    ):
        if value < 1 or (limit is not None and value > limit):
            raise Refused(name, "must be at least 1" + (f" and at most {limit}" if limit else ""), value)
    tokens = min(request.context_tokens + request.max_new_tokens, spec.max_model_len)
    spare_pages = spec.pages_for(tokens) - request.context_tokens // spec.page_size
    pages = spec.pages_for(tokens) + (request.choices - 1) * spare_pages
    if pages > spec.pages:
        raise Refused("context_tokens", f"needs {pages} pages, there are {spec.pages}", request.context_tokens)
    return Sizes(tokens, spare_pages * spec.page_size, pages)


class Attempts:
    """All live attempts of a worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[tuple[int, AttemptKey], Attempt] = {}
        self._owners: dict[int, tuple[Attempt, int]] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._live.values()))

    def get(self, session: int, key: AttemptKey) -> Attempt | None:
        """The live attempt of that name."""
        return self._live.get((session, key))

    def owner(self, sequence: int) -> tuple[Attempt, int] | None:
        """Attempt and choice of a sequence that still decodes."""
        return self._owners.get(sequence)

    def reserve(self, session: int, request: Reserve) -> Attempt:
        """Take an attempt's pages, all or none.

        Raises OutOfPages when they are not free now, Refused when they can never be.
        """
        if (live := self.get(session, request.key)) is not None:
            raise Refused("key", f"attempt {request.key} is {live.state.value} already")
        need = sizes(self._engine.spec, request)
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
        attempt = Attempt(session, request, need.tokens, taken[0], taken[1:])
        self._live[session, request.key] = attempt
        return attempt

    def start(self, attempt: Attempt) -> None:
        """The attempt's KV is being fetched into its first handle."""
        attempt.state = AttemptState.FETCHING

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
        attempt.state = AttemptState.DECODING
        sequences = []
        for first, handle in zip(going, handles, strict=True):
            output_ids = [*handoff.output_ids, first.token.token_id]
            state = SequenceState(handoff.params, handoff.prompt_ids, tuple(output_ids), first.choice_index)
            sequence = Decoding(next(self._ids), handle, state, output_ids, fetch_ms, now)
            attempt.sequences[first.choice_index] = sequence.id
            self._owners[sequence.id] = (attempt, first.choice_index)
            sequences.append(sequence)
        return sequences

    def cancel_choice(self, attempt: Attempt, choice: int) -> list[int]:
        """End one choice, now or at the commit; returns the sequences to drop."""
        attempt.cancelled.add(choice)
        sequence = attempt.sequences.get(choice)
        if sequence is None:
            return []
        self.sequence_ended(sequence)
        return [sequence]

    def sequence_ended(self, sequence: int) -> None:
        """Forget a sequence that is gone from the engine thread or told to go."""
        attempt, choice = self._owners.pop(sequence)
        del attempt.sequences[choice]

    def over(self, attempt: Attempt) -> bool:
        """Whether no choice of the attempt is left, so that it is to be ended."""
        if attempt.state is AttemptState.DECODING:
            return not attempt.sequences
        return len(attempt.cancelled) >= attempt.request.choices

    def end(self, attempt: Attempt) -> list[int]:
        """End an attempt once; frees the handles still held here and returns the sequences to drop."""
        if attempt.state is AttemptState.ENDED:
            return []
        if attempt.state is not AttemptState.DECODING:
            self._free([attempt.handle, *attempt.spares])
        attempt.state = AttemptState.ENDED
        del self._live[attempt.session, attempt.key]
        dropped = list(attempt.sequences.values())
        for sequence in dropped:
            self.sequence_ended(sequence)
        return dropped

    def _fork(self, attempt: Attempt, owners: list[str]) -> list[KvHandle]:
        """The first handle and, in the pages of the spares, a fork of it for each of `owners`."""
        handles = [attempt.handle]
        try:
            for owner in owners:
                self._engine.free(attempt.spares.pop())
                context = attempt.request.context_tokens
                handles.append(self._engine.fork(attempt.handle, owner, context, attempt.tokens))
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
