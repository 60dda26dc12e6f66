"""Sessions: the stream of messages to one router."""

from __future__ import annotations

import asyncio
import contextlib
from collections import abc

from baton.errors import BatonError
from baton.request import Output, ReserveResult
from baton.rpc.channel import HEARTBEAT_S
from decode_svc.messages import AttemptKey, Ended, Failure, SessionDown

MAX_ANSWERS = 10_000
"""Number of answers and failures that a router may leave unread in its session."""

MAX_WAITING = 10_000
"""Number of reservations of a router that may wait."""


class RouterSession:
    """The messages to one router.

    While a message is being sent, all new outputs, answers and failures are gathered in the next one. So a slow router
    needs only the memory of the tokens of its own sequences, and delays no other router. Answers to commands could grow
    without limit: the worker ends a session with more than MAX_ANSWERS unread answers.

    Once a second a message lists all attempts that the worker holds for the session, also those whose reservation
    waits. The stream is ordered, and a message reports ended attempts before the list. So an attempt that was granted,
    has not ended, and is not on the list is lost.
    """

    def __init__(self, number: int, router_id: str, live: abc.Callable[[], abc.Iterable[AttemptKey]] = tuple) -> None:
        """`live` returns the attempts that the worker holds for the session."""
        self.number = number
        """Number of the session; all sessions of the worker have different ones."""
        self.router_id = router_id
        self.error: BatonError | None = None
        """The error for which the worker has ended the session, or None."""
        self._live_keys = live
        self._down = SessionDown()
        self._has_message = asyncio.Event()
        self._ended = False

    @property
    def unread(self) -> int:
        """Number of answers and failures that the router has not read yet."""
        return len(self._down.reserved) + len(self._down.failures)

    def send(self, key: AttemptKey, message: ReserveResult | Output | Failure | Ended) -> None:
        """Add an answer, an output, a failure or the end of an attempt to the next message."""
        match message:
            case ReserveResult():
                self._down.reserved.append((key, message))
            case Output():
                self._down.outputs.append((key, message))
            case Failure():
                self._down.failures.append((key, message))
            case Ended():
                self._down.ended.append(key)
        self._has_message.set()

    def end(self, error: BatonError | None = None) -> None:
        """End `messages`: after the last message, or at once and without unsent messages if there is an error."""
        self._ended = True
        if error is not None:
            self.error, self._down = error, SessionDown()
        self._has_message.set()

    async def messages(self) -> abc.AsyncIterator[SessionDown]:
        """Yield messages until the session ends: one when there is something new, and a heartbeat every second."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + HEARTBEAT_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    await self._has_message.wait()
            self._has_message.clear()
            if loop.time() >= beat_at and not self._ended:
                self._down.live = list(self._live_keys())
                beat_at = loop.time() + HEARTBEAT_S
            down, self._down = self._down, SessionDown()
            if down:
                yield down
            elif self._ended:
                return
            if self._ended:
                self._has_message.set()
