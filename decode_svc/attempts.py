"""Attempts from reservation to end, and the pages they hold. Pure; used by the asyncio side alone.

    reserve ──▶ RESERVED ─start─▶ TRANSFERRING ─commit─▶ SLOT_WAIT ─▶ DECODING ⇄ PAUSED ─(last choice ended)─▶ ENDED
                    └──────────────────┴─────────────────────┴─────────── end ──────────────────────────────────▶

A reservation takes the pages of the context and of the first outputs of one choice, however many choices there are.
At the commit the first choice becomes a sequence. The further choices are pending: a handle of their own (`context`)
keeps the context's pages, and each of them is forked from it when a slot is free (`decode_svc.admission`). The last one
takes that handle over. The page that the context fills in part is the only one that they do not share with the first
choice; it is reserved (`spare`), so that the commit does not run out of pages.

More pages are taken by the engine thread as generation goes on; what could not be generated even with the whole pool
for itself is refused here. The handles are freed here, whatever state the attempt is in: that may be done at any time,
and what the engine thread is in the midst of comes back when it has ended.

Leading blocks of the context that are published in the pool are pinned by the reservation, shared with whoever else has
them, and not transferred. Their names were the router's; the commit is held against them. It publishes the context's
own blocks, so that the next request finds them while this one runs, and the end of each sequence publishes those of its
output. Where KV comes compressed or converted nothing is published: names are those of KV as it was computed.

An attempt is DECODING while one of its choices is in the batch, PAUSED when none is and some are paused, and back in
SLOT_WAIT when the choices that it still has are waiting or pending.
"""

from __future__ import annotations

import itertools
import math
from collections import abc

from baton.engine.contract import Engine, KvHandle
from baton.errors import EngineError, IncompleteTransfer, OutOfPages
from baton.lifecycle import Lifecycle, State
from baton.request import FirstToken, Handoff, SequenceState, check_token_ids
from decode_svc.messages import AttemptKey, Reserve
from decode_svc.sequence import Attempt, Choice, Pending, Refused, RollingBlockHasher, Sequence, Sizes, pinnable, sizes

Left = abc.Callable[[str, abc.Sequence[bytes], int], object]
"""Gets a sequence's owner at its end, the names of its final blocks, and how many of these are the context's."""


