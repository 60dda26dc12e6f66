r"""Logs: one event, one line, on standard error.

    2026-01-31T12:00:00.123Z INFO prefill/prefill-0 baton.transfer.export: lease over for t-17

Line breaks within an event, such as those of a traceback, are written as `\n`, so that lines of many processes can be
mixed.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


class LineFormatter(logging.Formatter):
    """Formats a record as one line that begins with time, level and `name` of the process."""

    def __init__(self, name: str) -> None:
        label = name.replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)s {label} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Time of the event in UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line."""
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def configure(level: str, role: str, worker_id: str = "", stream: TextIO | None = None) -> None:
    """Write the process's logs of `level` and above to `stream` (default: stderr), marked with role and id."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(f"{role}/{worker_id}" if worker_id else role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At level debug it logs the event loop at each call.
    logging.getLogger("grpc").setLevel(max(root.level, logging.INFO))
