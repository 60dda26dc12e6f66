"""Who gets a place and pages next: a reservation that a router asks for, or a fork of a committed attempt. Pure.

    reserve ── malformed, or larger than the worker ─▶ Refused
       │────── the batch lacks pages, all places are taken, pages are missing ─▶ Overloaded, try again
       │                       a claim keeps pages for who lacks them (`claims`)
       │────── it has several choices, and contexts that are kept for forks have half of the pages ─▶ Overloaded
       └─────▶ Attempt, which counts as one sequence, however many choices it has
    forks ───▶ sequences of further choices, as places and pages come free; to be asked for whenever that may be so

Of several attempts the oldest and the one with the fewest pending choices lead alternately (`Attempts.pending`). A fork
that lacks pages waits, and keeps nobody from a place.

A context is kept until the last choice of its request is forked, long after the first ones have ended. Contexts that
are kept have half of the pages at most, or there is only one; so they leave room for others, whatever the number of
requests with many choices. Who waits for a part of that half has a claim on it.

Why all forks end. A pending fork waits for a place, for the batch to have room for what is paused, or for pages.
Places come free, since all that runs ends, and forks get every second one (`admission`). For the rest there is a rule:
when nothing moves, that is when all sequences are paused and nothing is on its way here, a fork may start though the
batch lacks pages. There is always one that can: no pages are in use then but those of the contexts that are kept, and
the attempt that was granted last among these was granted one choice's pages beside all these contexts, its own page
that forks can't share included. So in the end no context is kept, and the oldest paused sequence has the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from baton.engine.contract import Engine
from baton.errors import OutOfPages, Overloaded
from decode_svc.admission import Admission
from decode_svc.attempt import Attempt
from decode_svc.attempts import Attempts
from decode_svc.claims import FORKS, NOBODY, Claimant, Claims, ContextsKept, PagesKept
from decode_svc.messages import Reserve
from decode_svc.scheduler import Decoding

T = TypeVar("T")

CONTEXTS_SHARE = 2
"""One in so many pages may be kept in contexts whose further choices are still to be forked."""


@dataclass(slots=True)
class Forked:
    """What came of the forks whose turn it was: sequences for the batch, and attempts that the engine has failed."""

    started: list[Decoding] = field(default_factory=list)
    failed: list[tuple[Attempt, Exception]] = field(default_factory=list)


class Batch(Protocol):
    """What is known of the generation batch."""

    @property
    def crowded(self) -> bool:
        """Whether it lacks pages."""

    @property
    def paused(self) -> int:
        """Sequences that left it for want of pages, and wait to come back."""


class Grants:
    """Decides for one worker; times are seconds on the caller's clock.

    `spared` gives back pages that are held for no request; False if there were none.
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        admission: Admission,
        batch: Batch,
        spared: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._attempts = attempts
        self.admission = admission
        self._batch = batch
        self._spared = spared
        self.claims = Claims()
        self._context_claims = Claims()

    def reserve(self, session: int, request: Reserve, now: float, limit_s: float = math.inf) -> Attempt:
        """The attempt with its pages. Raises Refused for what can never be, Overloaded for what can't be now."""
        need, claimant = self._attempts.check(session, request).pages, (session, request.key)
        self.claims.renew(claimant, now)
        self._context_claims.renew(claimant, now)
        if self._batch.crowded:
            stats = self._engine.stats()
            raise Overloaded(
                f"the batch lacks pages, {stats.free + stats.cached} of {stats.total} are free; "
                f"{self._batch.paused} sequences are paused"
            )
        if request.choices > 1:
            # Before a place is asked for, which would be left free for it.
            self._check_contexts(claimant, self._engine.spec.pages_for(request.context_tokens), now)
        self.admission.check(self._attempts.sequences, now)
        try:
            self._check_kept(claimant, need, now)
            attempt = self._with_spared(lambda: self._attempts.reserve(session, request, now, limit_s))
        except OutOfPages:
            self.claims.want(claimant, need, now)
            raise
        self.claims.granted(claimant, self._free())
        self._context_claims.granted(claimant, self._free_for_contexts)
        self.admission.granted(now, pending=bool(self._attempts.pending))
        return attempt

    def drop(self, session: int) -> None:
        """The session has ended, and claims nothing any more."""
        self.claims.drop(session)
        self._context_claims.drop(session)

    def forks(self, now: float) -> Forked:
        """Start the forks whose turn it is; each sequence is to be given a slot, and what failed is to be ended."""
        forked = Forked()
        while turns := self._attempts.pending:
            if not self._may_fork(now):
                return forked
            started = self._fork(turns, forked, now)
            # Its turn is over, also where pages are missing.
            self.admission.forked()
            if not started:
                return forked
        self.admission.forked()
        return forked

    def room(self, now: float) -> int:
        """Tokens of the largest context that a request without a claim could have now."""
        free = self._free()
        return self._attempts.room(free - self.claims.kept(NOBODY, free, now))

    def wake_at(self, now: float) -> float:
        """When `forks` is to be called though nothing happens; infinite if that is not needed."""
        return self.admission.wake_at(self._attempts.sequences, now) if self._attempts.pending else math.inf

    @property
    def _moving(self) -> bool:
        return any(attempt.moves for attempt in self._attempts)

    def _may_fork(self, now: float) -> bool:
        if self._moving:
            return not self._batch.crowded and self.admission.may_fork(self._attempts.sequences, now)
        # Paused sequences have no place in the batch.
        return self.admission.may_fork(0, now)

    def _fork(self, turns: Sequence[Attempt], forked: Forked, now: float) -> bool:
        """Fork the first that has the pages; False if there is none, and then they are claimed."""
        moving = self._moving
        for attempt in turns:
            try:
                if moving:
                    self._check_kept(FORKS, self._attempts.fork_pages(attempt), now)
                forked.started.append(self._with_spared(partial(self._attempts.fork, attempt)))
            except OutOfPages:
                continue
            except Exception as error:
                forked.failed.append((attempt, error))
                return False
            self.claims.granted(FORKS, self._free())
            return True
        self.claims.want(FORKS, self._fork_claim(turns), now)
        return False

    def _fork_claim(self, turns: Sequence[Attempt]) -> int:
        """Pages of the first fork that finds room beside all contexts that are kept; of the smallest if none does."""
        needs = [self._attempts.fork_pages(attempt) for attempt in turns]
        room = self._engine.spec.pages - self._attempts.context_pages
        return next((need for need in needs if need <= room), min(needs))

    def _check_kept(self, claimant: Claimant, need: int, now: float) -> None:
        """Raise OutOfPages where these pages are set aside for another claim; all are counted, shared ones too."""
        free = self._free()
        if (kept := self.claims.kept(claimant, free, now)) and need > free - kept:
            raise PagesKept(need, free, self._engine.spec.pages, kept)

    def _check_contexts(self, claimant: Claimant, pages: int, now: float) -> None:
        """Raise ContextsKept, and leave a claim, where contexts to be kept would have more than their share."""
        # One that is larger than the share is kept alone.
        most, free = self._most_for_contexts, self._free_for_contexts
        need = min(pages, most)
        kept = self._context_claims.kept(claimant, free, now)
        if need > free - kept:
            self._context_claims.want(claimant, need, now)
            raise ContextsKept(pages, free - kept, most)

    @property
    def _most_for_contexts(self) -> int:
        return self._engine.spec.pages // CONTEXTS_SHARE

    @property
    def _free_for_contexts(self) -> int:
        return max(self._most_for_contexts - self._attempts.kept_pages, 0)

    def _free(self) -> int:
        stats = self._engine.stats()
        return stats.free + stats.cached

    def _with_spared(self, take: Callable[[], T]) -> T:
        """What `take` yields, if need be with the pages that are held for no request."""
        try:
            return take()
        except OutOfPages:
            if not self._spared():
                raise
        return take()
