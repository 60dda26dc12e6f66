"""The rule for which waiters may ask decode workers for pages after a refusal. Pure.

A waiter is a request in the queue. The *head* is a waiter that all decode workers have refused: it goes before the
whole queue, and workers set pages aside for it as long as it asks again. A *restricted* waiter can ask only some of the
decode workers: the others are too small, have failed it, or are isolated. The *room* is the largest context that
workers can still reserve, in tokens.

    state                                               waiters that may ask
    no refusal                                          all
    the head was refused, and no worker has changed     those whose context fits the room, one at a time
    the head was refused, and a worker has changed      the head first, then those whose context fits, one at a time
    a waiter asks after a refusal of the head           none until it has its answer

    event                                               effect
    a worker changes                                    refused waiters may ask again
    the head is granted pages                           the state is "no refusal" again
    a waiter that overtook the head is granted pages    the room is smaller by its context
    a waiter that overtook the head is refused          the room is at most half of its context
    a restricted waiter is refused                      until a worker changes, it may not ask, nor may waiters that can
                                                        ask no other workers and whose context exceeds the room there
    a waiter is refused for its number of choices       no waiter with several choices may ask until a worker changes

A full fleet is thus asked about once for each change. The first restricted waiter that was refused also asks again
after a change. Of this one and the head, the one that has waited longer asks first, so that neither takes all the
free pages from the other.
"""

from __future__ import annotations

from router.placement.waiter import Waiter


class RefusalGate:
    """The decision whether a waiter may ask decode workers; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.ask_rounds = 0
        """Number of times that refused waiters might ask again: at changes of workers, ends of placements, timers."""
        self.restricted: Waiter | None = None
        """The restricted waiter that was refused first."""
        self._refused_at: int | None = None
        """The value of `ask_rounds` when all workers refused the head; None in the state "no refusal"."""
        self._room = 0
        """The largest context, in tokens, that can be reserved since that refusal."""
        self._asking: Waiter | None = None
        """The only waiter that asks since that refusal."""
        self._blocked: set[Waiter] = set()
        """Waiters that may not ask until the next round, because they are restricted or have several choices."""
        self._choices_blocked = False
        self._restricted_asks = False
        self._restricted_refusal: tuple[int, frozenset[str], int] = -1, frozenset(), 0
        """The latest refusal of a restricted waiter: `ask_rounds`, addresses that it could not ask, room in tokens."""
        self._first_since: dict[Waiter, float] = {}
        """Times at which waiters became the head, or the first restricted waiter."""

    def begin_ask_round(self) -> None:
        """Let refused waiters ask again."""
        self.ask_rounds += 1
        self._blocked.clear()
        self._choices_blocked = False

    def record_head(self, waiter: Waiter, now: float) -> None:
        """The waiter is the head of the queue since `now`, unless it was before."""
        self._first_since.setdefault(waiter, now)

    def may_ask(self, waiter: Waiter, head: Waiter | None, isolated: frozenset[str]) -> bool:
        """Whether a waiter may ask now; `isolated` are the addresses of workers that it can't ask."""
        several = len(waiter.request.choices) > 1
        if waiter in self._blocked or (several and self._choices_blocked) or self._would_be_refused(waiter, isolated):
            return False
        return self._finds_room(waiter, head)

    def restricted_may_ask(self, head: Waiter | None) -> bool:
        """Whether the first restricted waiter may ask before the head.

        The head can use all workers, and would take the pages of the few that the restricted waiter can use.
        """
        waiter = self.restricted
        if waiter is None or waiter in self._blocked:
            return False
        if head is not None and self._first_since[head] < self._first_since[waiter]:
            return False
        return self._finds_room(waiter, None)

    def begin_asking(self, waiter: Waiter) -> None:
        """The waiter asks decode workers now; the caller must call `end_asking`."""
        if self._refused_at is not None:
            self._asking = waiter
        self._restricted_asks = self._restricted_asks or waiter is self.restricted
        waiter.asked_at, waiter.overtook_head = self.ask_rounds, self._refused_at == self.ask_rounds

    def end_asking(self, waiter: Waiter) -> None:
        """The waiter has its answer, or has given up."""
        if self._asking is waiter:
            self._asking = None
        if self.restricted is waiter:
            self._restricted_asks = False

    def drop(self, waiter: Waiter) -> None:
        """Delete all that is known of a waiter that will not ask again."""
        self._drop_restricted(waiter)
        self._first_since.pop(waiter, None)
        self._blocked.discard(waiter)

    def record_grant(self, waiter: Waiter) -> None:
        """A worker has reserved pages for the waiter."""
        if waiter.overtook_head:
            self._room -= waiter.request.context_tokens
        else:
            self._refused_at, self._room = None, 0

    def record_refusal(self, waiter: Waiter, now: float) -> None:
        """All workers that could be asked have refused the waiter, for the reasons in `waiter.refusal`."""
        refusal, room = waiter.refusal, waiter.refusal.reservable_tokens
        if refusal.for_choices or refusal.unusable:
            if waiter.asked_at == self.ask_rounds:
                self._blocked.add(waiter)
                self._choices_blocked = self._choices_blocked or refusal.for_choices
            if not refusal.for_choices:
                self._restricted_refusal = waiter.asked_at, refusal.unusable, room
                if self.restricted is None:
                    self.restricted = waiter
                    self._first_since.setdefault(waiter, now)
            return
        self._drop_restricted(waiter)
        if waiter.overtook_head:
            self._room = min(room, waiter.request.context_tokens // 2)
        else:
            self._refused_at, self._room = waiter.asked_at, room

    def _drop_restricted(self, waiter: Waiter) -> None:
        if self.restricted is waiter:
            self.restricted, self._restricted_asks = None, False

    def _finds_room(self, waiter: Waiter, head: Waiter | None) -> bool:
        if self._refused_at is None:
            return True
        if self._asking is not None:
            return False
        if head in (None, waiter) and self._refused_at != self.ask_rounds:
            return True
        return waiter is not head and waiter.request.context_tokens <= self._room

    def _would_be_refused(self, waiter: Waiter, isolated: frozenset[str]) -> bool:
        """Whether the latest refusal of a restricted waiter shows that no worker that this waiter can ask has room."""
        ask_round, unusable, room = self._restricted_refusal
        holds = self._restricted_asks or ask_round == self.ask_rounds
        too_large = waiter.request.context_tokens > room
        return holds and too_large and unusable <= isolated.union(waiter.refusal.too_small)
