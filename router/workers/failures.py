"""Failures of attempts: their kinds, the workers that others avoid for them, and whether another attempt follows. Pure.

There is a breaker (`baton.breaker`) for each worker and each (prefill, decode) pair, shared by all requests of a
router. A request avoids what failed *it*; breakers make all requests avoid what fails them one after another. They
advise only: placement uses excluded workers when no others are there. A worker's death is no fault of this kind,
since a dead worker is not placed on anyway; nor is a drain or a refusal.

    the connection is lost: presumed a death ──┬─ the same incarnation is heard again ──▶ no death, counts for nothing
                                               ├─ another incarnation at the address ──▶ a death
                                               └─ nothing is heard again ──▶ it stays a presumed death

The *suspects* of a loss are the requests that had not yet had a token from the worker: once replayed, a request that
kills does so before its next token. If all have had one, all are suspects. The choices of a request count as one. Each
suspect carries an equal share of the loss, so that one death among a hundred says almost nothing about each of them.

Failures and the attempts that follow them:

    fault       something is wrong with a worker or a pair: at most `max_attempts`, each charged to the budget; those
                before an attempt that brought FORGIVEN_TOKENS do not count
    loss        the connection with the worker was lost: free of charge; a request that worker deaths point at runs
                alone, and ends if the worker dies then too
    drain, preemption, refusal by a full worker: nobody's fault, free of charge

All together are bounded by MAX_IN_A_ROW in a row that brought no token, and by as many deaths of workers without a
token from decode. The budget is the router's: retries of faults may be a share of the requests that were accepted, and
a few more each second, so that requests do not all load a fleet in which everything fails again and again.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

from baton.breaker import Breaker, Permit
from baton.errors import BatonError, Overloaded
from router.placement.policy import DecodeView, Excluded, PrefillView


class Blame(enum.Enum):
    """The part of an attempt that has a fault."""

    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"


class Cause(enum.Enum):
    """The kind of a failure; only a fault counts against the part that has it."""

    FAULT = "fault"
    LOST = "lost"
    """The connection with the worker was lost: its watch or session broke or fell silent, or the worker said that it
    makes no progress. Whether the worker died is seen later."""
    DRAIN = "drain"
    PREEMPTED = "preempted"
    """The worker ran out of memory for the sequence; nothing is wrong with it."""
    REFUSED = "refused"
    """The worker was full."""


class Suspicion(enum.IntEnum):
    """The workers that a request is suspected of killing, and so must have for itself."""

    NONE = 0
    PREFILL = 1
    """Deaths of workers point at it, but too few of decode workers."""
    DECODE = 2
    """Deaths of decode workers alone suffice; it has a prefill worker for itself as well."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt can't go on."""

    error: BatonError
    blame: Blame
    cause: Cause = Cause.FAULT
    loss: WorkerLoss | None = None
    """The lost connection, if the request is one of its suspects."""


Key = tuple[str, ...]
"""(worker,) or (prefill, decode)."""

WORKER_FAULTS, PAIR_FAULTS = 3, 1
"""Faults in a row that open a breaker. A pair fails by its link, which no other request will find better."""

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0

SAME_EVENT_S = 0.1
"""Faults closer than this are one event: a failing step fails each sequence in it."""


class AttemptBreakers:
    """One attempt's part in the breakers of its workers and their pair, from its placement to its end."""

    def __init__(self, breakers: Breakers, prefill: str, decode: str | None) -> None:
        self._breakers = breakers
        self.prefill: Key = (prefill,)
        self.decode: Key | None = None if decode is None else (decode,)
        self.pair: Key | None = None if decode is None else (prefill, decode)
        keys = [key for key in (self.prefill, self.decode, self.pair) if key is not None]
        trials: dict[Key, Permit | None] = {key: breakers.start_trial(key) for key in keys}
        self._trials: dict[Key, Permit] = {key: permit for key, permit in trials.items() if permit is not None}

    def record_success(self, key: Key | None) -> None:
        """The worker or pair that `key` names did its part."""
        if key is not None:
            self._trials.pop(key, None)
            self._breakers.record_success(key)

    def pass_trial(self, key: Key | None) -> None:
        """The worker or pair has begun to do its part, which ends a trial well, but not yet a row of faults."""
        if key in self._trials:
            self.record_success(key)

    def record_fault(self, key: Key | None) -> None:
        """The worker or pair that `key` names is at fault."""
        if key is not None:
            self._breakers.record_fault(key, self._trials.pop(key, None))

    def end(self) -> None:
        """The attempt is over; a trial that found out nothing is free for another."""
        for key, permit in self._trials.items():
            self._breakers.release(key, permit)
        self._trials.clear()


