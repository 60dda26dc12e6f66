"""Output that a client has not been sent yet, cut into messages that any client can receive.

    add ──▶ [Update] [Update] [Update, still filling] ──▶ take: one at a time, oldest first, each at most MESSAGE_BYTES

A client that reads slowly lets much gather here. As one message it could be larger than the client accepts (gRPC's
default is 4 MiB), and the answer would be lost. So what gathers is cut as it comes: text, tokens and finish of a choice
keep their order, and usage and timings are in the last message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.request import FinishReason, PrefillProgress, Timings, TokenInfo, Usage

MESSAGE_BYTES = 32 << 10
"""Most bytes of a response on the wire.

Making one of this size takes some 2.5 ms at most. A thread would not spare the event loop that: it keeps the GIL for as
long.
"""

_FIXED_BYTES = 256
"""Most bytes of a response without prompt tokens and deltas: request id, usage and timings."""

_ROOM = MESSAGE_BYTES - _FIXED_BYTES

_DELTA_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES, _CHARACTER_BYTES = 32, 16, 13, 4
"""Most bytes on the wire of a delta, of a token beside its alternatives, of an alternative, and of a character."""

_TEXT = _ROOM // _CHARACTER_BYTES // 4
"""Most characters that are added at once."""


@dataclass(slots=True)
class ChoiceUpdate:
    """News of one choice; the last two fields name the cause of a finish with STOP."""

    index: int
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class Update:
    """News of a request, at most one message; usage and timings come with the last."""

    deltas: dict[int, ChoiceUpdate] = field(default_factory=dict)
    prompt_tokens: Sequence[TokenInfo] = ()
    progress: PrefillProgress | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    size: int = 0
    """Most bytes that deltas and prompt tokens may take on the wire."""


class OutputQueue:
    """Gathers what is new until it is taken; one producer, one consumer."""

    def __init__(self, report_tokens: int = 0) -> None:
        """The report, log-probabilities of `report_tokens` tokens of the prompt, is taken before all output."""
        self.reported, self.report_left = 0, report_tokens
        """Tokens of the report that were added, and that are still to come."""
        self._waiting: deque[Update] = deque()
        self._progress: PrefillProgress | None = None
        self._report: deque[TokenInfo] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._closed = False
        self._error: BaseException | None = None

    def add(
        self,
        choice: int,
        token: TokenInfo,
        text: str,
        finish: FinishReason | None = None,
        *,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """Add a token of a choice with the text that it completes, and how the choice ended if it did."""
        while len(text) > _TEXT:
            self._delta(choice, _CHARACTER_BYTES * _TEXT).text += text[:_TEXT]
            text = text[_TEXT:]
        size = _size(token) + _CHARACTER_BYTES * len(text)
        if stop_string is not None:
            size += _CHARACTER_BYTES * len(stop_string)
        delta = self._delta(choice, size)
        delta.text += text
        delta.tokens.append(token)
        if finish is not None:
            delta.finish, delta.stop_string, delta.stop_token_id = finish, stop_string, stop_token_id

    def report(self, prompt_tokens: Sequence[TokenInfo]) -> None:
        """Add log-probabilities of the next tokens of the prompt."""
        self._report.extend(prompt_tokens)
        self.reported += len(prompt_tokens)
        self.report_left -= len(prompt_tokens)
        self._wake()

    def report_progress(self, progress: PrefillProgress) -> None:
        """Add how far prefill is; it is taken before everything else, and replaces what waits of its kind."""
        self._progress = progress
        self._wake()

    def close(self, usage: Usage, timings: Timings) -> None:
        """Add the last of all."""
        last = self._last(0)
        last.usage, last.timings = usage, timings
        self._closed = True

    def fail(self, error: BaseException) -> None:
        """End with an error, once what came before it is taken."""
        self._error, self.report_left = error, 0
        self._wake()

    async def take(self) -> Update:
        """Wait for the next message and take it.

        When nothing is left, raises the error that ended the request, or StopAsyncIteration if it was closed.
        """
        while not (self._report or self._progress or (self._waiting and not self.report_left)):
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        if (progress := self._progress) is not None:
            self._progress = None
            return Update(progress=progress)
        return self._take_report() if self._report else self._waiting.popleft()

    def _take_report(self) -> Update:
        """The part of the report that a message holds."""
        tokens, size = [self._report.popleft()], 0
        size = _size(tokens[0])
        while self._report and size + _size(self._report[0]) <= _ROOM:
            size += _size(self._report[0])
            tokens.append(self._report.popleft())
        last = not self._report and not self.report_left
        fits = last and bool(self._waiting) and self._waiting[0].size + size <= _ROOM
        update = self._waiting.popleft() if fits else Update()
        update.prompt_tokens = tokens
        return update

    def _delta(self, choice: int, size: int) -> ChoiceUpdate:
        """The part of the last message that is about a choice, with room for `size` bytes more."""
        update = self._last(size + _DELTA_BYTES)
        found = update.deltas.get(choice)
        if found is None:
            found = update.deltas[choice] = ChoiceUpdate(choice)
            size += _DELTA_BYTES
        update.size += size
        return found

    def _last(self, size: int) -> Update:
        """The last message if it has room for `size` bytes more, or a new one."""
        if self._waiting and self._waiting[-1].size + size <= _ROOM:
            return self._waiting[-1]
        update = Update()
        self._waiting.append(update)
        self._wake()
        return update

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


def _size(token: TokenInfo) -> int:
    """Most bytes of a token on the wire."""
    return _TOKEN_BYTES + _ALTERNATIVE_BYTES * len(token.top)
