"""Sessions: the commands that come from a router, and the messages that go to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import abc
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.request import Output, RemoteExport, ReserveResult
from baton.rpc.channel import HEARTBEAT_S
from decode_svc.attempts import Failure
from decode_svc.reservation import AttemptKey, Reserve

MAX_ANSWERS = 10_000
"""Number of answers and failures that a router may leave unread in its session."""


@dataclass(frozen=True, slots=True)
class Start:
    """Fetch the KV of an attempt from `source`; `deadline_s` as in Reserve.

    If `prefix_transfer_id` is not empty, the pinned blocks are exported under it.
    """

    key: AttemptKey
    source: RemoteExport
    deadline_s: float | None = None
    prefix_transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an attempt, or one choice of it."""

    key: AttemptKey
    choice_index: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The router is alive, and goes on with exactly these attempts of the session."""

    live: frozenset[AttemptKey]


Command = Reserve | Start | Cancel | Heartbeat


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has ended without a failure; nothing of it is held any more."""


@dataclass(slots=True)
class SessionDown:
    """One message to a router.

    A heartbeat has `live`, the list of all attempts of the session; other messages have None.
    """

    reserved: list[tuple[AttemptKey, ReserveResult]] = field(default_factory=list)
    outputs: list[tuple[AttemptKey, Output]] = field(default_factory=list)
    failures: list[tuple[AttemptKey, Failure]] = field(default_factory=list)
    ended: list[AttemptKey] = field(default_factory=list)
    live: list[AttemptKey] | None = None

    def __bool__(self) -> bool:
        return bool(self.reserved or self.outputs or self.failures or self.ended or self.live is not None)


class RouterSession:
    """The messages to one router: outputs, answers and failures, gathered into one message at a time.

    While a message is being sent, everything new is gathered for the next one. So a slow router needs no more memory
    than the tokens of its own sequences, and delays nobody else. Only answers to commands could grow without limit: the
    worker ends a session that leaves more than MAX_ANSWERS of them unread.

    Once a second a message lists all attempts that the worker holds for the session. The stream is ordered, and a
    message reports ended attempts before it lists the others. So if an attempt was granted, has not ended, and is not
    on the list, it is lost.
    """

    def __init__(self, number: int, router_id: str, live: abc.Callable[[], abc.Iterable[AttemptKey]] = tuple) -> None:
        self.number = number
        """Identifies the session, also among several sessions of one router."""
        self.router_id = router_id
        self.error: BatonError | None = None
        """Why the service ended the session, if the router did not."""
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
        """End `messages`: after all is sent, or at once and without the rest if there is an error."""
        self._ended = True
        if error is not None:
            self.error, self._down = error, SessionDown()
        self._has_message.set()

    async def messages(self) -> abc.AsyncIterator[SessionDown]:
        """Yield messages as soon as there is something to send, and the list of attempts once a second, until the
        end.
        """
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
