"""Requests whose tokens are known beforehand, and how each of them ended.

A request ends in exactly one of these ways:

    finished    every choice has exactly its tokens, text, log-probabilities and finish reason, and the usage adds up
    cancelled   by its client, at a moment drawn beforehand
    expired     its deadline passed (only those that have one)
    refused     RESOURCE_EXHAUSTED
    failed      another status with a type
    untyped     INTERNAL or UNKNOWN
    wrong       a token differs from what it must be; looked at however it ended
    hung        no end, long after it was due
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from baton import bundled
from baton.client import AsyncClient
from baton.engine.fake import DECODE_LOGPROB, PREFILL_LOGPROB, expected_tokens
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.request import FinishReason, SamplingParams, TokenInfo, Usage
from baton.tokenizer import Tokenizer
from tests.chaos.process import VOCABULARY

UNTYPED = ("BatonError", "EngineError")


class Expected(NamedTuple):
    tokens: list[int]
    finish: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class Spec:
    """One request; times in seconds after it was sent. `pause` is how long the client reads nothing after its first
    message."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    seed: int | None = None
    stop_token: int | None = None
    stop: str | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    timeout: float | None = None
    cancel_after: float | None = None
    pause: float | None = None
    known: tuple[tuple[int, ...], ...] = ()
    """At least `max_tokens` tokens of each choice, if they are not the fake engine's."""

    def expected(self, choice: int) -> Expected:
        tokens = list(self.known[choice][: self.max_tokens]) if self.known else self._fake(choice)
        if self.stop_token in tokens:
            end = tokens.index(self.stop_token)
            return Expected(tokens[: end + 1], FinishReason.STOP, "".join(pieces(tokens[:end])))
        text = ""
        for count, piece in enumerate(pieces(tokens), 1):
            before = len(text)
            text += piece
            if self.stop is not None and count > self.min_tokens:
                at = text.find(self.stop, max(0, before - len(self.stop) + 1))
                if at >= 0:
                    return Expected(tokens[:count], FinishReason.STOP, text[:at])
        return Expected(tokens, FinishReason.LENGTH, text)

    def _fake(self, choice: int) -> list[int]:
        params = SamplingParams(temperature=0.0) if self.seed is None else SamplingParams(seed=self.seed)
        return expected_tokens(self.prompt, self.max_tokens, params=params, choice_index=choice, vocab_size=VOCABULARY)

    def following(self, prefix: tuple[int, ...]) -> Spec:
        """The same with a longer prompt."""
        return replace(self, prompt=prefix + self.prompt)

    def sampling(self) -> dict[str, object]:
        given = {"temperature": 0.0} if self.seed is None else {"seed": self.seed}
        optional = {
            "stop": self.stop,
            "stop_token_ids": None if self.stop_token is None else [self.stop_token],
            "logprobs": self.logprobs,
        }
        given |= {name: value for name, value in optional.items() if value is not None}
        return given | {  # type: ignore[return-value]
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "n": self.n,
            "ignore_eos": True,
        }


@cache
def tokenizer() -> Tokenizer:
    """Tokenizer of the bundled model, which the routers use."""
    return Tokenizer.load(bundled.path())


def pieces(tokens: Sequence[int]) -> list[str]:
    """The text that each token completes."""
    detokenizer = tokenizer().detokenizer()
    found = [detokenizer.push(token) for token in tokens]
    if found:
        found[-1] += detokenizer.flush()
    return found


