"""Which prompt is computed next, and how much of it. Pure, without even a clock of its own.

    admit ──▶ LOOKUP ──looked_up──▶ WAITING ──grant──▶ LOADING ──ready──▶ READY ──computed × n──▶ remove
              (prefix cache)        (for pages)        (cached blocks)    (a chunk at a time)

What is cached of a prompt is known twice: when it was looked up, and, since it may have grown or shrunk meanwhile, when
its pages are taken; `take` says so with `expects`. A prompt that does best to wait for another, because that one
computes much of its prefix, is passed over as long as `later` says so.

At each chunk boundary the READY prompt with the fewest tokens left goes next, so that a short prompt does not
wait for a long one. So that nothing starves, waiting earns credit: a tenth of the tokens that the worker
could have computed in the time. A prompt is thus held up by shorter ones for at most about ten times as long
as it takes.

Pages are granted in the same order, all that a prompt needs at once, and only to the first PREPARED_AHEAD
prompts that have not begun, since pages held by a prompt that does not run serve nobody. A prompt whose pages
are not free is passed over by those that fit, until it was refused for PATIENCE_S; from then on no other gets
pages before it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest, OutOfPages, Overloaded

AGEING = 0.1
PREPARED_AHEAD = 2
PATIENCE_S = 2.0
CHUNK_S = 0.5
LEAST_CHUNK = 256
LEAST_CHUNK_S = 5.0
UNKNOWN_RATE = 1000.0
TELLING_TOKENS = 64
_CHUNK_SIZES = ((512_000, 4_096), (128_000, 8_192), (32_000, 16_384))
_DECAY = 0.8
_RETRY_AFTER_S = (0.1, 60.0)


def chunk_size(prompt_tokens: int, configured: int, rate: float) -> int:
    """Tokens of the next chunk of a prompt; `rate` in tokens/s, 0 while unknown.

    As configured, or by the length: whole below 32,000 tokens, then 16,384, 8,192 from 128,000 and 4,096 from
    512,000 on; and not more than the measured rate, or UNKNOWN_RATE, computes in CHUNK_S, so that a layer is over
    long before a worker is held to be wedged. Yet LEAST_CHUNK tokens, which use a processor better than fewer do,
    unless these would take longer than LEAST_CHUNK_S; and never fewer than tell the rate, so that after a slow spell
    it is found out that the spell is over.
    """
    if configured:
        return configured
    size = next((size for least, size in _CHUNK_SIZES if prompt_tokens >= least), prompt_tokens)
    rate = rate or UNKNOWN_RATE
    least = max(TELLING_TOKENS, min(LEAST_CHUNK, int(rate * LEAST_CHUNK_S)))
    return min(size, max(least, int(rate * CHUNK_S)))


class Rate:
    """Tokens per second over recent chunks, each weighing DECAY times as much as the one after it."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A chunk took so long."""
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def value(self) -> float:
        """Tokens per second; 0 while unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Stage(enum.Enum):
    """Where a prompt is on its way."""

    LOOKUP = "lookup"
    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"


@dataclass(eq=False, slots=True)
class Work:
    """A prompt as the scheduler sees it.

    `done` tokens are computed, or found in a cache and expected to load. Times are in seconds.
    """

    tokens: int
    pages: int
    admitted_at: float
    order: int
    stage: Stage = Stage.LOOKUP
    done: int = 0
    begun: bool = False
    computing_s: float = 0.0
    refused_at: float | None = None

    @property
    def left(self) -> int:
        """Tokens still to be computed."""
        return self.tokens - self.done


@dataclass(slots=True)
class Scheduler:
    """All prompts of one worker from admission to end; times are given by the caller, from one clock."""

    spec: EngineSpec
    chunk_size: int
    max_waiting: int
    rate: Rate = field(default_factory=Rate)
    _works: dict[Work, None] = field(default_factory=dict)
    _orders: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def waiting(self) -> int:
        """Prompts without a computed chunk."""
        return sum(not work.begun for work in self._works)

    @property
    def running(self) -> int:
        """Prompts with a computed chunk."""
        return sum(work.begun for work in self._works)

    @property
    def pending_tokens(self) -> int:
        """Tokens to be computed for all prompts."""
        return sum(work.left for work in self._works)

    def admit(self, tokens: int, free_pages: int, now: float) -> Work:
        """Take a prompt in.

        Raises InvalidRequest or OutOfPages if it can never be computed here, Overloaded if too many wait.
        """
        if tokens >= self.spec.max_model_len:
            raise InvalidRequest(
                "prompt_token_ids",
                f"with output_token_ids must leave room for a token in {self.spec.max_model_len}",
                tokens,
            )
        pages = self.spec.pages_for(tokens)
        if pages > self.spec.pages:
            raise OutOfPages(pages, free_pages, self.spec.pages)
        if self.waiting >= self.max_waiting:
            seconds = self.pending_tokens / (self.rate.value or UNKNOWN_RATE)
            low, high = _RETRY_AFTER_S
            raise Overloaded(
                f"{self.waiting} prompts wait, at most {self.max_waiting} may", min(high, max(low, seconds))
            )
        work = Work(tokens, pages, now, next(self._orders))
        self._works[work] = None
        return work

    def looked_up(self, work: Work, cached: int) -> None:
        """So many leading tokens are expected from the cache."""
        work.done, work.stage = cached, Stage.WAITING

    def expects(self, work: Work, cached: int) -> None:
        """So many leading tokens are in the pages that it took, or on their way there."""
        work.done = cached

    def grant(
        self, now: float, take: Callable[[Work], bool], later: Callable[[Work], bool] = lambda _: False
    ) -> list[Work]:
        """Offer pages: `take` returns whether it got them. The works that got theirs are LOADING now.

        A work for which `later` is true is offered none: it waits for what another computes.
        """
        granted, prepared = [], 0
        for work in self._next_for_pages(now, later):
            if work.stage is Stage.WAITING and later(work):
                continue
            if work.stage is Stage.WAITING:
                if not take(work):
                    if work.refused_at is None:
                        work.refused_at = now
                    continue
                work.stage = Stage.LOADING
                granted.append(work)
            prepared += 1
            if prepared == PREPARED_AHEAD:
                break
        return granted

    def ready(self, work: Work, done: int) -> None:
        """The KV of the first `done` tokens is in place; the rest is to be computed."""
        work.done, work.stage = done, Stage.READY

    def next_chunk(self, now: float) -> tuple[Work, int] | None:
        """The prompt to compute next and the end of its chunk; None if none is READY."""
        ready = [work for work in self._works if work.stage is Stage.READY]
        if not ready:
            return None
        work = self._in_order(ready, now)[0]
        size = chunk_size(work.tokens, self.chunk_size, self.rate.value)
        return work, min(work.tokens, work.done + size)

    def computed(self, work: Work, end: int, seconds: float) -> None:
        """A chunk up to `end` took so long.

        One of fewer than TELLING_TOKENS is mostly overhead, unless all are that short: it may raise the known
        rate, but neither lower nor establish it. Or short prompts and rests of cached ones would make the worker
        seem slow.
        """
        tokens = end - work.done
        telling = tokens >= min(self.chunk_size or TELLING_TOKENS, TELLING_TOKENS)
        if telling or 0 < self.rate.value * seconds < tokens:
            self.rate.add(tokens, seconds)
        work.done, work.begun = end, True
        work.computing_s += seconds

    def rank(self, work: Work, now: float) -> float:
        """Tokens that it has left, less the credit for its waiting: the least goes first."""
        credit = AGEING * (self.rate.value or UNKNOWN_RATE)
        return work.left - credit * (now - work.admitted_at - work.computing_s)

    def remove(self, work: Work) -> None:
        """The prompt is finished or given up."""
        self._works.pop(work, None)

    def _next_for_pages(self, now: float, later: Callable[[Work], bool]) -> list[Work]:
        """Prompts that have not begun and know their hit, in the order in which they are prepared."""
        works = [work for work in self._works if not work.begun and work.stage is not Stage.LOOKUP]
        starved = [
            work
            for work in works
            if work.stage is Stage.WAITING
            and work.refused_at is not None
            and now - work.refused_at >= PATIENCE_S
            and not later(work)
        ]
        return sorted(starved, key=lambda work: work.order)[:1] or self._in_order(works, now)

    def _in_order(self, works: Iterable[Work], now: float) -> list[Work]:
        return sorted(works, key=lambda work: (self.rank(work, now), work.order))
