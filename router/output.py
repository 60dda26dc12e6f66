"""Output of a request: turns tokens, which may come out of order, into the messages for its client.

Each choice emits its tokens in the order of their output index and drops repeated ones. So token 2 may arrive before
token 1, and a new attempt may repeat tokens. An incremental detokenizer makes the text, and a stop matcher searches it.
New output waits in the output queue until the client's stream takes it, so a slow client costs the memory of its own
max_tokens and delays no other client.

    add ──▶ [Update] [Update] [Update, still filling] ──▶ take: one at a time, oldest first, each at most MESSAGE_BYTES

A single message for a client that reads slowly could be larger than the client accepts (gRPC's default is 4 MiB), and
the answer would be lost. So output is cut into messages as it comes. Text, tokens and finish of a choice keep their
order; usage and timings are in the last message.

The latency account has durations on the router's clock, and two durations that decode has measured on its own.

    arrival ──queue── placement ──prefill── first token ──transfer── ──slot wait── ──decode── end

The sum of the parts is exactly the total. Decode begins to fetch when prefill is called, so only the part of the fetch
after prefill counts as transfer. The remaining time counts as decode, so that no time is missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.request import (
    CachedTokens,
    DecodeTimings,
    FinishReason,
    FirstToken,
    Output,
    Prefilled,
    PrefillProgress,
    Timings,
    TokenInfo,
    Usage,
)
from baton.telemetry import metrics
from router.request import Request


@dataclass(slots=True)
class LatencyAccount:
    """The latency account of a request; times are in seconds on one monotonic clock.

    `placed` and `decode` are those of the first attempt that has them. The time of other attempts counts as prefill
    before the first token, and as decode after it.
    """

    arrived: float
    placed: float | None = None
    first_token: float | None = None
    decode: DecodeTimings | None = None
    tokens: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """By choice: time of the first token, time of the last token, and number of tokens."""

    def on_placed(self, now: float) -> None:
        """Record that workers were found and prefill is called."""
        if self.placed is None:
            self.placed = now

    def on_decode(self, timings: DecodeTimings) -> None:
        """Record the durations that decode has measured."""
        if self.decode is None:
            self.decode = timings

    def on_tokens(self, choice: int, count: int, now: float) -> float | None:
        """Record `count` new tokens of a choice.

        Returns the mean gap, in seconds per token, since the choice's previous tokens; None if these are its first.
        """
        if self.first_token is None:
            self.first_token = now
        first, last, seen = self.tokens.get(choice, (now, now, 0))
        self.tokens[choice] = (first, now, seen + count)
        return (now - last) / count if seen else None

    def timings(self, now: float) -> Timings:
        """The account in milliseconds, rounded to microseconds, of a request that ends at `now`."""
        total = 1e3 * (now - self.arrived)
        queue = 1e3 * ((now if self.placed is None else self.placed) - self.arrived)
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
        mean_itl = 1e3 * spans / gaps if gaps else 0.0
        queue, prefill, transfer, slot_wait, decode = (
            round(part, 3) for part in (queue, prefill, transfer, slot_wait, decode)
        )
        return Timings(
            queue=queue,
            prefill=prefill,
            transfer=transfer,
            slot_wait=slot_wait,
            decode=decode,
            total=round(queue + prefill + transfer + slot_wait + decode, 3),
            first_token=round(until_first, 3),
            mean_itl=round(mean_itl, 3),
        )


class _Choice:
    """The output of one choice, from its first token to its finish."""

    def __init__(self, index: int, request: Request, stops: StopStrings, queue: OutputQueue) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self._params = request.params
        self._queue = queue
        self._out_of_order: dict[int, tuple[TokenInfo, FinishReason | None]] = {}
        self._detokenizer = request.make_detokenizer()
        self._matcher = StopMatcher(stops, include_stop=request.params.include_stop_in_output)

    def drop_out_of_order(self) -> None:
        """Drop tokens that came out of order, because a new attempt sends them again."""
        self._out_of_order.clear()

    def add(self, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None) -> int:
        """Add tokens from output index `index` on, and emit all that are in order now; returns the number emitted."""
        if len(tokens) == 1 and index == len(self.output_ids) and not self._out_of_order and self.finish is None:
            self._emit(tokens[0], finish)
            return 1
        for at, token in enumerate(tokens, start=index):
            last = at == index + len(tokens) - 1
            if at >= len(self.output_ids):
                self._out_of_order.setdefault(at, (token, finish if last else None))
        before = len(self.output_ids)
        while self.finish is None and (entry := self._out_of_order.pop(len(self.output_ids), None)) is not None:
            self._emit(*entry)
        return len(self.output_ids) - before

    def _emit(self, token: TokenInfo, finish: FinishReason | None) -> None:
        self.output_ids.append(token.token_id)
        by_token = finish is FinishReason.STOP
        silent = by_token and not self._params.include_stop_in_output
        piece = "" if silent else self._detokenizer.push(token.token_id)
        if finish is not None:
            piece += self._detokenizer.flush()
        # As in vLLM, a stop string within the first min_tokens tokens does not end the choice.
        text = self._matcher.push(piece, may_stop=len(self.output_ids) > self._params.min_tokens)
        if self._matcher.found is not None:
            finish, by_token = FinishReason.STOP, False
        elif finish is not None:
            text += self._matcher.flush()
        self.finish = finish
        stop_token_id = token.token_id if by_token else None
        self._queue.add(self.index, token, text, finish, stop_string=self._matcher.found, stop_token_id=stop_token_id)


class OutputProcessor:
    """The output of all choices of a request, and the queue of messages for its client; `clock` returns seconds."""

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        asked = request.params.prompt_logprobs is not None
        self.queue = OutputQueue(len(request.prompt_ids) if asked else 0)
        self.account = LatencyAccount(request.arrived)
        self._prompt_tokens = len(request.prompt_ids)
        self._cached_tokens: int | None = None
        self._cached = CachedTokens()
        self._clock = clock
        tenant = metrics.tenant_label(request.tenant)
        self._prompt_counter = metrics.PROMPT_TOKENS.labels(tenant)
        self._token_counter = metrics.GENERATION_TOKENS.labels(tenant)
        self._uncounted = 0
        stops = StopStrings(request.params.stop)
        self._choices = [_Choice(index, request, stops, self.queue) for index in range(request.params.n)]

    def unfinished(self, choices: Iterable[int]) -> tuple[int, ...]:
        """The indexes among `choices` that have not ended."""
        return tuple(index for index in choices if self._choices[index].finish is None)

    def unserved(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The indexes that an attempt must serve: unfinished ones, or one for missing prompt log-probabilities."""
        return self.unfinished(choices) or (() if self.prompt_logprobs_complete else tuple(choices[:1]))

    def output_ids(self, choice: int) -> list[int]:
        """The emitted token ids of a choice."""
        return self._choices[choice].output_ids

    @property
    def has_output(self) -> bool:
        """Whether there is output for the client."""
        return self.queue.logprobs_added > 0 or any(choice.output_ids for choice in self._choices)

    def count_emitted(self, choices: Iterable[int]) -> int:
        """Number of emitted tokens of these choices together."""
        return sum(len(self._choices[index].output_ids) for index in choices)

    def drop_out_of_order(self, choices: Iterable[int]) -> None:
        """Drop tokens of these choices that wait for earlier ones: a new attempt sends them again."""
        for index in choices:
            self._choices[index].drop_out_of_order()

    def report_progress(self, progress: PrefillProgress) -> None:
        """Send the progress of prefill to the client, unless a prompt is replayed after the first output."""
        if self.account.first_token is None:
            self.queue.report_progress(progress)

    @property
    def prompt_logprobs_complete(self) -> bool:
        """Whether all requested log-probabilities of the prompt were added."""
        return self.queue.logprobs_left == 0

    def add_prompt_logprobs(self, start: int, tokens: Sequence[TokenInfo]) -> None:
        """Emit log-probabilities of the prompt from position `start` on; repeated ones are dropped."""
        self.queue.add_prompt_logprobs(tokens[max(self.queue.logprobs_added - start, 0) :][: self.queue.logprobs_left])

    def add_first_tokens(self, event: Prefilled) -> None:
        """Emit the tokens that prefill sampled, each as the next token of its choice."""
        if self._cached_tokens is None:
            self._cached_tokens, self._cached = event.cached_tokens, event.cached
            self._prompt_counter.inc(self._prompt_tokens)
        for first in event.first_tokens:
            self._first(first)

    def add(self, event: Output) -> bool:
        """Emit tokens that decode sampled. Returns whether the choice is unfinished."""
        if event.timings is not None:
            self.account.on_decode(event.timings)
        self._add(event.choice_index, event.output_index, event.tokens, event.finish)
        return not 0 <= event.choice_index < len(self._choices) or self._choices[event.choice_index].finish is None

    def count_rest(self) -> None:
        """Count the tokens that the metric does not have yet; to be called at the end of the request."""
        self._token_counter.inc(self._uncounted)
        self._uncounted = 0

    def close(self) -> Timings:
        """Emit usage and timings, because the request has ended; returns the timings."""
        completion = self.count_emitted(range(len(self._choices)))
        usage = Usage(self._prompt_tokens, self._cached_tokens or 0, completion, self._cached)
        timings = self.account.timings(self._clock())
        self.queue.close(usage, timings)
        _record(usage, timings)
        return timings

    def _first(self, first: FirstToken) -> None:
        index = len(self._choices[first.choice_index].output_ids)
        self._add(first.choice_index, index, (first.token,), first.finish)

    def _add(self, choice: int, index: int, tokens: Sequence[TokenInfo], finish: FinishReason | None) -> None:
        if not 0 <= choice < len(self._choices):
            return
        count = self._choices[choice].add(index, tokens, finish)
        if count:
            self._uncounted += count
            if self._uncounted >= _COUNTED_TOKENS:
                self.count_rest()
            if (reason := self._choices[choice].finish) is not None:
                metrics.FINISHED.labels(reason.value).inc()
            now = self._clock()
            if self.account.first_token is None:
                metrics.TTFT.observe(now - self.account.arrived)
            if (gap := self.account.on_tokens(choice, count, now)) is not None:
                metrics.ITL.observe(gap)


