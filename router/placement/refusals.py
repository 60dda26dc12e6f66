"""The rule for which waiters may reserve pages at decode workers after a refusal. Pure.

A waiter is a request in the queue. The *head of line* is the waiter that all decode workers have refused: it goes
before the whole queue, and workers set pages aside for it as long as it asks again. A *restricted* waiter can use only
some of the decode workers: the others are too small, have failed it, or are isolated. The *reservable tokens* are the
largest context that workers can still reserve. An *epoch* of the fleet ends when a worker sends a status or a placement
ends, since there may be more free pages then.

    state                                    waiters that may reserve
    no refusal                               all
    head of line refused in this epoch       those whose context fits, one at a time
    head of line refused in an earlier one   the head of line, then those whose context fits, one at a time
    a waiter reserves after such a refusal   none until it has its answer

    event                                    effect
    a status comes or a placement ends       a new epoch: refused waiters may reserve again
    the head of line gets pages              the state is "no refusal" again
    a waiter that overtook it gets pages     the reservable tokens fall by its context
    a waiter that overtook it is refused     the reservable tokens are at most half of its context
    a restricted waiter is refused           it may not reserve until the next epoch. The same holds for every waiter
                                             that can only use the same workers and needs more than the tokens there
    refused for its number of choices        no waiter with several choices may reserve until the next epoch

A full fleet is thus asked about once in each epoch. In a new epoch two waiters go first: the head of line, and the
restricted waiter that was refused first. Of these two, the one that has waited longer goes first, so that neither takes
all the free pages.
"""

from __future__ import annotations

from router.placement.waiter import Waiter


class RefusalGate:
    """The decision whether a waiter may reserve pages; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.fleet_epoch = 0
        """Number of the current epoch. Statuses of workers and ends of placements begin a new one."""
        self.restricted_waiter: Waiter | None = None
        """The restricted waiter that was refused before the other restricted ones."""
        self._head_of_line: Waiter | None = None
        """The latest head of line, also while it reserves; None once it will not do so again."""
        self._refused_in_epoch: int | None = None
        """The epoch in which all workers refused the head of line; None in the state "no refusal"."""
        self._reservable_tokens = 0
        """The largest context, in tokens, that can be reserved since that refusal."""
        self._reserving: Waiter | None = None
        """The only waiter that reserves since that refusal."""
        self._blocked: set[Waiter] = set()
        """Waiters that may not reserve until the next epoch, because they are restricted or have several choices."""
        self._choices_blocked = False
        self._restricted_reserves = False
        self._restricted_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """The latest refusal of a restricted waiter: the epoch, addresses that it could not use, reservable tokens."""
        self._goes_first_since: dict[Waiter, float] = {}
        """Times at which waiters became the head of line, or `restricted_waiter`."""

    @property
    def head_of_line_waits(self) -> bool:
        """Whether a waiter that all decode workers have refused still waits for pages."""
        return self._refused_in_epoch is not None and self._head_of_line is not None

    def begin_epoch(self) -> None:
        """Let refused waiters reserve again: a worker may have changed."""
        self.fleet_epoch += 1
        self._blocked.clear()
        self._choices_blocked = False

    def record_head_of_line(self, waiter: Waiter, now: float) -> None:
        """Record that the waiter is the head of line since `now`, unless it was before."""
        self._head_of_line = waiter
        self._goes_first_since.setdefault(waiter, now)

    def may_reserve(self, waiter: Waiter, head_of_line: Waiter | None, isolated: frozenset[str]) -> bool:
        """Whether a waiter may reserve now; `isolated` are the addresses of workers that it can't use."""
        several = len(waiter.request.choices) > 1
        if waiter in self._blocked or (several and self._choices_blocked) or self._would_be_refused(waiter, isolated):
            return False
        return self._fits(waiter, head_of_line)

    def restricted_may_reserve(self, head_of_line: Waiter | None) -> bool:
        """Whether `restricted_waiter` may reserve before the head of line.

        The latter can use all workers, and would take the pages of the few that the restricted waiter can use.
        """
        waiter = self.restricted_waiter
        if waiter is None or waiter in self._blocked:
            return False
        if head_of_line is not None and self._goes_first_since[head_of_line] < self._goes_first_since[waiter]:
            return False
        return self._fits(waiter, None)

    def begin_reserving(self, waiter: Waiter) -> None:
        """Record that the waiter reserves now; the caller must call `end_reserving`."""
        if self._refused_in_epoch is not None:
            self._reserving = waiter
        self._restricted_reserves = self._restricted_reserves or waiter is self.restricted_waiter
        waiter.turn_epoch = self.fleet_epoch
        waiter.overtook_head_of_line = self._refused_in_epoch == self.fleet_epoch

    def end_reserving(self, waiter: Waiter) -> None:
        """Record that the waiter has its answer, or has given up."""
        if self._reserving is waiter:
            self._reserving = None
        if self.restricted_waiter is waiter:
            self._restricted_reserves = False

    def forget(self, waiter: Waiter) -> None:
        """Delete all that is known of a waiter that will not reserve again."""
        self._drop_restricted(waiter)
        if self._head_of_line is waiter:
            self._head_of_line = None
        self._goes_first_since.pop(waiter, None)
        self._blocked.discard(waiter)

    def record_grant(self, waiter: Waiter) -> None:
        """Record that a worker has reserved pages for the waiter."""
        if waiter.overtook_head_of_line:
            self._reservable_tokens -= waiter.request.context_tokens
        else:
            self._refused_in_epoch, self._reservable_tokens = None, 0

    def record_refusal(self, waiter: Waiter, now: float) -> None:
        """Record that all workers that it could use have refused the waiter, for the reasons in `waiter.refusal`."""
        refusal, reservable_tokens = waiter.refusal, waiter.refusal.reservable_tokens
        if refusal.refused_for_choices or refusal.excluded_workers:
            if waiter.turn_epoch == self.fleet_epoch:
                self._blocked.add(waiter)
                self._choices_blocked = self._choices_blocked or refusal.refused_for_choices
            if not refusal.refused_for_choices:
                self._restricted_refusal = waiter.turn_epoch, refusal.excluded_workers, reservable_tokens
                if self.restricted_waiter is None:
                    self.restricted_waiter = waiter
                    self._goes_first_since.setdefault(waiter, now)
            return
        self._drop_restricted(waiter)
        if waiter.overtook_head_of_line:
            self._reservable_tokens = min(reservable_tokens, waiter.request.context_tokens // 2)
        else:
            self._refused_in_epoch, self._reservable_tokens = waiter.turn_epoch, reservable_tokens

    def _drop_restricted(self, waiter: Waiter) -> None:
        if self.restricted_waiter is waiter:
            self.restricted_waiter, self._restricted_reserves = None, False

    def _fits(self, waiter: Waiter, head_of_line: Waiter | None) -> bool:
        if self._refused_in_epoch is None:
            return True
        if self._reserving is not None:
            return False
        if head_of_line in (None, waiter) and self._refused_in_epoch != self.fleet_epoch:
            return True
        return waiter is not head_of_line and waiter.request.context_tokens <= self._reservable_tokens

    def _would_be_refused(self, waiter: Waiter, isolated: frozenset[str]) -> bool:
        """Whether this waiter can use only workers that have just refused another, and needs more than they have."""
        refused_in_epoch, excluded_workers, reservable_tokens = self._restricted_refusal
        holds = self._restricted_reserves or refused_in_epoch == self.fleet_epoch
        too_large = waiter.request.context_tokens > reservable_tokens
        return holds and too_large and excluded_workers <= isolated.union(waiter.refusal.too_small_reasons)