@dataclass(slots=True)
class Outcome:
    """Outcome of a request; times are seconds on the monotonic clock."""

    spec: Spec
    router: str
    sent: float
    first: float = 0.0
    """Time of the first token; 0 without one."""
    ended: float = 0.0
    last: float = 0.0
    longest_gap: tuple[float, float] = (0.0, 0.0)
    """Longest time without a token while streaming, and when it began."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    odd: str = ""
    """The first token whose log-probabilities are not the engine's."""
    finish: dict[int, FinishReason] = field(default_factory=dict)
    usage: Usage | None = None
    request_id: str = ""
    end: str = ""
    error: str = ""

    @property
    def received(self) -> int:
        return sum(map(len, self.tokens.values()))

    def take(self, index: int, tokens: Sequence[TokenInfo], text: str, now: float) -> None:
        self.tokens.setdefault(index, []).extend(token.token_id for token in tokens)
        self.texts[index] = self.texts.get(index, "") + text
        self.odd = self.odd or next((str(token) for token in tokens if not self._usual(token)), "")
        self.first = self.first or now
        if self.last and self.spec.pause is None and now - self.last > self.longest_gap[0]:
            self.longest_gap = now - self.last, self.last
        self.last = now

    def _usual(self, token: TokenInfo) -> bool:
        """Whether log-probabilities are as the fake engine gives them; which worker sampled is no matter."""
        count, logprob = self.spec.logprobs, token.logprob
        if count is None or logprob not in (PREFILL_LOGPROB, DECODE_LOGPROB):
            return count is None and logprob is None and not token.top
        return token.top == tuple(((token.token_id + i) % VOCABULARY, logprob - i) for i in range(count))

    def judge(self) -> None:
        """Compare with what must have come; makes the end `wrong` where it differs."""
        for choice in range(self.spec.n):
            expected, reason, text = self.spec.expected(choice)
            got, read = self.tokens.get(choice, []), self.texts.get(choice, "")
            if self.end == "finished":
                self._hold(got == expected, f"choice {choice}: {got} is not {expected}")
                ended = self.finish.get(choice)
                self._hold(ended is reason, f"choice {choice} ended by {ended}, not {reason}")
                self._hold(read == text, f"choice {choice} reads {read!r}, not {text!r}")
            else:
                self._hold(got == expected[: len(got)], f"choice {choice}: {got} does not begin {expected}")
        self._hold(not self.odd, f"{self.odd} with logprobs of {self.spec.logprobs}")
        if self.end == "finished":
            told = self.usage.completion_tokens if self.usage else None
            self._hold(told == self.received, f"usage of {told} tokens, {self.received} came")

    def _hold(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.end, self.error = "wrong", f"{self.end}: {otherwise}; {self.error}"


async def ask(client: AsyncClient, outcome: Outcome) -> None:
    spec = outcome.spec
    asked = client.generate(spec.prompt, timeout=spec.timeout, **spec.sampling())
    try:
        async with asyncio.timeout(spec.cancel_after) as cancelling, aclosing(asked) as deltas:
            async for delta in deltas:
                pausing = spec.pause is not None and not outcome.first
                outcome.request_id = delta.request_id
                outcome.take(delta.index, delta.tokens, delta.text, time.monotonic())
                if delta.finish_reason is not None:
                    outcome.finish[delta.index] = delta.finish_reason
                if delta.usage is not None:
                    outcome.usage = delta.usage
                if pausing:
                    await asyncio.sleep(spec.pause or 0.0)
        outcome.end = "finished"
    except TimeoutError:
        outcome.end = "cancelled" if cancelling.expired() else "untyped"
    except Overloaded as error:
        # One that has had tokens was accepted: to refuse it then is to lose it.
        outcome.end, outcome.error = "failed" if outcome.received else "refused", f"Overloaded: {error}"
    except DeadlineExceeded as error:
        outcome.end, outcome.error = "expired" if spec.timeout else "failed", f"DeadlineExceeded: {error}"
    except BatonError as error:
        name = type(error).__name__
        outcome.end, outcome.error = "untyped" if name in UNTYPED else "failed", f"{name}: {error}"
    outcome.ended = time.monotonic()
    outcome.judge()


class Mix:
    """Draws requests: lengths, shared prefixes, sampling, choices, stops, slow readers, deadlines, cancels."""

    def __init__(self, rng: random.Random, *, cancels: float = 0.1, deadlines: float = 0.05) -> None:
        self._rng = rng
        self._cancels, self._deadlines = cancels, deadlines
        self._prefixes = [self._ids(rng.choice((48, 96, 160))) for _ in range(4)]

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCABULARY) for _ in range(count))

    def draw(self) -> Spec:
        rng = self._rng
        prefix = rng.choice(self._prefixes) if rng.random() < 0.5 else ()
        spec = Spec(
            prompt=prefix + self._ids(rng.choice((1, 8, 40, 90))),
            max_tokens=400 if rng.random() < 0.03 else rng.choice((1, 2, 10, 25, 25, 40, 120)),
            seed=rng.randrange(2**32) if rng.random() < 0.5 else None,
        )
        if rng.random() < 0.08:
            n = rng.choice((2, 2, 3, 8, 33, 64))
            spec = replace(spec, n=n, max_tokens=min(spec.max_tokens, 120 if n <= 3 else 10))
        spec = self._stopping(spec)
        if rng.random() < 0.1:
            spec = replace(spec, logprobs=rng.choice((0, 1, 20, 20)))
            if rng.random() < 0.5:
                spec = replace(spec, pause=rng.uniform(0.5, 3.0))
        return self._leaving(spec)

    def _leaving(self, spec: Spec) -> Spec:
        """Now and then with a client that cancels, or with a deadline."""
        rng, chosen = self._rng, self._rng.random()
        if chosen < self._cancels:
            return replace(spec, cancel_after=rng.uniform(0.0, 1.2))
        if chosen < self._cancels + self._deadlines:
            return replace(spec, timeout=rng.uniform(0.05, 3.0))
        return spec

    def _stopping(self, spec: Spec) -> Spec:
        """Now and then with a stop token, or with a stop string that its first choice comes to, beyond `min_tokens` or
        not."""
        rng, chosen = self._rng, self._rng.random()
        if chosen < 0.1:
            return replace(spec, stop_token=rng.choice(spec.expected(0).tokens))
        text = spec.expected(0).text if chosen < 0.2 else ""
        if not text:
            return spec
        at, min_tokens = rng.randrange(len(text)), rng.randrange(spec.max_tokens + 1)
        return replace(spec, stop=text[at : at + rng.choice((1, 2, 4, 8))], min_tokens=min_tokens)

    def plain(self, prompt: int, max_tokens: int) -> Spec:
        """A request that is neither cancelled nor late."""
        seed = self._rng.randrange(2**32) if self._rng.random() < 0.5 else None
        return Spec(prompt=self._ids(prompt), max_tokens=max_tokens, seed=seed)


