"""One router's side of the service: what is to be told it, gathered into one message at a time.

Whatever comes up while a message is on its way is told together in the next one, so a slow router costs no
more memory than the tokens its own sequences may have, and holds back nobody else. Answers to commands are the one
thing that a router could ask for without end: the service ends a session that leaves MAX_ANSWERS of them unread.

Once a second a message carries the names of all attempts that the service holds for the session. The stream is
ordered, and a message tells of ends before it lists what is left: an attempt that was granted, and that neither ended
nor is on the list, is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from baton.errors import BatonError
from baton.worker.messages import Output, Reserved
from decode_svc.messages import AttemptKey, Down, Failure

HEARTBEAT_S = 1.0
MAX_ANSWERS = 10_000


class Session:
    """The messages down to one router; lives on the asyncio loop."""

    def __init__(self, number: int, router_id: str, live: Callable[[], Iterable[AttemptKey]] = tuple) -> None:
        self.number = number
        """Distinguishes sessions, also those of one router."""
        self.router_id = router_id
        self.error: BatonError | None = None
        """Why the service ended it, if not on the router's word."""
        self._live = live
        self._down = Down()
        self._news = asyncio.Event()
        self._ended = False

    @property
    def unread(self) -> int:
        """Answers and failures that the router has not taken yet."""
        return len(self._down.reserved) + len(self._down.failures)

    def tell(self, key: AttemptKey, message: Reserved | Output | Failure) -> None:
        """Put something of an attempt into the next message."""
        match message:
            case Reserved():
                self._down.reserved.append((key, message))
            case Output():
                self._down.outputs.append((key, message))
            case Failure():
                self._down.failures.append((key, message))
        self._news.set()

    def end(self, error: BatonError | None = None) -> None:
        """Let `messages` end: once all is told, or, for an error, at once and with nothing kept."""
        self._ended = True
        if error is not None:
            self.error, self._down = error, Down()
        self._news.set()

    async def messages(self) -> AsyncIterator[Down]:
        """Yield what there is to tell as soon as there is something, and once a second who lives, until the end."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + HEARTBEAT_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    await self._news.wait()
            self._news.clear()
            if loop.time() >= beat_at and not self._ended:
                self._down.live = list(self._live())
                beat_at = loop.time() + HEARTBEAT_S
            down, self._down = self._down, Down()
            if down:
                yield down
            elif self._ended:
                return
            if self._ended:
                self._news.set()
