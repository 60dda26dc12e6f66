"""One router's side of the service: what is to be told it, gathered into one message at a time.

Whatever comes up while a message is on its way is told together in the next one, so a slow router costs no
more memory than the tokens its own sequences may have, and holds back nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from decode_svc.messages import Down, Failure, Output, Reserved


class Session:
    """The messages down to one router; lives on the asyncio loop."""

    def __init__(self, number: int, router_id: str) -> None:
        self.number = number
        """Distinguishes sessions, also those of one router."""
        self.router_id = router_id
        self._down = Down()
        self._news = asyncio.Event()
        self._ended = False

    def tell(self, message: Reserved | Output | Failure) -> None:
        """Put something into the next message."""
        match message:
            case Reserved():
                self._down.reserved.append(message)
            case Output():
                self._down.outputs.append(message)
            case Failure():
                self._down.failures.append(message)
        self._news.set()

    def end(self) -> None:
        """Let `messages` end once all is told."""
        self._ended = True
        self._news.set()

    async def messages(self) -> AsyncIterator[Down]:
        """Yield what there is to tell, as soon as there is something, until the end."""
        while True:
            await self._news.wait()
            self._news.clear()
            down, self._down = self._down, Down()
            if down:
                yield down
            elif self._ended:
                return
            if self._ended:
                self._news.set()
