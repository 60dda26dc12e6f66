"""Ctrl-C in a measurement: what is complete is kept, what the signal breaks is not told as a failure."""

import signal
from collections.abc import Generator
from typing import Any

import pytest

from baton.bench.interrupts import at_interrupt, last_report

Reports = Generator[dict[str, Any], None, None]


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Generator[None]:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_measurement_with_what_is_complete(number: signal.Signals) -> None:
    ended = []

    def reports() -> Reports:
        try:
            yield {"rows": 1}
            signal.raise_signal(number)
            yield {"rows": 2}
        finally:
            ended.append(True)

    assert last_report(reports()) == {"rows": 1, "interrupted": True}
    assert ended


def test_a_failure_because_of_the_signal_is_no_failure() -> None:
    def reports() -> Reports:
        yield {"rows": 1}
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("a process has ended")

    assert last_report(reports()) == {"rows": 1, "interrupted": True}


def test_other_failures_are_raised() -> None:
    def reports() -> Reports:
        yield {"rows": 1}
        raise RuntimeError("a process has ended")

    with pytest.raises(RuntimeError):
        last_report(reports())


def test_the_second_signal_is_the_systems() -> None:
    came: list[Any] = []
    with at_interrupt(lambda: came.append(signal.getsignal(signal.SIGTERM))):
        signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIG_DFL]
