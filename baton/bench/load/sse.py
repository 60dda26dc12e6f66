"""Server-sent events, as far as completions use them (WHATWG HTML, 9.2.6: data fields, comments, blank lines)."""

from __future__ import annotations

MAX_EVENT_BYTES = 4 << 20


class EventTooLong(ValueError):
    """A server that never ends its line."""


class Events:
    """Takes a stream in pieces, gives the data of the events that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes, in their order; raises EventTooLong."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
