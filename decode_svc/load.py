"""The load of a decode worker, for its status and its metrics."""

from __future__ import annotations

from baton.engine.contract import Engine
from baton.rates import DecayingAverage
from baton.telemetry import metrics
from baton.worker.status import WorkerLoad
from decode_svc.loop import StepReport
from decode_svc.messages import FailureKind

_RATE_WEIGHT = 0.1


class LoadMeter:
    """Measures load from the reports of the engine thread; used on the asyncio loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._tokens_per_second = DecayingAverage(_RATE_WEIGHT)

    def record(self, report: StepReport) -> None:
        """Count the results of one turn of the engine thread."""
        self._running = report.running
        metrics.SEQUENCES_PREEMPTED.inc(sum(lost.kind is FailureKind.PREEMPTED for lost in report.failures))
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            self._tokens_per_second.add(tokens / report.seconds)

    def set_page_metrics(self) -> None:
        """Set the page gauges."""
        stats = self._engine.stats()
        for state in ("used", "free", "cached"):
            metrics.PAGES.labels("decode", state).set(getattr(stats, state))

    def status(self, requests_without_token: int) -> WorkerLoad:
        """The load now, given the number of attempts without a token."""
        stats, spec = self._engine.stats(), self._engine.spec
        return WorkerLoad(
            pages_used=stats.used,
            pages_total=stats.total,
            page_size=spec.page_size,
            slots_used=self._running,
            slots_total=spec.slots,
            tokens_per_second=self._tokens_per_second.value,
            requests_without_token=requests_without_token,
        )