class Breakers:
    """All breakers of a router, on `clock`; only those with a fault are kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakers: dict[Key, Breaker] = {}

    def excluded(self) -> Excluded:
        """The workers and pairs that placement should leave out now."""
        keys = [key for key, breaker in self._breakers.items() if not breaker.due]
        return Excluded(
            frozenset(key[0] for key in keys if len(key) == 1),
            frozenset((key[0], key[1]) for key in keys if len(key) == 2),
        )

    def count_open(self) -> tuple[int, int]:
        """Numbers of workers and pairs whose breaker is not closed."""
        keys = [key for key, breaker in self._breakers.items() if not breaker.closed]
        workers = sum(len(key) == 1 for key in keys)
        return workers, len(keys) - workers

    def begin_attempt(self, prefill: str, decode: str | None) -> AttemptBreakers:
        """An attempt is placed; it is the trial of each half-open breaker on its way."""
        return AttemptBreakers(self, prefill, decode)

    def start_trial(self, key: Key) -> Permit | None:
        """The permit of the trial of what `key` names, if the caller is now the trial."""
        breaker = self._breakers.get(key)
        return None if breaker is None or breaker.closed else breaker.request()

    def record_success(self, key: Key) -> None:
        """End the row of faults of what `key` names."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return
        if breaker.closed:
            del self._breakers[key]
        breaker.record_success()

    def record_fault(self, key: Key, trial: Permit | None = None) -> None:
        """Count a fault of what `key` names; `trial` is the permit of a caller that is its trial."""
        if (breaker := self._breakers.get(key)) is None:
            threshold = WORKER_FAULTS if len(key) == 1 else PAIR_FAULTS
            breaker = Breaker(MIN_PAUSE_S, MAX_PAUSE_S, self._clock, threshold=threshold, same_event_s=SAME_EVENT_S)
            self._breakers[key] = breaker
        breaker.record_failure(trial)

    def release(self, key: Key, trial: Permit) -> None:
        """The trial of what `key` names has found out nothing."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.release(trial)

    def retain(self, workers: Container[str]) -> None:
        """Forget the breakers of workers that are gone: what comes back under their name starts anew."""
        for key in [key for key in self._breakers if not all(name in workers for name in key)]:
            del self._breakers[key]


SAME_LOSS_S = 2.0
"""The session and the watch of a worker that dies end within this time of each other."""

_KEPT = 256
"""Losses that are remembered."""


@dataclass(eq=False, slots=True)
class WorkerLoss:
    """One lost connection with one incarnation of a worker; times are seconds on the caller's clock."""

    worker: str
    incarnation: str
    at: float
    share: float = 0.0
    """The evidence against each of its suspects."""
    death: bool = True
    """Whether it is a death for all that is known."""
    settled: bool = False
    """Whether that was seen, and is not just presumed."""
    shared: bool = False
    """Whether requests of other routers were there that may have killed the worker."""
    _listeners: list[Callable[[], object]] = field(default_factory=list)

    def on_settled(self, listener: Callable[[], object]) -> None:
        """Call `listener` once it is settled; at once if it is already."""
        if self.settled:
            listener()
        else:
            self._listeners.append(listener)

    def settle(self, *, death: bool) -> None:
        """The end of the incarnation, or its survival, was seen."""
        self.death, self.settled = death, True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


@dataclass(frozen=True, slots=True)
class AvoidedWorker:
    """An incarnation of a worker that failed a request; `loss` is the lost connection, if it was one."""

    worker: str
    incarnation: str
    loss: WorkerLoss | None = None

    def applies(self, view: PrefillView | DecodeView) -> bool:
        """Whether the incarnation that is at the address now is to be avoided."""
        return self.incarnation == view.incarnation and (self.loss is None or self.loss.death)