def _record(usage: Usage, timings: Timings) -> None:
    """Record the times and lengths of a request that succeeded."""
    for histogram, milliseconds in (
        (metrics.E2E, timings.total),
        (metrics.QUEUE_TIME, timings.queue),
        (metrics.PREFILL_TIME, timings.prefill),
        (metrics.TRANSFER_TIME, timings.transfer),
        (metrics.SLOT_WAIT_TIME, timings.slot_wait),
        (metrics.DECODE_TIME, timings.decode),
    ):
        histogram.observe(milliseconds / 1e3)
    metrics.REQUEST_PROMPT_TOKENS.observe(usage.prompt_tokens)
    metrics.REQUEST_GENERATION_TOKENS.observe(usage.completion_tokens)


_COUNTED_TOKENS = 16
"""Number of tokens that are counted together: to count each one would be a third of the time of all metrics."""

MESSAGE_BYTES = 8 << 10
"""Most bytes of a response on the wire.

Making one holds up the event loop for a millisecond at most. A thread would not help, because it would hold the GIL.
"""

_FIXED_BYTES = 256
"""Most bytes of the other fields of a response: request id, usage and timings."""

_MAX_CONTENT_BYTES = MESSAGE_BYTES - _FIXED_BYTES

_DELTA_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES, _CHARACTER_BYTES = 32, 16, 13, 4
"""Most bytes on the wire of an empty delta, a token without alternatives, an alternative, and a character."""

