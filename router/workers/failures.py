"""Events and failures of attempts: their kinds, breakers, and the losses of workers. Pure.

There is a breaker (`baton.breaker`) for each worker and each (prefill, decode) pair, shared by all requests of a
router. A request avoids workers that failed it before. An open breaker makes all requests avoid a worker that has
failed several in a row. Both are only preferences: placement uses such workers if there are no others. Deaths,
drains and refusals do not count in breakers.

    the connection is lost: presumed a death ──┬─ the same incarnation is heard again ──▶ no death, counts for nothing
                                               ├─ another incarnation at the address ──▶ a death
                                               └─ nothing is heard again ──▶ it stays a presumed death

The *suspects* of a loss are the requests that had no token from the worker yet, because a replayed request that kills
workers does so before its next token. If all requests had a token, all are suspects. A request counts once, with all
its choices. Each suspect has an equal share of the loss, so one death among a hundred requests is weak evidence.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field

from baton.breaker import Breaker, Permit
from baton.errors import BatonError
from baton.request import Output, Prefilled, PrefillProgress, PromptLogprobs
from router.placement.policy import DecodeView, PrefillView


class Blame(enum.Enum):
    """The worker or pair that failed an attempt."""

    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"


class Cause(enum.Enum):
    """The kind of a failure; only FAULT counts in breakers."""

    FAULT = "fault"
    LOST = "lost"
    """The watch or session of the worker broke or fell silent, or the worker reported that it makes no progress. It
    turns out later whether the worker died."""
    DRAIN = "drain"
    PREEMPTED = "preempted"
    """The worker ran out of memory for the sequence, which is not an error."""
    REFUSED = "refused"
    """The worker was full, or a mixed worker had no pages for the prompt of another decode worker."""


class Suspicion(enum.IntEnum):
    """The workers that a suspected request must have for itself."""

    NONE = 0
    PREFILL = 1
    """A prefill worker: workers died often enough, but decode workers alone did not."""
    PAIR = 2
    """A prefill and a decode worker: decode workers alone died often enough."""


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """The failure that ends an attempt."""

    error: BatonError
    blame: Blame
    cause: Cause = Cause.FAULT
    loss: WorkerLoss | None = None
    """The loss of the worker, if the request is one of its suspects."""


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The attempt has ended at the decode worker without a fault, and holds nothing there."""


Event = PrefillProgress | PromptLogprobs | Prefilled | Output | DecodeEnded | FailureEvent
"""An event of an attempt, from one of its two workers."""

Deliver = Callable[[Event], None]


Key = tuple[str, ...]
"""Addresses of a worker, (worker,), or of a pair, (prefill, decode)."""

WORKER_FAULTS, PAIR_FAULTS = 3, 1
"""Faults in a row that open a breaker. One is enough for a pair: its network link is the same for all requests."""

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0

SAME_EVENT_S = 0.1
"""Seconds within which several faults count as one: a failing step fails all of its sequences."""


class AttemptBreakers:
    """The breakers of one attempt's workers and of their pair, from its placement to its end.

    The attempt is the trial of each breaker that is half open and has no other trial.
    """

    def __init__(self, breakers: Breakers, prefill: str, decode: str | None) -> None:
        self._breakers = breakers
        self.prefill: Key = (prefill,)
        self.decode: Key | None = None if decode is None else (decode,)
        # A worker that does both has no network link to itself.
        self.pair: Key | None = None if decode in (None, prefill) else (prefill, decode)
        keys = {key for key in (self.prefill, self.decode, self.pair) if key is not None}
        trials: dict[Key, Permit | None] = {key: breakers.start_trial(key) for key in keys}
        self._trials: dict[Key, Permit] = {key: permit for key, permit in trials.items() if permit is not None}

    def record_success(self, key: Key | None) -> None:
        """Record that the worker or pair of `key` did its work, which ends its faults in a row; None is ignored."""
        if key is not None:
            self._trials.pop(key, None)
            self._breakers.record_success(key)

    def pass_trial(self, key: Key | None) -> None:
        """Record success now if the attempt is the trial of this breaker; other attempts are recorded at their end."""
        if key in self._trials:
            self.record_success(key)

    def record_fault(self, key: Key | None) -> None:
        """Record a fault of the worker or pair of `key`; None is ignored."""
        if key is not None:
            self._breakers.record_fault(key, self._trials.pop(key, None))

    def end(self) -> None:
        """End the attempt. A trial without a result is given back, so that another attempt can be the trial."""
        for key, permit in self._trials.items():
            self._breakers.release(key, permit)
        self._trials.clear()