class WorkerLosses:
    """All losses of a router's workers, as far back as they matter."""

    def __init__(self) -> None:
        self._losses: deque[WorkerLoss] = deque(maxlen=_KEPT)
        self._unsettled: list[WorkerLoss] = []

    def record_loss(self, worker: str, incarnation: str, suspects: int, now: float, *, shared: bool) -> WorkerLoss:
        """A connection with a worker is lost, at which so many requests are suspects.

        `shared` when requests of other routers may have killed it as well.

        What is lost of the same incarnation within SAME_LOSS_S is one loss.
        """
        recent = [each for each in self._losses if each.incarnation == incarnation and now - each.at <= SAME_LOSS_S]
        if recent:
            loss = recent[-1]
            # A status that was sent before the death may have been read after the first sign of it.
            loss.death, loss.settled = True, False
        else:
            loss = WorkerLoss(worker, incarnation, now)
            self._losses.append(loss)
        if loss not in self._unsettled:
            self._unsettled = [*self._unsettled, loss][-_KEPT:]
        loss.shared = loss.shared or shared
        if suspects and not loss.share:
            loss.share = 1 / suspects
        return loss

    def record_status(self, worker: str, incarnation: str) -> None:
        """The worker has sent a status with its incarnation."""
        if not self._unsettled:
            return
        same = [loss for loss in self._unsettled if loss.incarnation == incarnation]
        other = [loss for loss in self._unsettled if loss.worker == worker and loss.incarnation != incarnation]
        self._unsettled = [loss for loss in self._unsettled if loss not in (*same, *other)]
        for loss in same:
            loss.settle(death=False)
        for loss in other:
            loss.settle(death=True)

    def latest(self, incarnation: str) -> WorkerLoss | None:
        """The latest loss of an incarnation."""
        return next((loss for loss in reversed(self._losses) if loss.incarnation == incarnation), None)

    def count_others(self, own: Collection[WorkerLoss]) -> int:
        """Deaths since the first of a request's own at which it was no suspect."""
        begin = min((loss.at for loss in own), default=0.0)
        return sum(loss.death and loss.at >= begin and loss not in own for loss in self._losses)


MAX_IN_A_ROW = 16
DEATHS_UNTIL_ALONE = 2
FORGIVEN_TOKENS = 64
"""An attempt that brought so many tokens proves that the faults before it were not the request's."""
MAX_EXCUSED_DEATHS = 4
"""Deaths of workers that a request had for itself and that do not end it, while other workers die without it."""

_ROUNDING = 1e-9

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


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

    def charge(self, now: float, *, blamed: str = "", first: bool = False) -> bool:
        """Whether a fault may be followed by a retry, which is then charged.

        One event may fail all that a worker runs: of faults of one `blamed` within SAME_EVENT_S one is charged,
        provided that they are the requests' `first`, so that none gets more than one retry in this way.
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

    def has_killed_workers(self, others: int) -> bool:
        """Whether it has killed a worker that it had for itself, when so many others died without it meanwhile."""
        return sum(loss.death for loss in self.losses_alone) > min(others, MAX_EXCUSED_DEATHS)

    def fork(self) -> RetryHistory:
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
        if max(self.attempts, sum(loss.death for loss in self.losses)) >= MAX_IN_A_ROW:
            raise error
        if failed.cause is Cause.FAULT and self.faults > 1:
            return _pause(self.faults - 2, jitter)
        if failed.cause is Cause.REFUSED:
            hint = error.retry_after if isinstance(error, Overloaded) else None
            return max(_pause(self.refusals - 1, jitter), min(hint or 0.0, _MAX_PAUSE_S))
        return 0.0


def _point_at_it(losses: Iterable[WorkerLoss]) -> bool:
    shares = [loss.share for loss in losses if loss.death]
    return len(shares) >= DEATHS_UNTIL_ALONE and sum(shares) >= 1 - _ROUNDING


def _pause(doublings: int, jitter: Callable[[float, float], float]) -> float:
    return min(_MIN_PAUSE_S * 2.0**doublings, _MAX_PAUSE_S) * jitter(0.5, 1.0)
