"""The state machine of an attempt, shared by router, prefill and decode. Pure.

    router    QUEUED ─▶ RESERVING ─▶ PREFILLING ─▶ TRANSFERRING ─▶ DECODING ─▶ ENDED
                RESERVING ─▶ QUEUED       the request is too large for all decode workers that are there
                QUEUED ─▶ PREFILLING      the attempt needs no decode worker
                PREFILLING ─▶ DECODING    decode's first output has come before prefill's event
    prefill   PREPARING ─▶ PREFILLING ─▶ HELD ─▶ ENDED
    decode    RESERVED ─▶ TRANSFERRING ─▶ SLOT_WAIT ◀─▶ DECODING ─▶ ENDED

Each part has its own states of an attempt. A state of two parts may begin and end at other times in each: see `State`.
Every state may go to ENDED, and nothing leaves ENDED. Every state has a deadline: the request's own, or the state's
limit if that comes first.
"""

from __future__ import annotations

import enum
import math

from baton.errors import EngineError

PREFILL_TOKEN_S = 0.1
"""Seconds by which the limits of prefill, and of a fetch that runs beside it, grow with each token of the context."""


class State(enum.Enum):
    """The state of an attempt, as one of its parts sees it."""

    QUEUED = "queued"
    """In the router's queue."""
    RESERVING = "reserving"
    """The router has asked decode workers for pages."""
    PREPARING = "preparing"
    """At a prefill worker: look-up in the prefix cache, wait for pages, load of cached blocks."""
    PREFILLING = "prefilling"
    """Chunks are being computed; for the router, from the call until the first token."""
    HELD = "held"
    """Committed at a prefill worker, under its lease, until it is released."""
    RESERVED = "reserved"
    """Pages are held at a decode worker; the transfer has not begun."""
    TRANSFERRING = "transferring"
    """Decode fetches KV; for the router, from the first token until decode's first."""
    SLOT_WAIT = "slot_wait"
    """KV is in place at a decode worker, which has no slot for it now; also between two choices of one attempt."""
    DECODING = "decoding"
    """In the generation batch."""
    ENDED = "ended"
    """Everything was given back."""


_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RESERVING, State.PREFILLING}),
    State.RESERVING: frozenset({State.QUEUED, State.PREFILLING}),
    State.PREPARING: frozenset({State.PREFILLING}),
    State.PREFILLING: frozenset({State.TRANSFERRING, State.DECODING, State.HELD}),
    State.HELD: frozenset(),
    State.RESERVED: frozenset({State.TRANSFERRING}),
    State.TRANSFERRING: frozenset({State.SLOT_WAIT, State.DECODING}),
    State.SLOT_WAIT: frozenset({State.DECODING}),
    State.DECODING: frozenset({State.SLOT_WAIT}),
    State.ENDED: frozenset(),
}
FIRST = frozenset({State.QUEUED, State.PREPARING, State.RESERVED})
"""The first state of an attempt in each part."""


class Lifecycle:
    """The state of one attempt in one process; times are seconds on the caller's monotonic clock."""

    __slots__ = ("deadline", "request_deadline", "since", "state")

    def __init__(self, first: State, now: float, *, request_deadline: float = math.inf, limit_s: float = math.inf):
        if first not in FIRST:
            raise EngineError(f"an attempt can't begin in state {first.value}")
        self.request_deadline = request_deadline
        self.state = first
        self.since = now
        self.deadline = min(request_deadline, now + limit_s)
        """Latest time at which the state must be left; infinite without a limit."""

    @property
    def ended(self) -> bool:
        """Whether the attempt is over."""
        return self.state is State.ENDED

    def enter(self, state: State, now: float, limit_s: float = math.inf) -> None:
        """Go to another state, which may last `limit_s` seconds. Raises EngineError for a step that doesn't exist."""
        if state not in _NEXT[self.state]:
            raise EngineError(f"an attempt can't go from {self.state.value} to {state.value}")
        self.state, self.since = state, now
        self.deadline = min(self.request_deadline, now + limit_s)

    def end(self, now: float) -> bool:
        """Enter ENDED from any state; False if it had ended before, so that its memory is freed once."""
        if self.ended:
            return False
        self.state, self.since, self.deadline = State.ENDED, now, math.inf
        return True

    def is_overdue(self, now: float) -> bool:
        """Whether the deadline of the state has passed."""
        return now >= self.deadline

    def is_request_deadline(self) -> bool:
        """Whether the current deadline is the request's own, so that another attempt can't help."""
        return self.deadline >= self.request_deadline and not math.isinf(self.request_deadline)