class Breakers:
    """All breakers of a router; `clock` returns seconds. A breaker is kept only while it has faults."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakers: dict[Key, Breaker] = {}

    def open_breakers(self) -> list[Key]:
        """The workers and pairs that placement should use last now."""
        return [key for key, breaker in self._breakers.items() if not breaker.due]

    def count_open(self) -> tuple[int, int]:
        """Number of workers, and number of pairs, whose breaker is not closed."""
        keys = [key for key, breaker in self._breakers.items() if not breaker.closed]
        workers = sum(len(key) == 1 for key in keys)
        return workers, len(keys) - workers

    def begin_attempt(self, prefill: str, decode: str | None) -> AttemptBreakers:
        """The breakers of an attempt that was placed at these addresses."""
        return AttemptBreakers(self, prefill, decode)

    def start_trial(self, key: Key) -> Permit | None:
        """Make the caller the trial of the breaker of `key`; None if the breaker is closed or has a trial."""
        breaker = self._breakers.get(key)
        return None if breaker is None or breaker.closed else breaker.request()

    def record_success(self, key: Key) -> None:
        """End the faults in a row of the worker or pair of `key`."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return
        if breaker.closed:
            del self._breakers[key]
        breaker.record_success()

    def record_fault(self, key: Key, trial: Permit | None = None) -> None:
        """Count a fault of the worker or pair of `key`; `trial` is the permit of the caller, if it has one."""
        if (breaker := self._breakers.get(key)) is None:
            threshold = WORKER_FAULTS if len(key) == 1 else PAIR_FAULTS
            breaker = Breaker(MIN_PAUSE_S, MAX_PAUSE_S, self._clock, threshold=threshold, same_event_s=SAME_EVENT_S)
            self._breakers[key] = breaker
        breaker.record_failure(trial)

    def release(self, key: Key, trial: Permit) -> None:
        """End the trial of `key` without a result."""
        if (breaker := self._breakers.get(key)) is not None:
            breaker.release(trial)

    def retain(self, workers: Container[str]) -> None:
        """Forget the breakers of workers that are gone. A worker that comes back starts without faults."""
        for key in [key for key in self._breakers if not all(name in workers for name in key)]:
            del self._breakers[key]


SAME_LOSS_S = 2.0
"""When a worker dies, its session and its watch end at most this many seconds apart; both ends are one loss."""

_KEPT = 256
"""Number of losses that are kept."""


@dataclass(eq=False, slots=True)
class WorkerLoss:
    """One lost connection with one incarnation of a worker; `at` is in seconds on the caller's clock."""

    label: str
    """The role and address of the worker."""
    incarnation: str
    at: float
    suspect_share: float = 0.0
    """The share of each suspect in the loss, from 0 to 1."""
    death: bool = True
    """Whether the worker died, as far as is known."""
    settled: bool = False
    """Whether `death` was seen, and is not only presumed."""
    has_foreign_suspects: bool = False
    """Whether requests of other routers may have killed the worker."""
    _listeners: list[Callable[[], object]] = field(default_factory=list)

    def on_settled(self, listener: Callable[[], object]) -> None:
        """Call `listener` when the loss is settled, or at once if it is."""
        if self.settled:
            listener()
        else:
            self._listeners.append(listener)

    def settle(self, *, death: bool) -> None:
        """Record that the death of the incarnation was seen, or its survival."""
        self.death, self.settled = death, True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


@dataclass(frozen=True, slots=True)
class AvoidedWorker:
    """An incarnation of the worker at an address that failed a request; `loss` is set if its connection was lost."""

    address: str
    incarnation: str
    loss: WorkerLoss | None = None

    def applies(self, view: PrefillView | DecodeView) -> bool:
        """Whether a request must avoid the incarnation that is at the address now."""
        return self.incarnation == view.incarnation and (self.loss is None or self.loss.death)


class WorkerLosses:
    """The latest losses of a router's workers; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._losses: deque[WorkerLoss] = deque(maxlen=_KEPT)
        self._unsettled: list[WorkerLoss] = []

    def record_loss(
        self, label: str, incarnation: str, suspects: int, now: float, *, has_foreign_suspects: bool
    ) -> WorkerLoss:
        """Record a lost connection with a worker; losses of one incarnation within SAME_LOSS_S seconds are one.

        `suspects` is the number of this router's requests that are suspects; `has_foreign_suspects` tells whether
        requests of other routers may have killed the worker.
        """
        recent = [each for each in self._losses if each.incarnation == incarnation and now - each.at <= SAME_LOSS_S]
        if recent:
            loss = recent[-1]
            # A status from before the death may have been read after the first loss, and have settled it.
            loss.death, loss.settled = True, False
        else:
            loss = WorkerLoss(label, incarnation, now)
            self._losses.append(loss)
        if loss not in self._unsettled:
            self._unsettled = [*self._unsettled, loss][-_KEPT:]
        loss.has_foreign_suspects = loss.has_foreign_suspects or has_foreign_suspects
        if suspects and not loss.suspect_share:
            loss.suspect_share = 1 / suspects
        return loss

    def record_status(self, label: str, incarnation: str) -> None:
        """Record a status of a worker, which settles its losses."""
        if not self._unsettled:
            return
        same = [loss for loss in self._unsettled if loss.incarnation == incarnation]
        other = [loss for loss in self._unsettled if loss.label == label and loss.incarnation != incarnation]
        self._unsettled = [loss for loss in self._unsettled if loss not in (*same, *other)]
        for loss in same:
            loss.settle(death=False)
        for loss in other:
            loss.settle(death=True)

    def latest(self, incarnation: str) -> WorkerLoss | None:
        """The latest loss of an incarnation; None if there is none."""
        return next((loss for loss in reversed(self._losses) if loss.incarnation == incarnation), None)

    def count_others(self, own: Collection[WorkerLoss]) -> int:
        """Number of worker deaths, since the first loss in `own`, of which the request was not a suspect."""
        begin = min((loss.at for loss in own), default=0.0)
        return sum(loss.death and loss.at >= begin and loss not in own for loss in self._losses)
