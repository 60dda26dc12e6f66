"""From tokens, in whatever order they come, to what the client is sent.

Each choice emits its tokens in the order of their output index and drops those it has had, so that token 2 may
arrive before token 1, and a new attempt may repeat what an old one said. Text comes from an incremental detokenizer
through a stop matcher. What is new gathers in the output queue until the client's stream takes it, so a slow client
costs its own max_tokens of memory and holds back nobody.

The latency account has durations on the router's clock, but for decode's own, which are durations too.

    arrival ──queue── dispatch ──prefill── first token ──transfer── ──slot wait── ──decode── end

The parts add up to the total exactly. Decode begins to fetch when prefill is dispatched, so only the part of the
fetch that comes after prefill counts as transfer. Decode is the rest, so that no time is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.request import (
    CachedTokens,
    DecodeTimings,
    FinishReason,
    FirstToken,
    Output,
    PrefillProgress,
    Timings,
    TokenInfo,
    Usage,
)
from baton.telemetry.metrics import ITL, TTFT
from router.output.queue import OutputQueue
from router.output.stops import StopMatcher
from router.request import Prefilled, Request


@dataclass(slots=True)
class Account:
    """Times are in seconds on one monotonic clock; of several attempts the first one's count."""

    arrived: float
    dispatched: float | None = None
    first_token: float | None = None
    decode: DecodeTimings | None = None
    tokens: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """First time, last time and number of tokens by choice."""

    def on_dispatch(self, now: float) -> None:
        """Prefill was called."""
        if self.dispatched is None:
            self.dispatched = now

    def on_decode(self, timings: DecodeTimings) -> None:
        """Decode has reported its share."""
        if self.decode is None:
            self.decode = timings

    def on_tokens(self, choice: int, count: int, now: float) -> float | None:
        """Tokens of a choice came; returns the time per token since those before, None for the first."""
        if self.first_token is None:
            self.first_token = now
        first, last, seen = self.tokens.get(choice, (now, now, 0))
        self.tokens[choice] = (first, now, seen + count)
        return (now - last) / count if seen else None

    def timings(self, now: float) -> Timings:
        """The account of a request that ends now, in milliseconds."""
        total = 1e3 * (now - self.arrived)
        queue = 1e3 * ((now if self.dispatched is None else self.dispatched) - self.arrived)
        until_first = 1e3 * ((now if self.first_token is None else self.first_token) - self.arrived)
        prefill = until_first - queue
        left = total - until_first
        transfer = slot_wait = 0.0
        if self.decode is not None:
            transfer = min(max(self.decode.fetch_ms - prefill, 0.0), left)
            slot_wait = min(max(self.decode.slot_wait_ms, 0.0), left - transfer)
        decode = max(left - transfer - slot_wait, 0.0)
        gaps = sum(count - 1 for _, _, count in self.tokens.values())
        spans = sum(last - first for first, last, _ in self.tokens.values())
        return Timings(
            queue=queue,
            prefill=prefill,
            transfer=transfer,
            slot_wait=slot_wait,
            decode=decode,
            total=queue + prefill + transfer + slot_wait + decode,
            first_token=until_first,
            mean_itl=1e3 * spans / gaps if gaps else 0.0,
        )


class _Choice:
    """One choice from its first token to its finish."""

    def __init__(self, index: int, request: Request, queue: OutputQueue) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self._params = request.params
        self._queue = queue
        self._early: dict[int, tuple[TokenInfo, FinishReason | None]] = {}
        self._detokenizer = request.detokenizer()
        self._matcher = StopMatcher(request.stops, include_stop=request.params.include_stop_in_output)

    def forget_early(self) -> None:
        """Drop what came out of order: a new attempt says it again."""
        self._early.clear()

    def add(self, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None) -> int:
        """Take tokens from output index `index` on, and emit all that are in order now; returns their number."""
        if len(tokens) == 1 and index == len(self.output_ids) and not self._early and self.finish is None:
            self._emit(tokens[0], finish)
            return 1
        for at, token in enumerate(tokens, start=index):
            last = at == index + len(tokens) - 1
            if at >= len(self.output_ids):
                self._early.setdefault(at, (token, finish if last else None))
        before = len(self.output_ids)
        while self.finish is None and (entry := self._early.pop(len(self.output_ids), None)) is not None:
            self._emit(*entry)
        return len(self.output_ids) - before

    def _emit(self, token: TokenInfo, finish: FinishReason | None) -> None:
        self.output_ids.append(token.token_id)
        by_token = finish is FinishReason.STOP
        silent = by_token and not self._params.include_stop_in_output
        piece = "" if silent else self._detokenizer.push(token.token_id)
        if finish is not None:
            piece += self._detokenizer.flush()
        # As in vLLM, a stop string that ends within min_tokens is text like any other.
        text = self._matcher.push(piece, counts=len(self.output_ids) > self._params.min_tokens)
        if self._matcher.found is not None:
            finish, by_token = FinishReason.STOP, False
        elif finish is not None:
            text += self._matcher.flush()
        self.finish = finish
        stop_token_id = token.token_id if by_token else None
        self._queue.add(self.index, token, text, finish, stop_string=self._matcher.found, stop_token_id=stop_token_id)