class Load:
    """All requests of a run: an open loop, and whatever else is sent."""

    def __init__(self, clients: dict[str, AsyncClient], mix: Mix, rng: random.Random) -> None:
        self.clients, self.mix = clients, mix
        self.outcomes: list[Outcome] = []
        self.before: Callable[[Outcome], Awaitable[None]] | None = None
        self._rng = rng
        self._tasks: dict[asyncio.Task[None], Outcome] = {}

    def send(self, spec: Spec, router: str) -> Outcome:
        return self._tasks[self.start(spec, router)]

    def start(self, spec: Spec, router: str) -> asyncio.Task[None]:
        """Send one; the task is done when it has ended."""
        outcome = Outcome(spec, router, time.monotonic())
        task = asyncio.create_task(ask(self.clients[router], outcome))
        self.outcomes.append(outcome)
        self._tasks[task] = outcome
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        outcome = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            outcome.end, outcome.error = "untyped", f"the client raised {error!r}"

    async def open_loop(self, rate: float) -> None:
        """Send at random times, `rate` a second on average, to routers in turn; until cancelled."""
        names = list(self.clients)
        due = time.monotonic()
        while True:
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.send(self.mix.draw(), self._rng.choice(names))

    async def finish(self, bound: float) -> list[Outcome]:
        """Wait until all have ended; those that have not after `bound` seconds are hung, and returned."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=bound)
        late = dict(self._tasks)
        for task, outcome in late.items():
            outcome.end, outcome.error = "hung", f"no end {time.monotonic() - outcome.sent:.1f} s after it was sent"
            task.cancel()
        return list(late.values())

    def in_flight(self) -> list[Outcome]:
        return list(self._tasks.values())

    def counts(self) -> Counter[str]:
        return Counter(outcome.end for outcome in self.outcomes)
