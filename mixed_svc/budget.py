"""The part of a pass that prompts may use, from measured times. Pure; engine thread only.

    pass of a step and prompts = seconds of the step alone + overhead + prompt tokens / rate

The seconds of a step alone are measured by the size of the batch, in classes of powers of two. The rate of prompt
tokens is measured in passes that also have a step, and apart from it in passes without one. Both may change with time,
so old passes count less. While prompts wait, no step is alone; so every MEASURE_EVERY passes one is, and at once while
fewer than three are known of batches of this size. The middle one of the last three counts, since one slow step must
not make the next passes long. A wrong rate must not make them long at once, so the number of prompt tokens grows from
pass to pass by at most a factor.

The overhead does not depend on the number of prompt tokens. On a GPU it may be many times a step alone, which is one
CUDA graph; on a CPU it is about 0. It is measured in small passes, which have few prompt tokens; every MEASURE_EVERY
passes one does. The least of the last three counts, for the same reason.

Tokens of a prompt that is far take longer than others, by a factor that grows with the prompt. So each such prompt has
a rate of its own, and the rate of all others is measured without them.

The target of a pass is the time between two tokens of a sequence. If none is set, it is DEFAULT_MULTIPLE times a step
alone, and more if ROW_TOKENS prompt tokens for each sequence take longer. So many let new requests begin about as fast
as old ones end; with less, requests would wait long for their first tokens, although the rate of all is the same. The
prompt tokens may also take as long as the step and the overhead together; so overhead is at most half of a long queue.
At least one prompt token for each sequence is computed, so that prompts never stop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.rates import UNKNOWN_PREFILL_RATE, DecayingRate

DEFAULT_MULTIPLE = 3.5
"""Default target of a pass, in times of a step alone. Smaller ones cost much of the rate, and larger ones add little
to it (`bench/results/passes.json`)."""
ROW_TOKENS = 8
"""Prompt tokens for each sequence of the batch that a pass has time for, if no target is set."""
MEASURE_EVERY = 64
"""Number of passes with prompts after which one pass has none, to measure a step alone, and one is small."""
ALONE_S = 0.25
"""Seconds of a pass without a step. A sequence that becomes ready meanwhile waits for the end of the pass."""
ALONE_TOKENS = 64
"""Smallest number of tokens of a pass without a step; shorter passes use a processor badly."""

_LATEST = 3
"""Number of latest measurements that count: of steps alone, and of small passes."""
_LEAST_SHARE = 0.5
"""Smallest time of the prompts in a mixed pass, as a part of their share of its rows. The time of a step alone is
measured in other passes, and may have been longer by chance."""
_GROWTH, _SHRINKAGE = 2.0, 0.9
"""A mixed pass has at most _GROWTH times the prompt tokens of a recent one; each pass lowers that limit."""
_SMALL = 1 / 16
"""Largest number of tokens of a small pass, as a part of the limit from _GROWTH."""
_STILL_SMALL = _SMALL / _SHRINKAGE**2
"""The same when the pass is read: the limit may have fallen twice since its launch, if passes are launched ahead."""


class Part(Protocol):
    """A prompt, for `next_rows`: its next token, its end, its own rate in tokens/s or 0, and limits of a chunk."""

    @property
    def position(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def is_far(self) -> bool: ...
    @property
    def most(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Budget:
    """Prompt tokens that a pass may have: those that take `seconds`, but at least `least` and at most `most` tokens.

    `rate` is that of prompts that are not far, in tokens/s.
    """

    seconds: float
    rate: float
    least: int
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds that a prompt token took in a pass: one of a prompt that was not far, and one of a prompt that was."""

    near: float
    far: float


