"""The failed attempts that are followed by another one, and the times. Pure.

    fault       something is wrong with a worker or a pair: at most `max_attempts`, each charged to the budget; those
                before an attempt that brought FORGIVEN_TOKENS do not count
    loss        the connection with the worker was lost: free of charge; a request that worker deaths point at runs
                alone, and ends if the worker dies then too
    drain, preemption, refusal by a full worker: nobody's fault, free of charge

All together are bounded by MOST_ATTEMPTS in a row that brought no token, and by as many deaths of workers without a
token from decode. The budget is the router's: retries of faults may be a share of the requests that were accepted, and
a few more each second, so that a fleet in which everything fails is not asked the same again and again by everybody at
once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from baton.errors import Overloaded
from router.placement.fleet import DecodeView, PrefillView
from router.request import Cause, Failed, Suspicion
from router.workers.failures import SAME_EVENT_S, WorkerLoss

MOST_ATTEMPTS = 16
DEATHS_UNTIL_ALONE = 2
FORGIVEN_TOKENS = 64
"""An attempt that brought so many tokens proves that the faults before it were not the request's."""
MOST_EXCUSED = 4
"""Deaths of workers that a request had for itself and that do not end it, while other workers die without it."""

_ROUNDING = 1e-9

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class RetryBudget:
    """A token bucket; times are seconds on the caller's clock."""

    def __init__(
        self, now: float, *, share: float = 0.2, per_second: float = 10.0, most: float = 100.0, tokens: float = 100.0
    ) -> None:
        self._share, self._per_second, self._most = share, per_second, most
        self._tokens = min(tokens, most)
        self._filled = now
        self._last: dict[str, float] = {}

    def record_request(self) -> None:
        """A request came: a share of a retry more."""
        self._tokens = min(self._tokens + self._share, self._most)

    def charge(self, now: float, *, culprit: str = "", first: bool = False) -> bool:
        """Whether a fault may be followed by a retry, which is then charged.

        One event may fail all that a worker runs: of faults of one `culprit` within SAME_EVENT_S one is charged,
        provided that they are the requests' `first`, so that none gets more than one retry in this way.
        """
        self._tokens = min(self._tokens + (now - self._filled) * self._per_second, self._most)
        self._filled = now
        self._last = {name: at for name, at in self._last.items() if now - at < SAME_EVENT_S}
        if first and culprit in self._last:
            return True
        if self._tokens < 1:
            return False
        self._tokens -= 1
        if culprit:
            self._last[culprit] = now
        return True


@dataclass(frozen=True, slots=True)
class AvoidedWorker:
    """An incarnation of a worker that failed a request; `loss` is the lost connection, if it was one."""

    worker: str
    incarnation: str
    loss: WorkerLoss | None = None

    def applies(self, view: PrefillView | DecodeView) -> bool:
        """Whether the incarnation that is at the address now is to be avoided."""
        return self.incarnation == view.incarnation and (self.loss is None or self.loss.death)


@dataclass(slots=True)
class History:
    """Attempts at some choices of a request; attempts are numbered over all of them."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    attempts: int = 0
    faults: int = 0
    refusals: int = 0
    avoid: frozenset[AvoidedWorker] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()
    losses: list[WorkerLoss] = field(default_factory=list)
    """Lost connections of which it is a suspect."""
    losses_at_decode: list[WorkerLoss] = field(default_factory=list)
    """Deaths of decode workers among them."""
    losses_alone: list[WorkerLoss] = field(default_factory=list)
    """Deaths among them at which no other request was there."""

    @property
    def suspicion(self) -> Suspicion:
        """The workers that the next attempt must have for itself, by the losses that are known now."""
        if _point_at_it(self.losses_at_decode):
            return Suspicion.DECODE
        return Suspicion.PREFILL if _point_at_it(self.losses) else Suspicion.NONE

    def record_loss(self, loss: WorkerLoss, *, at_decode: bool, alone: bool) -> None:
        """It is a suspect of a loss; `alone` when no other request of this router was there."""
        if loss not in self.losses:
            self.losses.append(loss)
            if at_decode:
                self.losses_at_decode.append(loss)
            if alone and not loss.shared:
                self.losses_alone.append(loss)

    def clear_losses(self) -> None:
        """Decode has computed a token of the latest attempt: whatever killed workers before, it was not this request.

        One that kills does so at its next token, since a new attempt begins where the last one ended.
        """
        self.losses.clear()
        self.losses_at_decode.clear()
        self.losses_alone.clear()

    def is_guilty(self, others: int) -> bool:
        """Whether it has killed a worker that it had for itself, when so many others died without it meanwhile."""
        return sum(loss.death for loss in self.losses_alone) > min(others, MOST_EXCUSED)

    def fork(self) -> History:
        """The history of one of the choices from here on; numbers stay common, since they name attempts."""
        return replace(
            self,
            losses=self.losses.copy(),
            losses_at_decode=self.losses_at_decode.copy(),
            losses_alone=self.losses_alone.copy(),
        )

    def record_progress(self, tokens: int) -> None:
        """The latest attempt brought so many tokens of each choice.

        A few tokens forgive no faults: a request at which every step raises soon after its begin must end.
        """
        self.attempts = 0
        if tokens >= FORGIVEN_TOKENS:
            self.faults = self.refusals = 0

    def retry(
        self,
        failed: Failed,
        *,
        max_attempts: int,
        charge: Callable[[], bool],
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> float:
        """Seconds to wait before the next attempt; raises the error that is the answer when there is none."""
        self.attempts += 1
        error = failed.error
        match failed.cause:
            case Cause.FAULT:
                self.faults += 1
                if self.faults >= max_attempts or not charge():
                    raise error
            case Cause.REFUSED:
                self.refusals += 1
                hinted = isinstance(error, Overloaded) and error.retry_after is not None
                if self.refusals >= max_attempts and not hinted:
                    raise error
        # Prefill's token is progress of the stream, but says nothing of a request that kills decode workers.
        if max(self.attempts, sum(loss.death for loss in self.losses)) >= MOST_ATTEMPTS:
            raise error
        if failed.cause is Cause.FAULT and self.faults > 1:
            return _pause(self.faults - 2, jitter)
        if failed.cause is Cause.REFUSED:
            hint = error.retry_after if isinstance(error, Overloaded) else None
            return max(_pause(self.refusals - 1, jitter), min(hint or 0.0, _LONGEST_PAUSE_S))
        return 0.0


def _point_at_it(losses: Iterable[WorkerLoss]) -> bool:
    shares = [loss.share for loss in losses if loss.death]
    return len(shares) >= DEATHS_UNTIL_ALONE and sum(shares) >= 1 - _ROUNDING


def _pause(doublings: int, jitter: Callable[[float, float], float]) -> float:
    return min(_SHORTEST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S) * jitter(0.5, 1.0)
