r"""Logs: one event, one line, on standard error.

    2026-01-31T12:00:00.123Z INFO prefill/prefill-0 baton.transfer.export: lease over for t-17
    {"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "role": "prefill", "worker_id": "prefill-0", ...}

Line breaks within an event, such as those of a traceback, are written as `\n`, so that lines of many processes can be
mixed. A line about requests names them: call sites give their ids with `extra=about(...)`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_REQUESTS = "request_ids"


def about(*names: str) -> dict[str, Any]:
    """The `extra` of a line about requests; each name is a request id, or "request/attempt" with anything after it."""
    return {_REQUESTS: tuple(dict.fromkeys(name.partition("/")[0] for name in names))}


class LineFormatter(logging.Formatter):
    """Formats a record as one line that begins with time, level and `name` of the process."""

    def __init__(self, name: str) -> None:
        label = name.replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)s {label} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Time of the event in UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the ids of requests that the message does not name."""
        missing = [name for name in getattr(record, _REQUESTS, ()) if name not in record.message]
        return super().formatMessage(record) + (f" (request {', '.join(missing)})" if missing else "")

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line."""
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(LineFormatter):
    """Formats a record as one JSON object.

    It has time, level, role, worker_id (of a worker or one of several routers), logger and message. A line about one
    request has request_id, about several request_ids; an error has exception, which is the traceback.
    """

    def __init__(self, role: str, worker_id: str = "") -> None:
        super().__init__(role)
        self._process = {"role": role} | ({"worker_id": worker_id} if worker_id else {})

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line."""
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname, **self._process}
        line |= {"logger": record.name, "message": record.getMessage()}
        match getattr(record, _REQUESTS, ()):
            case (request_id,):
                line["request_id"] = request_id
            case (_, *_) as request_ids:
                line["request_ids"] = request_ids
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


_settings = "info", "", "text"


def settings() -> tuple[str, str, str]:
    """Level, worker id and format of the last `configure`, for the log of another process of this worker."""
    return _settings


def configure(
    level: str, role: str, worker_id: str = "", stream: TextIO | None = None, *, log_format: str = "text"
) -> None:
    """Write the process's logs of `level` and above to `stream` (default: stderr), marked with role and id.

    `log_format` is one of FORMATS.
    """
    global _settings
    _settings = level, worker_id, log_format
    handler = logging.StreamHandler(stream or sys.stderr)
    name = f"{role}/{worker_id}" if worker_id else role
    handler.setFormatter(JsonFormatter(role, worker_id) if log_format == "json" else LineFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At level debug it logs the event loop at each call.
    logging.getLogger("grpc").setLevel(max(root.level, logging.INFO))


def writes_json() -> bool:
    """Whether the log of this process is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
