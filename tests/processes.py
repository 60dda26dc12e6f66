"""Processes that are children of nobody here."""

import os
import select
import time
from collections.abc import Iterable


def gone(pids: Iterable[int], within_s: float = 60.0) -> bool:
    """Whether these processes have ended, or end in time."""
    until = time.monotonic() + within_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
        finally:
            os.close(fd)
    return True
