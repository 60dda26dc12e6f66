"""From tokens, in whatever order they come, to what the client is told.

Each choice emits its tokens in the order of their output index and drops those it has had, so that token 2 may
arrive before token 1, and a new attempt may repeat what an old one said. Text comes from an incremental detokenizer
through a stop matcher. What is new gathers in the outbox until the client's stream takes it, so a slow client costs
its own max_tokens of memory and holds back nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.request import CachedTokens, FinishReason, FirstToken, Timings, TokenInfo, Usage
from baton.telemetry.metrics import ITL, TTFT
from router.account import Account
from router.events import Output, Prefilled
from router.request import Request
from router.stops import StopMatcher


@dataclass(slots=True)
class Delta:
    """What is new about one choice; the last two say what a finish with STOP is owed to."""

    index: int
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class News:
    """What is new about a request; usage and timings come with the last."""

    deltas: dict[int, Delta] = field(default_factory=dict)
    prompt_tokens: Sequence[TokenInfo] = ()
    usage: Usage | None = None
    timings: Timings | None = None


class Outbox:
    """Gathers news until it is taken; one producer, one consumer."""

    def __init__(self) -> None:
        self._news = News()
        self._ready = False
        self._taker: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def delta(self, choice: int) -> Delta:
        """What the client has not been told of a choice, to be added to."""
        if not self._ready:
            self._tell()
        found = self._news.deltas.get(choice)
        if found is None:
            found = self._news.deltas[choice] = Delta(choice)
        return found

    def prompt_tokens(self, tokens: Sequence[TokenInfo]) -> None:
        """Add prompt log-probabilities."""
        self._news.prompt_tokens = tokens
        self._tell()

    def close(self, usage: Usage, timings: Timings) -> None:
        """Add the last of all."""
        self._news.usage, self._news.timings = usage, timings
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End with an error, once what came before it is taken."""
        self._error = error
        self._tell()

    async def take(self) -> News:
        """Wait for news and take all of it; raises the error that ended the request."""
        if not self._ready:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        news, self._news = self._news, News()
        # An error is told again and again.
        self._ready = self._error is not None
        if self._error is not None and not (news.deltas or news.prompt_tokens):
            raise self._error
        return news

    def _tell(self) -> None:
        self._ready = True
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


class _Choice:
    """One choice from its first token to its finish."""

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self._params = request.params
        self._early: dict[int, tuple[TokenInfo, FinishReason | None]] = {}
        self._detokenizer = request.detokenizer()
        self._matcher = StopMatcher(request.stops, include_stop=request.params.include_stop_in_output)

    def forget_early(self) -> None:
        """Drop what came out of order: a new attempt says it again."""
        self._early.clear()

    def add(
        self, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None, delta: Callable[[], Delta]
    ) -> int:
        """Take tokens from output index `index` on, and emit all that are in order now; returns their number."""
        if len(tokens) == 1 and index == len(self.output_ids) and not self._early and self.finish is None:
            self._emit(tokens[0], finish, delta())
            return 1
        for at, token in enumerate(tokens, start=index):
            last = at == index + len(tokens) - 1
            if at >= len(self.output_ids):
                self._early.setdefault(at, (token, finish if last else None))
        before = len(self.output_ids)
        while self.finish is None and (entry := self._early.pop(len(self.output_ids), None)) is not None:
            self._emit(*entry, delta())
        return len(self.output_ids) - before

    def _emit(self, token: TokenInfo, finish: FinishReason | None, delta: Delta) -> None:
        self.output_ids.append(token.token_id)
        delta.tokens.append(token)
        by_token = finish is FinishReason.STOP
        silent = by_token and not self._params.include_stop_in_output
        piece = "" if silent else self._detokenizer.push(token.token_id)
        if finish is not None:
            piece += self._detokenizer.flush()
        # As in vLLM, a stop string that ends within min_tokens is text like any other.
        delta.text += self._matcher.push(piece, counts=len(self.output_ids) > self._params.min_tokens)
        if self._matcher.found is not None:
            finish, by_token = FinishReason.STOP, False
            delta.stop_string = self._matcher.found
        elif finish is not None:
            delta.text += self._matcher.flush()
        if by_token:
            delta.stop_token_id = token.token_id
        self.finish = delta.finish = finish


class Emission:
    """All choices of a request, and its outbox."""

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self.outbox = Outbox()
        self.account = Account(request.arrived)
        self._prompt_tokens = len(request.prompt_ids)
        self._cached_tokens: int | None = None
        self._cached = CachedTokens()
        self._clock = clock
        self._choices = [_Choice(index, request) for index in range(request.params.n)]

    def unfinished(self, choices: Iterable[int]) -> tuple[int, ...]:
        """Those of `choices` that have not ended."""
        return tuple(index for index in choices if self._choices[index].finish is None)

    def output_ids(self, choice: int) -> list[int]:
        """The tokens of a choice that were emitted."""
        return self._choices[choice].output_ids

    def emitted(self, choices: Iterable[int]) -> int:
        """How many tokens of these choices were emitted."""
        return sum(len(self._choices[index].output_ids) for index in choices)

    def begin(self, choices: Iterable[int]) -> None:
        """A new attempt at these choices starts."""
        for index in choices:
            self._choices[index].forget_early()

    def first_tokens(self, event: Prefilled) -> None:
        """Emit what prefill sampled, each at the end of its choice."""
        if self._cached_tokens is None:
            self._cached_tokens, self._cached = event.cached_tokens, event.cached
            if event.prompt_tokens:
                self.outbox.prompt_tokens(event.prompt_tokens)
        for first in event.first_tokens:
            self._first(first)

    def output(self, event: Output) -> bool:
        """Emit what decode sampled; whether the choice goes on."""
        if event.timings is not None:
            self.account.on_decode(event.timings)
        self._add(event.choice_index, event.output_index, event.tokens, event.finish)
        return not 0 <= event.choice_index < len(self._choices) or self._choices[event.choice_index].finish is None

    def close(self) -> None:
        """The request is served."""
        completion = self.emitted(range(len(self._choices)))
        usage = Usage(self._prompt_tokens, self._cached_tokens or 0, completion, self._cached)
        self.outbox.close(usage, self.account.timings(self._clock()))

    def _first(self, first: FirstToken) -> None:
        index = len(self._choices[first.choice_index].output_ids)
        self._add(first.choice_index, index, (first.token,), first.finish)

    def _add(self, choice: int, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None) -> None:
        if not 0 <= choice < len(self._choices):
            return
        count = self._choices[choice].add(index, tokens, finish, lambda: self.outbox.delta(choice))
        if count:
            now = self._clock()
            if self.account.first_token is None:
                TTFT.observe(now - self.account.arrived)
            if (gap := self.account.on_tokens(choice, count, now)) is not None:
                ITL.observe(gap)
