"""The load that a decode worker reports."""

import pytest

from baton.engine.fake import FakeEngine
from baton.request import TokenInfo
from baton.telemetry import metrics
from decode_svc.load_meter import LoadMeter
from decode_svc.loop import StepReport
from decode_svc.scheduler import StepOutput


def test_the_load_has_the_rates_of_steps_and_fetches() -> None:
    meter = LoadMeter(FakeEngine())
    empty = meter.report(0, 0.0)
    assert (empty.tokens_per_second, empty.step_seconds, empty.transfer_bytes_per_second) == (0.0, 0.0, 0.0)
    outputs = [StepOutput(number, 1, (TokenInfo(5),), None, None) for number in range(2)]
    meter.record(StepReport(outputs=outputs, batch=2, seconds=0.1, running=2))
    # A change of the batch is no step.
    meter.record(StepReport(running=3))
    meter.record(StepReport(outputs=outputs, batch=3, seconds=0.3, running=3))
    load = meter.report(4, 1e9)
    assert load.step_seconds == pytest.approx(0.12)
    assert (load.slots_used, load.requests_without_token, load.transfer_bytes_per_second) == (3, 4, 1e9)


def test_reservations_that_wait_count_as_waiting() -> None:
    meter = LoadMeter(FakeEngine())
    meter.set_gauges(5, 3)
    assert metrics.WAITING._value.get() == 8
