"""After Ctrl-C or SIGTERM, a measurement reports the results that are complete."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def at_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` at the first SIGINT or SIGTERM in the block; a second one ends the process at once.

    Only the main thread may set signal handlers; in other threads this changes nothing.
    """

    def first(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        act()

    try:
        # A job in the background of a script ignores Ctrl-C, which is the script's.
        taken = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, first) for each in taken}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for each, handler in before.items():
            # None stands for a handler that is not Python's, which can't be put back.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def last_report(reports: Generator[dict[str, Any], None, None]) -> dict[str, Any] | None:
    """The last of the reports of a measurement; each contains all results that are complete so far.

    `interrupted` in it says whether a signal ended the measurement early. None if nothing was complete.
    """
    report: dict[str, Any] | None = None
    came = False

    def stop() -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    try:
        with at_interrupt(stop), closing(reports):
            for each in reports:
                report = each
                if came:  # An exception that a signal raises in a finalizer goes nowhere.
                    break
    except BaseException:
        # Errors after the signal come from it: a step that was cut, a process that was ended.
        if not came:
            raise
    return None if report is None else {**report, "interrupted": came}