class OutputProcessor:
    """All choices of a request, and the queue of what its client has not been sent."""

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        asked = request.params.prompt_logprobs is not None
        self.queue = OutputQueue(len(request.prompt_ids) if asked else 0)
        self.account = Account(request.arrived)
        self._prompt_tokens = len(request.prompt_ids)
        self._cached_tokens: int | None = None
        self._cached = CachedTokens()
        self._clock = clock
        self._choices = [_Choice(index, request, self.queue) for index in range(request.params.n)]

    def unfinished(self, choices: Iterable[int]) -> tuple[int, ...]:
        """The `choices` that have not ended."""
        return tuple(index for index in choices if self._choices[index].finish is None)

    def unserved(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The `choices` that an attempt must serve: those that have not ended, or one if only the report is missing."""
        return self.unfinished(choices) or (() if self.report_complete else tuple(choices[:1]))

    def output_ids(self, choice: int) -> list[int]:
        """The tokens of a choice that were emitted."""
        return self._choices[choice].output_ids

    def count_emitted(self, choices: Iterable[int]) -> int:
        """The number of tokens of these choices that were emitted."""
        return sum(len(self._choices[index].output_ids) for index in choices)

    def begin(self, choices: Iterable[int]) -> None:
        """A new attempt at these choices starts."""
        for index in choices:
            self._choices[index].forget_early()

    def report_progress(self, progress: PrefillProgress) -> None:
        """Tell the client how far prefill is, unless it has output already: then a prompt is replayed."""
        if self.account.first_token is None:
            self.queue.report_progress(progress)

    @property
    def report_complete(self) -> bool:
        """Whether no log-probabilities of the prompt are missing."""
        return self.queue.report_left == 0

    def add_report(self, start: int, tokens: Sequence[TokenInfo]) -> None:
        """Emit log-probabilities of the prompt from position `start` on; a new attempt may repeat earlier ones."""
        self.queue.report(tokens[max(self.queue.reported - start, 0) :][: self.queue.report_left])

    def add_first_tokens(self, event: Prefilled) -> None:
        """Emit what prefill sampled, each at the end of its choice."""
        if self._cached_tokens is None:
            self._cached_tokens, self._cached = event.cached_tokens, event.cached
        for first in event.first_tokens:
            self._first(first)

    def add(self, event: Output) -> bool:
        """Emit what decode sampled; whether the choice goes on."""
        if event.timings is not None:
            self.account.on_decode(event.timings)
        self._add(event.choice_index, event.output_index, event.tokens, event.finish)
        return not 0 <= event.choice_index < len(self._choices) or self._choices[event.choice_index].finish is None

    def close(self) -> None:
        """The request is served."""
        completion = self.count_emitted(range(len(self._choices)))
        usage = Usage(self._prompt_tokens, self._cached_tokens or 0, completion, self._cached)
        self.queue.close(usage, self.account.timings(self._clock()))

    def _first(self, first: FirstToken) -> None:
        index = len(self._choices[first.choice_index].output_ids)
        self._add(first.choice_index, index, (first.token,), first.finish)

    def _add(self, choice: int, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None) -> None:
        if not 0 <= choice < len(self._choices):
            return
        count = self._choices[choice].add(index, tokens, finish)
        if count:
            now = self._clock()
            if self.account.first_token is None:
                TTFT.observe(now - self.account.arrived)
            if (gap := self.account.on_tokens(choice, count, now)) is not None:
                ITL.observe(gap)