_TEXT = _MAX_CONTENT_BYTES // _CHARACTER_BYTES // 4
"""Most characters that are added to a message in one step."""


@dataclass(slots=True)
class ChoiceUpdate:
    """New output of one choice; `stop_string` or `stop_token_id` is the cause of a finish with STOP."""

    index: int
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class Update:
    """New output of a request that fits one message; the last one has `usage` and `timings`."""

    deltas: dict[int, ChoiceUpdate] = field(default_factory=dict)
    prompt_tokens: Sequence[TokenInfo] = ()
    progress: PrefillProgress | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    size: int = 0
    """Most bytes of deltas and prompt tokens on the wire."""


class OutputQueue:
    """New output that waits to be taken, for one producer and one consumer.

    Log-probabilities of the first `logprob_count` prompt tokens are taken before all output.
    """

    def __init__(self, logprob_count: int = 0) -> None:
        self.logprobs_added, self.logprobs_left = 0, logprob_count
        """Number of prompt log-probabilities that were added, and number still missing."""
        self._waiting: deque[Update] = deque()
        self._progress: PrefillProgress | None = None
        self._prompt_logprobs: deque[TokenInfo] = deque()
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
        """Add a token of a choice with its text, and the reason and cause of the finish if the choice has ended."""
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

    def add_prompt_logprobs(self, prompt_tokens: Sequence[TokenInfo]) -> None:
        """Add log-probabilities of the next tokens of the prompt."""
        self._prompt_logprobs.extend(prompt_tokens)
        self.logprobs_added += len(prompt_tokens)
        self.logprobs_left -= len(prompt_tokens)
        self._wake()

    def report_progress(self, progress: PrefillProgress) -> None:
        """Add the progress of prefill. It is taken before everything else, and replaces progress that still waits."""
        self._progress = progress
        self._wake()

    def close(self, usage: Usage, timings: Timings) -> None:
        """Add usage and timings, after which nothing may be added."""
        last = self._last(0)
        last.usage, last.timings = usage, timings
        self._closed = True

    def fail(self, error: BaseException) -> None:
        """End the queue with an error, which `take` raises after the waiting output."""
        self._error, self.logprobs_left = error, 0
        self._wake()

    async def take(self) -> Update:
        """Wait for the next message and take it.

        When nothing is left, raises the error given to `fail`, or StopAsyncIteration after `close`.
        """
        while not (self._prompt_logprobs or self._progress or (self._waiting and not self.logprobs_left)):
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        if (progress := self._progress) is not None:
            self._progress = None
            return Update(progress=progress)
        return self._take_prompt_logprobs() if self._prompt_logprobs else self._waiting.popleft()

    def _take_prompt_logprobs(self) -> Update:
        """The next message with prompt log-probabilities; the last part may share a message with output."""
        tokens, size = [self._prompt_logprobs.popleft()], 0
        size = _size(tokens[0])
        while self._prompt_logprobs and size + _size(self._prompt_logprobs[0]) <= _MAX_CONTENT_BYTES:
            size += _size(self._prompt_logprobs[0])
            tokens.append(self._prompt_logprobs.popleft())
        last = not self._prompt_logprobs and not self.logprobs_left
        fits = last and bool(self._waiting) and self._waiting[0].size + size <= _MAX_CONTENT_BYTES
        update = self._waiting.popleft() if fits else Update()
        update.prompt_tokens = tokens
        return update

    def _delta(self, choice: int, size: int) -> ChoiceUpdate:
        """The delta of a choice in the last message, after room for `size` more bytes was made."""
        update = self._last(size + _DELTA_BYTES)
        found = update.deltas.get(choice)
        if found is None:
            found = update.deltas[choice] = ChoiceUpdate(choice)
            size += _DELTA_BYTES
        update.size += size
        return found

    def _last(self, size: int) -> Update:
        """The last message if `size` more bytes fit into it, else a new one."""
        if self._waiting and self._waiting[-1].size + size <= _MAX_CONTENT_BYTES:
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


