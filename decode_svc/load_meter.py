"""The load of a decode worker, for its status and metrics."""

from __future__ import annotations

from baton.engine.contract import Engine
from baton.rates import DecayingAverage
from baton.telemetry import metrics
from baton.worker.status import WorkerLoad
from decode_svc.loop import StepReport
from decode_svc.messages import FailureKind

_RATE_WEIGHT = 0.1


class LoadMeter:
    """Measures the load from the reports of the engine thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._tokens_per_second = DecayingAverage(_RATE_WEIGHT)
        self._sequence_s = DecayingAverage(_RATE_WEIGHT)
        self._step_s = DecayingAverage(_RATE_WEIGHT)

    def record_sequence(self, seconds: float) -> None:
        """Record that a sequence has ended, `seconds` after it got its slot."""
        self._sequence_s.add(seconds)

    def record(self, report: StepReport) -> None:
        """Count the results of a report."""
        self._running = report.running
        metrics.SEQUENCES_PREEMPTED.inc(sum(lost.kind is FailureKind.PREEMPTED for lost in report.failures))
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            self._tokens_per_second.add(tokens / report.seconds)
            self._step_s.add(report.seconds)

    def report(self, requests_without_token: int, transfer_bytes_per_second: float) -> WorkerLoad:
        """The load now, given the number of attempts without a token and the rate of fetches."""
        stats, spec = self._engine.stats(), self._engine.spec
        return WorkerLoad(
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=spec.page_size,
            slots_used=self._running,
            slots_total=spec.slots,
            tokens_per_second=self._tokens_per_second.value,
            requests_without_token=requests_without_token,
            step_seconds=self._step_s.value,
            transfer_bytes_per_second=transfer_bytes_per_second,
        )

    def set_gauges(self, ready_choices: int, reservations: int) -> None:
        """Set the gauges, given the number of choices whose KV is complete, and of reservations that wait."""
        stats, slots = self._engine.stats(), self._engine.spec.slots
        metrics.set_kv_usage(used=stats.used, free=stats.free, cached=stats.cached)
        waiting = max(ready_choices - self._running, 0)
        metrics.RUNNING.set(self._running)
        metrics.WAITING.set(waiting + reservations)
        metrics.SLOTS.labels("used").set(self._running)
        metrics.SLOTS.labels("free").set(slots - self._running)
        metrics.QUEUED_SECONDS.labels("decode").set(waiting * self._sequence_s.value / slots)
