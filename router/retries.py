"""The rules for retries: which failures are followed by another attempt, and when. Pure.

    fault       an error of a worker or a pair: at most `max_attempts` attempts, and each retry is charged to the
                budget; faults before an attempt that brought FORGIVEN_TOKENS tokens do not count
    loss        a lost connection with a worker: not charged; after enough deaths the request runs isolated, and it ends
                if it kills a worker there
    drain, preemption, refusal by a full worker: not charged; after a first refusal another worker is tried at once

A request ends after MAX_IN_A_ROW attempts in a row without a token, and after as many deaths of workers without a token
from decode. All requests of a router share the budget: it allows retries for a fixed fraction of the accepted requests,
and some more each second, so that retries do not overload a fleet in which everything fails.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from baton.errors import Overloaded
from router.workers.failures import SAME_EVENT_S, AvoidedWorker, Cause, FailureEvent, Suspicion, WorkerLoss

MAX_IN_A_ROW = 16
DEATHS_UNTIL_ISOLATION = 2
FORGIVEN_TOKENS = 64
"""Tokens of one attempt after which earlier faults no longer count against the request."""
MAX_EXCUSED_DEATHS = 4
"""Largest number of deaths, of workers that a request had for itself, that are excused while others die without it."""

_ROUNDING = 1e-9

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


class RetryBudget:
    """A token bucket for retries of faults; times are seconds on the caller's clock.

    Each request adds `share` of a retry, each second `per_second` retries, up to `most`.
    """

    def __init__(
        self, now: float, *, share: float = 0.2, per_second: float = 10.0, most: float = 100.0, tokens: float = 100.0
    ) -> None:
        self._share, self._per_second, self._most = share, per_second, most
        self._tokens = min(tokens, most)
        self._filled = now
        self._last: dict[str, float] = {}

    def record_request(self) -> None:
        """Add `share` of a retry for an accepted request."""
        self._tokens = min(self._tokens + self._share, self._most)

    def charge(self, now: float, *, blamed: str = "", first: bool = False) -> bool:
        """Charge a retry after a fault; False if the budget is empty.

        One event may fail all requests at a worker. So of several faults of the same `blamed` address within
        SAME_EVENT_S seconds, only one is charged, if each is the `first` fault of its request.
        """
        self._tokens = min(self._tokens + (now - self._filled) * self._per_second, self._most)
        self._filled = now
        self._last = {name: at for name, at in self._last.items() if now - at < SAME_EVENT_S}
        if first and blamed in self._last:
            return True
        if self._tokens < 1:
            return False
        self._tokens -= 1
        if blamed:
            self._last[blamed] = now
        return True


@dataclass(slots=True)
class RetryHistory:
    """The attempts at some choices of a request; `attempt_numbers` counts the attempts of all choices."""

    attempt_numbers: Iterator[int] = field(default_factory=itertools.count)
    attempts: int = 0
    faults: int = 0
    refusals: int = 0
    avoided_workers: frozenset[AvoidedWorker] = frozenset()
    avoided_pairs: frozenset[tuple[str, str]] = frozenset()
    in_place_only: frozenset[str] = frozenset()
    """The mixed workers, after one of them had no pages for a prompt without a reservation there."""
    losses: list[WorkerLoss] = field(default_factory=list)
    """Losses of which the request is a suspect."""
    losses_at_decode: list[WorkerLoss] = field(default_factory=list)
    """Losses of decode workers among `losses`."""
    isolated_losses: list[WorkerLoss] = field(default_factory=list)
    """Losses among `losses` at which no other request was at the worker."""

    @property
    def suspicion(self) -> Suspicion:
        """The workers that the next attempt must have for itself, from the losses so far."""
        if _are_suspicious(self.losses_at_decode):
            return Suspicion.PAIR
        return Suspicion.PREFILL if _are_suspicious(self.losses) else Suspicion.NONE

    def record_loss(self, loss: WorkerLoss, *, at_decode: bool, isolated: bool) -> None:
        """Record a loss of which the request is a suspect; `isolated` if no other request of this router was there."""
        if loss not in self.losses:
            self.losses.append(loss)
            if at_decode:
                self.losses_at_decode.append(loss)
            if isolated and not loss.has_foreign_suspects:
                self.isolated_losses.append(loss)

    def clear_losses(self) -> None:
        """Clear the losses, because decode has sent a token of the latest attempt.

        A request that kills workers does so before that token, since a new attempt begins where the last one ended.
        """
        self.losses.clear()
        self.losses_at_decode.clear()
        self.isolated_losses.clear()

    def has_killed_workers(self, others: int) -> bool:
        """Whether the request has killed workers that it had for itself; `others` workers died without it meanwhile."""
        return sum(loss.death for loss in self.isolated_losses) > min(others, MAX_EXCUSED_DEATHS)

    def fork(self) -> RetryHistory:
        """A copy for one of the choices; `attempt_numbers` is shared, because it makes the keys of attempts."""
        return replace(
            self,
            losses=self.losses.copy(),
            losses_at_decode=self.losses_at_decode.copy(),
            isolated_losses=self.isolated_losses.copy(),
        )

    def record_progress(self, tokens: int) -> None:
        """Record that the latest attempt brought `tokens` tokens of each choice.

        Faults are forgiven only after FORGIVEN_TOKENS tokens: a request whose attempts all fail early must end.
        """
        self.attempts = 0
        if tokens >= FORGIVEN_TOKENS:
            self.faults = self.refusals = 0

    def next_delay_s(
        self,
        failure: FailureEvent,
        *,
        max_attempts: int,
        charge: Callable[[], bool],
        elsewhere: bool = False,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> float:
        """Record a failed attempt. Returns the seconds until the next one, or raises the error of `failure`.

        It raises if no other attempt is allowed. `elsewhere` tells whether there are other prefill workers.
        """
        self.attempts += 1
        error = failure.error
        match failure.cause:
            case Cause.FAULT:
                self.faults += 1
                if self.faults >= max_attempts or not charge():
                    raise error
            case Cause.REFUSED:
                self.refusals += 1
                hinted = isinstance(error, Overloaded) and error.retry_after is not None
                if self.refusals >= max_attempts and not hinted:
                    raise error
        # A token from prefill resets `attempts`, but a request that kills decode workers still gets one each time.
        if max(self.attempts, sum(loss.death for loss in self.losses)) >= MAX_IN_A_ROW:
            raise error
        if failure.cause is Cause.FAULT and self.faults > 1:
            return _pause(self.faults - 2, jitter)
        if failure.cause is Cause.REFUSED and not (elsewhere and self.refusals == 1):
            hint = error.retry_after if isinstance(error, Overloaded) else None
            return max(_pause(self.refusals - 1, jitter), min(hint or 0.0, _MAX_PAUSE_S))
        return 0.0


def _are_suspicious(losses: Iterable[WorkerLoss]) -> bool:
    shares = [loss.suspect_share for loss in losses if loss.death]
    return len(shares) >= DEATHS_UNTIL_ISOLATION and sum(shares) >= 1 - _ROUNDING


def _pause(doublings: int, jitter: Callable[[float, float], float]) -> float:
    return min(_MIN_PAUSE_S * 2.0**doublings, _MAX_PAUSE_S) * jitter(0.5, 1.0)