class StopStrings:
    """The automaton of some stop strings (Aho and Corasick, 1975); choices of a request share it.

    It reads a text character by character, so the result does not depend on how the text was cut into pieces. The work
    per character depends neither on the number of stop strings nor on their length. The match that ends first wins; if
    two end together, the longer one wins.

    A node stands for a prefix of a stop string. The current node is the longest prefix that the text ends with; node 0
    is the empty prefix.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """By node: its failure link (Aho and Corasick), the longest proper suffix that begins a stop string."""
        self.match = [0]
        """By node: length of the longest stop string that ends its prefix; 0 if there is none."""
        self.hold = [0]
        """By node: number of characters to hold back, because a stop string may begin with them."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._first = frozenset(self._next[0])

    def misses(self, text: str) -> bool:
        """Whether no stop string begins anywhere in the text."""
        return self._first.isdisjoint(text)

    def advance(self, node: int, char: str) -> int:
        """The node after one more character."""
        while (found := self._next[node].get(char)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return found

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.match.append(0)
            node = self._next[node][char]
        self.match[node] = len(stop)

    def _link(self) -> None:
        """Set the entries that follow from shorter prefixes, shortest first."""
        depth = [0] * len(self._next)
        self._shorter, self.hold = [0] * len(self._next), [0] * len(self._next)
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for char, longer in self._next[node].items():
                depth[longer] = depth[node] + 1
                shorter = self.advance(self._shorter[node], char) if node else 0
                self._shorter[longer] = shorter
                self.match[longer] = self.match[longer] or self.match[shorter]
                self.hold[longer] = depth[longer] if self._next[longer] else self.hold[shorter]
                waiting.append(longer)


class StopMatcher:
    """Searches one text for stop strings, and holds back the longest suffix that may begin one."""

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = 0
        self._pending = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Add text and return the text that may be shown now; it is empty after `found` was set.

        Without `may_stop`, matches that end within `piece` are ignored; a match that begins there may still end later.
        """
        if self.found is not None:
            return ""
        if not self._pending and self._stops.misses(piece):
            self._node = 0
            return piece
        text = self._pending + piece
        for end, char in enumerate(piece, start=len(self._pending) + 1):
            self._node = self._stops.advance(self._node, char)
            if may_stop and (length := self._stops.match[self._node]):
                self.found = text[end - length : end]
                self._pending = ""
                return text[: end if self._include_stop else end - length]
        hold = self._stops.hold[self._node]
        self._pending = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return the text that was held back; the text ends here."""
        text, self._pending = self._pending, ""
        return text
