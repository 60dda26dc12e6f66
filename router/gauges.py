"""The gauges of a router, which are computed at each scrape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.telemetry import metrics
from baton.worker.status import WorkerRole
from router.dispatcher import Reservations
from router.placement.policy import FleetView
from router.placement.queue import PlacementQueue, PlacementRequest
from router.request_runner import RequestRunner
from router.workers.pool import WorkerPool


@dataclass(frozen=True, slots=True)
class RouterGauges:
    """Sets the gauges of a router."""

    pool: WorkerPool
    queue: PlacementQueue[Reservations]
    request_runner: RequestRunner

    def set_gauges(self) -> None:
        """Set all gauges to their values now."""
        fleet, loads = self.pool.fleet, self.pool.loads(WorkerRole.DECODE)
        metrics.WAITING.set(len(self.queue))
        metrics.RUNNING.set(self.request_runner.placed_attempts)
        metrics.FLEET.labels("prefill").set(sum(not view.draining for view in fleet.prefill.values()))
        metrics.FLEET.labels("decode").set(sum(not view.draining for view in fleet.decode.values()))
        prefill_s, decode_s = queued_seconds(
            [waiter.request for waiter in self.queue],
            fleet,
            waits_for_decode=self.queue.waits_for_decode,
            batch=sum(load.slots_used for load in loads) / max(len(loads), 1),
            decode_s=self.request_runner.decode_s.value,
        )
        metrics.QUEUED_SECONDS.labels("prefill").set(prefill_s)
        metrics.QUEUED_SECONDS.labels("decode").set(decode_s)


def queued_seconds(
    waiting: Iterable[PlacementRequest], fleet: FleetView, *, waits_for_decode: bool, batch: float, decode_s: float
) -> tuple[float, float]:
    """Work of the requests in the queue, in seconds of one prefill worker and of one decode worker.

    The queue waits for one role, whose workers are busy or gone; for the other role the work is 0. A prefill worker
    computes the prompts one after the other; cached prefixes are not known here. A decode worker generates `batch`
    requests at a time, each for `decode_s` seconds.
    """
    requests = list(waiting)
    if waits_for_decode or (fleet.prefill and not fleet.decode):
        return 0.0, len(requests) * decode_s / max(batch, 1.0)
    return sum(request.context_tokens for request in requests) / fleet.mean_rate, 0.0