def context_ids(handoff: Handoff) -> abc.Sequence[int]:
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
        self._pending: dict[Attempt, None] = {}
        self._oldest_leads = True
        self._numbers = itertools.count()
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> abc.Iterator[Attempt]:
        return iter(list(self._live.values()))

    @property
    def sequences(self) -> int:
        """Sequences of all attempts, and one for each that is on its way here; not what is pending."""
        return sum(attempt.sequences for attempt in self._live.values())

    @property
    def pending(self) -> abc.Sequence[Attempt]:
        """The attempts with choices that are still to be forked, in the order of their turns.

        The oldest, and the one with the fewest such choices, lead alternately: contexts are given back one after the
        other, and neither few choices nor many wait for all others.
        """
        oldest = list(self._pending)
        return oldest if self._oldest_leads else sorted(oldest, key=lambda attempt: attempt.forks)

    @property
    def forks(self) -> int:
        """Choices that are still to be forked."""
        return sum(attempt.forks for attempt in self._pending)

    @property
    def newcomers(self) -> int:
        """Attempts that have had no token from this worker yet."""
        return sum(not attempt.stepped for attempt in self._live.values())

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
            if need.spare_tokens:
                taken.append(self._engine.reserve(f"{request.key}/spare", need.spare_tokens))
        except Exception as error:
            self._free(taken)
            if not isinstance(error, OutOfPages):
                raise
            stats = self._engine.stats()
            raise OutOfPages(need.pages, stats.free + stats.cached, stats.total) from None
        deadline = math.inf if request.deadline_s is None else now + request.deadline_s
        life = Lifecycle(State.RESERVED, now, request_deadline=deadline, limit_s=limit_s)
        age = -request.key.attempt, next(self._numbers)
        spare = taken[1] if need.spare_tokens else None
        attempt = Attempt(session, age, request, need.tokens, taken[0], spare, life, now)
        self._live[session, request.key] = attempt
        return attempt

    def start(self, attempt: Attempt, now: float, limit_s: float = math.inf, deadline_s: float | None = None) -> None:
        """The attempt's KV is being fetched into its first handle, for `limit_s` seconds at most."""
        if deadline_s is not None:
            attempt.life.request_deadline = min(attempt.life.request_deadline, now + deadline_s)
        attempt.life.enter(State.TRANSFERRING, now, limit_s)

    def needs_names(self, attempt: Attempt) -> bool:
        """Whether the commit needs the names of the context's blocks: to publish them, or to check pinned ones."""
        return self._publishes(attempt) or attempt.handle.cached > 0

    def commit(
        self,
        attempt: Attempt,
        handoff: Handoff,
        fetch_ms: float,
        now: float,
        digests: abc.Sequence[bytes] | None = None,
    ) -> Sequence | None:
        """Turn a fetched attempt into the sequence of its first choice that goes on; further ones are pending.

        `digests` name all full blocks of the context; without them nothing is published. Raises IncompleteTransfer or
        InvalidRequest when the handoff is not the one that pages were reserved for, OutOfPages when none is left to
        keep the context for further choices. None when no choice is left; the attempt is to be ended then.
        """
        self._check(attempt, handoff)
        self._check_pinned(attempt, digests or ())
        hasher = None
        if digests is not None and self._publishes(attempt):
            self._engine.publish(attempt.handle, digests)
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
            pending = Pending(self._context(attempt), further, handoff, hasher, fetch_ms, now)
        if attempt.spare is not None:
            self._engine.free(attempt.spare)
        attempt.life.enter(State.SLOT_WAIT, now)
        if pending is not None:
            attempt.pending, self._pending[attempt] = pending, None
        return self._sequence(attempt, going[0], attempt.handle, handoff, hasher, fetch_ms, now)

    def fork_pages(self, attempt: Attempt) -> int:
        """Pages that the attempt's next fork takes."""
        spec, context = self._engine.spec, attempt.request.context_tokens
        pending = attempt.pending
        last = pending is not None and len(pending.firsts) == 1
        return spec.pages_for(attempt.tokens) - (spec.pages_for(context) if last else context // spec.page_size)

    @property
    def context_pages(self) -> int:
        """Pages that are kept for forks to come; counted for each attempt, also where attempts share them."""
        return sum(self._engine.spec.pages_for(attempt.request.context_tokens) for attempt in self._pending)

    @property
    def kept_pages(self) -> int:
        """Pages of the contexts that are kept for forks, or will be; counted as in `context_pages`."""
        pages_for = self._engine.spec.pages_for
        coming = (each for each in self._live.values() if not each.committed and each.request.choices > 1)
        return self.context_pages + sum(pages_for(each.request.context_tokens) for each in coming)

    def room(self, pages: int) -> int:
        """Tokens of the largest context that so many pages hold with the first outputs."""
        return max(pages * self._engine.spec.page_size - self._reserve_tokens, 0)

    def fork(self, attempt: Attempt) -> Sequence:
        """Make a sequence of the attempt's next pending choice; others have the next turn. Raises OutOfPages."""
        pending = attempt.pending
        if pending is None:
            raise EngineError(f"{attempt.key}: no choice is pending")
        index, first = next(iter(pending.firsts.items()))
        if len(pending.firsts) == 1:
            handle = pending.context
            self._engine.extend(handle, attempt.tokens)
        else:
            context, owner = attempt.request.context_tokens, f"{attempt.key}/{index}"
            handle = self._engine.fork(pending.context, owner, context, attempt.tokens)
        del pending.firsts[index]
        self._oldest_leads = not self._oldest_leads
        if not pending.firsts:
            del self._pending[attempt]
            attempt.pending = None
        return self._sequence(attempt, first, handle, pending.handoff, pending.hasher, pending.fetch_ms, pending.since)

    def set_state(self, sequence: int, state: State, now: float) -> None:
        """A sequence is in the batch, or paused; ignored for one that was ended meanwhile."""
        if (owner := self._owners.get(sequence)) is not None:
            attempt, index = owner
            attempt.choices[index].state, attempt.choices[index].since = state, now
            self._settle(attempt, now)

    def cancel_choice(self, attempt: Attempt, choice: int, now: float) -> list[int]:
        """End one choice, now or at the commit; returns the sequences to drop."""
        attempt.cancelled.add(choice)
        if attempt.pending is not None and attempt.pending.firsts.pop(choice, None) is not None:
            if not attempt.pending.firsts:
                self._drop_pending(attempt)
            return []
        if (going := attempt.choices.get(choice)) is None:
            return []
        self._release(attempt, going)
        self.sequence_ended(going.sequence, now)
        return [going.sequence]

    def sequence_ended(self, sequence: int, now: float, digests: abc.Sequence[bytes] = ()) -> None:
        """Forget a sequence that is gone from the engine thread, where it published these blocks, or told to go."""
        attempt, choice = self._owners.pop(sequence)
        self._leave(attempt, attempt.choices.pop(choice), digests)
        self._settle(attempt, now)

    def is_over(self, attempt: Attempt) -> bool:
        """Whether no choice of the attempt is left, so that it is to be ended."""
        if attempt.committed:
            return not attempt.choices and attempt.pending is None
        return len(attempt.cancelled) >= attempt.request.choices

    def end(self, attempt: Attempt, now: float, *, publish: bool = True) -> list[int]:
        """End an attempt once: frees all that it holds, and returns the sequences to drop.

        What is final of its KV is left for others, unless `publish` is False.
        """
        held = attempt.handles
        if not attempt.life.end(now):
            return []
        del self._live[attempt.session, attempt.key]
        dropped = [choice.sequence for choice in attempt.choices.values()]
        if publish:
            for choice in attempt.choices.values():
                self._release(attempt, choice)
        self._free(held)
        self._pending.pop(attempt, None)
        attempt.pending = None
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
        elif states or attempt.pending is not None:
            state = State.SLOT_WAIT
        else:
            return
        if attempt.life.state is not state:
            attempt.life.enter(state, now)

    def _sequence(
        self,
        attempt: Attempt,
        first: FirstToken,
        handle: KvHandle,
        handoff: Handoff,
        hasher: RollingBlockHasher | None,
        fetch_ms: float,
        ready_at: float,
    ) -> Sequence:
        """A choice with its KV in place, from now on one of those that decode."""
        output_ids = [*handoff.output_ids, first.token.token_id]
        state = SequenceState(handoff.params, handoff.prompt_ids, tuple(output_ids), first.choice_index)
        own = hasher and hasher.fork(first.token.token_id)
        sequence = Sequence(next(self._ids), handle, state, output_ids, fetch_ms, ready_at, attempt.age, own)
        sequence.request_id = attempt.key.request_id
        attempt.choices[first.choice_index] = Choice(sequence.id, handle, own, ready_at)
        self._owners[sequence.id] = (attempt, first.choice_index)
        return sequence

    def _context(self, attempt: Attempt) -> KvHandle:
        """A handle that keeps the pages of the context, in which nothing is written any more."""
        tokens = attempt.request.context_tokens
        return self._engine.fork(attempt.handle, f"{attempt.key}/context", tokens, tokens, attempt.spare)

    def _drop_pending(self, attempt: Attempt) -> None:
        """No choice is pending any more."""
        if attempt.pending is not None:
            self._engine.free(attempt.pending.context)
            del self._pending[attempt]
            attempt.pending = None

    def _hasher(self, attempt: Attempt, handoff: Handoff, digests: abc.Sequence[bytes]) -> RollingBlockHasher:
        """The hasher of the context, whose full blocks have these digests."""
        spec = self._engine.spec
        rest = context_ids(handoff)[len(digests) * spec.kv_format.block_size :]
        return RollingBlockHasher(spec, attempt.request.cache_salt, digests, rest)

    def _release(self, attempt: Attempt, choice: Choice) -> None:
        """Free a sequence, and leave what is final of its KV to others; of one that has ended, the engine thread has.

        In one go: a step in between would find its last page published.
        """
        hasher = choice.hasher if choice.handle.alive else None
        digests = tuple(hasher.digests) if hasher is not None else ()
        self._engine.free(choice.handle, digests)
        self._leave(attempt, choice, digests)

    def _leave(self, attempt: Attempt, choice: Choice, digests: abc.Sequence[bytes]) -> None:
        """Tell of what a sequence has published at its end."""
        if digests:
            found = attempt.request.context_tokens // self._engine.spec.kv_format.block_size
            self._left(choice.handle.owner, digests, found)

    def _check_pinned(self, attempt: Attempt, digests: abc.Sequence[bytes]) -> None:
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
