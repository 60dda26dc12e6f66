"""The rule for which waiters may ask decode workers for pages after a refusal. Pure.

A waiter is a request in the queue. The waiter *refused first* is the one that all decode workers have refused: it goes
before the whole queue, and workers set pages aside for it as long as it asks again. A *restricted* waiter can ask only
some of the decode workers: the others are too small, have failed it, or are isolated. The *room* is the largest context
that workers can still reserve, in tokens. A *round* ends when a worker changes.

    state                                    waiters that may ask
    no refusal                               all
    refused first, in this round             those whose context fits the room, one at a time
    refused first, in an earlier round       the waiter refused first, then those whose context fits, one at a time
    a waiter asks after such a refusal       none until it has its answer

    event                                    effect
    a worker changes                         a new round: refused waiters may ask again
    the waiter refused first gets pages      the state is "no refusal" again
    a waiter that overtook it gets pages     the room is smaller by its context
    a waiter that overtook it is refused     the room is at most half of its context
    a restricted waiter is refused           it may not ask until the next round. The same holds for every waiter that
                                             can only use the same workers and needs more than the room there
    refused for its number of choices        no waiter with several choices may ask until the next round

A full fleet is thus asked about once for each change. The restricted waiter that was refused before the other
restricted ones also asks again after a change. Of this one and the waiter refused first, the one that has waited longer
asks before the other, so that neither takes all the free pages.
"""

from __future__ import annotations

from router.placement.waiter import Waiter


class RefusalGate:
    """The decision whether a waiter may ask decode workers; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.retry_round = 0
        """Number of the current round. Statuses of workers and ends of placements begin a new one."""
        self.restricted: Waiter | None = None
        """The restricted waiter that was refused before the other restricted ones."""
        self._refused_in_round: int | None = None
        """The round in which all workers refused the waiter refused first; None in the state "no refusal"."""
        self._reservable_tokens = 0
        """The largest context, in tokens, that can be reserved since that refusal."""
        self._reserving: Waiter | None = None
        """The only waiter that asks since that refusal."""
        self._blocked: set[Waiter] = set()
        """Waiters that may not ask until the next round, because they are restricted or have several choices."""
        self._choices_blocked = False
        self._restricted_reserves = False
        self._restricted_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """The latest refusal of a restricted waiter: the round, addresses that it could not ask, room in tokens."""
        self._first_since: dict[Waiter, float] = {}
        """Times at which waiters became `refused_first`, or `restricted`."""

    @property
    def refused(self) -> bool:
        """Whether all decode workers have refused a waiter, and it has not got pages since."""
        return self._refused_in_round is not None

    def begin_retry_round(self) -> None:
        """Let refused waiters ask again: a worker may have changed."""
        self.retry_round += 1
        self._blocked.clear()
        self._choices_blocked = False

    def record_refused_first(self, waiter: Waiter, now: float) -> None:
        """The waiter is the one refused first since `now`, unless it was before."""
        self._first_since.setdefault(waiter, now)

    def may_reserve(self, waiter: Waiter, refused_first: Waiter | None, isolated: frozenset[str]) -> bool:
        """Whether a waiter may ask now; `isolated` are the addresses of workers that it can't ask."""
        several = len(waiter.request.choices) > 1
        if waiter in self._blocked or (several and self._choices_blocked) or self._would_be_refused(waiter, isolated):
            return False
        return self._finds_room(waiter, refused_first)

    def restricted_may_reserve(self, refused_first: Waiter | None) -> bool:
        """Whether the waiter `restricted` may ask before the one refused first.

        The latter can use all workers, and would take the pages of the few that the restricted waiter can use.
        """
        waiter = self.restricted
        if waiter is None or waiter in self._blocked:
            return False
        if refused_first is not None and self._first_since[refused_first] < self._first_since[waiter]:
            return False
        return self._finds_room(waiter, None)

    def begin_reserving(self, waiter: Waiter) -> None:
        """The waiter asks decode workers now; the caller must call `end_reserving`."""
        if self._refused_in_round is not None:
            self._reserving = waiter
        self._restricted_reserves = self._restricted_reserves or waiter is self.restricted
        waiter.asked_in_round = self.retry_round
        waiter.overtook_refused_first = self._refused_in_round == self.retry_round

    def end_reserving(self, waiter: Waiter) -> None:
        """The waiter has its answer, or has given up."""
        if self._reserving is waiter:
            self._reserving = None
        if self.restricted is waiter:
            self._restricted_reserves = False

    def drop(self, waiter: Waiter) -> None:
        """Delete all that is known of a waiter that will not ask again."""
        self._drop_restricted(waiter)
        self._first_since.pop(waiter, None)
        self._blocked.discard(waiter)

    def record_grant(self, waiter: Waiter) -> None:
        """A worker has reserved pages for the waiter."""
        if waiter.overtook_refused_first:
            self._reservable_tokens -= waiter.request.context_tokens
        else:
            self._refused_in_round, self._reservable_tokens = None, 0

    def record_refusal(self, waiter: Waiter, now: float) -> None:
        """All workers that could be asked have refused the waiter, for the reasons in `waiter.refusal`."""
        refusal, room = waiter.refusal, waiter.refusal.reservable_tokens
        if refusal.lacks_room_for_choices or refusal.unasked_workers:
            if waiter.asked_in_round == self.retry_round:
                self._blocked.add(waiter)
                self._choices_blocked = self._choices_blocked or refusal.lacks_room_for_choices
            if not refusal.lacks_room_for_choices:
                self._restricted_refusal = waiter.asked_in_round, refusal.unasked_workers, room
                if self.restricted is None:
                    self.restricted = waiter
                    self._first_since.setdefault(waiter, now)
            return
        self._drop_restricted(waiter)
        if waiter.overtook_refused_first:
            self._reservable_tokens = min(room, waiter.request.context_tokens // 2)
        else:
            self._refused_in_round, self._reservable_tokens = waiter.asked_in_round, room

    def _drop_restricted(self, waiter: Waiter) -> None:
        if self.restricted is waiter:
            self.restricted, self._restricted_reserves = None, False

    def _finds_room(self, waiter: Waiter, refused_first: Waiter | None) -> bool:
        if self._refused_in_round is None:
            return True
        if self._reserving is not None:
            return False
        if refused_first in (None, waiter) and self._refused_in_round != self.retry_round:
            return True
        return waiter is not refused_first and waiter.request.context_tokens <= self._reservable_tokens

    def _would_be_refused(self, waiter: Waiter, isolated: frozenset[str]) -> bool:
        """Whether the latest refusal of a restricted waiter shows that no worker that this waiter can ask has room."""
        refused_in_round, unasked_workers, room = self._restricted_refusal
        holds = self._restricted_reserves or refused_in_round == self.retry_round
        too_large = waiter.request.context_tokens > room
        return holds and too_large and unasked_workers <= isolated.union(waiter.refusal.too_small_workers)
