"""Evidence of failures: breakers judge workers and pairs, losses judge the requests that were there. Pure.

There is a breaker (`baton.breaker`) for each worker and each (prefill, decode) pair, shared by all requests of a
router. A request avoids what failed *it*; breakers make all requests avoid what fails them one after another. They
advise only: placement uses what is left out here when nothing else is there. A worker's death is no fault of this kind,
since a dead worker is not placed on anyway; nor is a drain or a refusal.

    the connection is lost: presumed a death ──┬─ the same incarnation is heard again ──▶ no death, counts for nothing
                                               ├─ another incarnation at the address ──▶ a death
                                               └─ nothing is heard again ──▶ it stays a presumed death

The *suspects* of a loss are the requests that had not yet had a token from the worker: once replayed, a request that
kills does so before its next token. If all have had one, all are suspects. The choices of a request count as one. Each
suspect carries an equal share of the loss, so that one death among a hundred says almost nothing about each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from baton.breaker import Breaker, Permit
from router.placement.policy import DecodeView, Excluded, PrefillView

Key = tuple[str, ...]
"""(worker,) or (prefill, decode)."""

WORKER_FAULTS, PAIR_FAULTS = 3, 1
"""Faults in a row that open a breaker. A pair fails by its link, which no other request will find better."""

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0

SAME_EVENT_S = 0.1
"""Faults closer than this are one event: a failing step fails each sequence in it."""


class AttemptHealth:
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

    def begin(self, prefill: str, decode: str | None) -> AttemptHealth:
        """An attempt is placed; it is the trial of each half-open breaker on its way."""
        return AttemptHealth(self, prefill, decode)

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
        """The worker has sent a status, and said who it is."""
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
