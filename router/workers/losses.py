"""Lost connections to workers, and how much each one says against the requests that were there. Pure.

    the connection is lost: presumed a death ──┬─ the same incarnation is heard again ──▶ no death, counts for nothing
                                               ├─ another incarnation at the address ──▶ a death
                                               └─ nothing is heard again ──▶ it stays a presumed death

The *suspects* of a loss are the requests that had not yet had a token from the worker: once replayed, a request that
kills does so before its next token. If all have had one, all are suspects. The choices of a request count as one. Each
suspect carries an equal share of the loss, so that one death among a hundred says almost nothing about each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

SAME_EVENT_S = 2.0
"""The session and the watch of a worker that dies end within this time of each other."""

_KEPT = 256
"""WorkerLosses that are remembered."""


@dataclass(eq=False, slots=True)
class WorkerLoss:
    """One lost connection with one incarnation of a worker; times are seconds on the caller's clock."""

    worker: str
    incarnation: str
    at: float
    share: float = 0.0
    """What it says against each of its suspects."""
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
        """What became of the incarnation was seen."""
        self.death, self.settled = death, True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


class WorkerLosses:
    """All losses of a router's workers, as far back as they matter."""

    def __init__(self) -> None:
        self._losses: deque[WorkerLoss] = deque(maxlen=_KEPT)
        self._unsettled: list[WorkerLoss] = []

    def record_loss(self, worker: str, incarnation: str, suspects: int, now: float, *, shared: bool) -> WorkerLoss:
        """A connection with a worker is lost, at which so many requests are suspects.

        `shared` when requests of other routers may have killed it as well.

        What is lost of the same incarnation within SAME_EVENT_S is one loss.
        """
        recent = [each for each in self._losses if each.incarnation == incarnation and now - each.at <= SAME_EVENT_S]
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