class PassBudget:
    """Decides how many prompt tokens a pass may have; `target_s` is 0 if no target is set."""

    def __init__(self, target_s: float = 0.0) -> None:
        self._target_s = target_s
        self._alone: dict[int, deque[float]] = {}
        self._mixed_rate, self._prompt_rate = DecayingRate(), DecayingRate()
        self._since_alone = 0
        # A rate must be known first.
        self._until_small = MEASURE_EVERY // 4
        self._most_tokens = float(ALONE_TOKENS)
        self._small = deque[tuple[int, float]](maxlen=_LATEST)
        """Prompt tokens of the last small or very short passes, and the seconds that they took beyond a step alone."""

    @property
    def _rate(self) -> float:
        return self._mixed_rate.value or self._prompt_rate.value or UNKNOWN_PREFILL_RATE

    @property
    def _overhead(self) -> float:
        """Seconds; 0 while unknown."""
        if len(self._small) < _LATEST:
            return 0.0
        return max(min(seconds - tokens / self._rate for tokens, seconds in self._small), 0.0)

    def step_alone(self, running: int) -> float:
        """Seconds of a step of `running` sequences without prompts; 0 while unknown."""
        known = self._alone.get(_size_class(running), ())
        return sorted(known)[_LATEST // 2] if len(known) == _LATEST else 0.0

    def next(self, running: int) -> Budget | None:
        """The budget of the next pass, which has a step of `running` sequences; None if it must have no prompts."""
        if not running:
            return Budget(ALONE_S, self._prompt_rate.value or UNKNOWN_PREFILL_RATE, ALONE_TOKENS)
        alone = self.step_alone(running)
        if not alone or self._since_alone >= MEASURE_EVERY:
            return None
        rate, fixed = self._rate, alone + self._overhead
        if self._until_small <= 0:
            return Budget(0.0, rate, running, _SMALL * self._most_tokens)
        by_default = max(DEFAULT_MULTIPLE * alone - fixed, ROW_TOKENS * running / rate, fixed)
        seconds = self._target_s - fixed if self._target_s else by_default
        return Budget(seconds, rate, running, max(self._most_tokens, running))

    def record(self, near: int, far: int, running: int, seconds: float) -> TokenSeconds:
        """Record a pass with a step of `running` sequences, and so many tokens of prompts that are near and far."""
        if not running:
            return _split(near, far, seconds, self._prompt_rate)
        if not (tokens := near + far):
            self._alone.setdefault(_size_class(running), deque(maxlen=_LATEST)).append(seconds)
            self._since_alone = 0
            return TokenSeconds(0.0, 0.0)
        self._since_alone += 1
        self._until_small -= 1
        alone, is_small = self.step_alone(running), tokens <= _STILL_SMALL * self._most_tokens
        if (is_small and not far) or seconds - alone < self._overhead:
            self._small.append((tokens, seconds - alone))
        if is_small and (far or len(self._small) == _LATEST):
            self._until_small = MEASURE_EVERY
        self._most_tokens = max(_GROWTH * tokens, _SHRINKAGE * self._most_tokens, ALONE_TOKENS)
        seconds -= self._overhead
        own = max(seconds - alone, _LEAST_SHARE * seconds * tokens / (tokens + running))
        return _split(near, far, own, DecayingRate() if is_small else self._mixed_rate)


def next_rows(parts: Iterable[Part], budget: Budget) -> list[tuple[int, int]]:
    """The rows of prompts in a pass, in the order of `parts`: the index of the prompt, and the end of its tokens.

    A prompt that is far has its own rate, because attention to the past is most of its time; while that is unknown, it
    gets the least number of tokens. A prompt gets at most `most` tokens.
    """
    rows, seconds, least, most = list[tuple[int, int]](), budget.seconds, budget.least, budget.most
    for index, part in enumerate(parts):
        rate = part.rate if part.is_far else budget.rate
        count = int(min(part.total - part.position, part.most, max(seconds * rate, least), most))
        if count > 0:
            rows.append((index, part.position + count))
            seconds -= count / (rate or budget.rate)
            least, most = least - count, most - count
        elif not part.is_far:
            break
    return rows


def _split(near: int, far: int, seconds: float, near_rate: DecayingRate) -> TokenSeconds:
    """Divide the seconds of a pass between its prompt tokens, and add those of the near ones to their rate.

    Near tokens take the time that their rate says, and the far ones take the rest. A far token takes no less than a
    near one.
    """
    tokens, rate = near + far, near_rate.value
    near_s = seconds * near / tokens if tokens else 0.0
    if near and far and rate:
        near_s = min(near_s, near / rate)
    if near:
        near_rate.add(near, near_s)
    return TokenSeconds(near_s / near if near else 0.0, (seconds - near_s) / far if far else 0.0)


def _size_class(running: int) -> int:
    return (running - 1).bit_length()
