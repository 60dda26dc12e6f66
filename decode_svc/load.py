"""How the worker fares: what its status tells routers, and its metrics."""

from __future__ import annotations

from baton.engine.contract import Engine
from baton.lifecycle import State
from baton.telemetry import metrics
from baton.worker.status import WorkerLoad
from decode_svc.loop import Report
from decode_svc.messages import FailureKind

_RATE_WEIGHT = 0.1


class Load:
    """Measured from the reports of the engine thread; lives on the asyncio loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = Report()
        self._tokens_per_second = 0.0

    def reported(self, report: Report) -> None:
        """Count what a turn of the engine thread brought."""
        self._last = report
        metrics.SEQUENCES_PAUSED.inc(sum(state is State.PAUSED for _, state in report.states))
        metrics.SEQUENCES_RESUMED.inc(report.resumed)
        metrics.SEQUENCES_PREEMPTED.inc(sum(lost.kind is FailureKind.PREEMPTED for lost in report.failures))
        if report.seconds:
            tokens = sum(len(output.tokens) for output in report.outputs)
            metrics.DECODE_TOKENS.inc(tokens)
            metrics.STEP_SECONDS.observe(report.seconds)
            metrics.BATCH_SIZE.observe(report.batch)
            rate = tokens / report.seconds
            before = self._tokens_per_second or rate
            self._tokens_per_second = before + _RATE_WEIGHT * (rate - before)

    def show_pages(self) -> None:
        """Set the gauges of pages."""
        stats = self._engine.stats()
        for state in ("used", "free", "cached"):
            metrics.PAGES.labels("decode", state).set(getattr(stats, state))

    def status(self, paused: int, pending: int, newcomers: int) -> WorkerLoad:
        """The load now: sequences that are paused, choices still to be forked, attempts without a token."""
        stats, spec = self._engine.stats(), self._engine.spec
        return WorkerLoad(
            waiting=self._last.waiting + pending,
            running=self._last.running,
            pages_used=stats.used,
            pages_cached=stats.cached,
            pages_total=stats.total,
            page_size=spec.page_size,
            slots_used=self._last.running,
            slots_total=spec.slots,
            tokens_per_second=self._tokens_per_second,
            sequences_paused=paused,
            newcomers=newcomers,
        )
