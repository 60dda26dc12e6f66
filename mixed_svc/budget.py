"""The part of a pass that prompts may use, from measured times. Pure; engine thread only.

    pass of a step and prompts = seconds of the step alone + prompt tokens / rate

The seconds of a step alone are measured by the size of the batch, in classes of powers of two. The rate of prompt
tokens is measured in passes that also have a step, and apart from it in passes without one. Both may change with time,
so old passes count less. While prompts wait, no step is alone; so every MEASURE_EVERY passes one is, and at once if
nothing is known of batches of this size.

The target of a pass is the time between two tokens of a sequence. If none is set, it is DEFAULT_MULTIPLE times a step
alone, and more if that leaves less than ROW_TOKENS prompt tokens for each sequence of the batch. That many keep
waiting prompts in most of each pass, so that new requests begin as fast as old ones end. If a target is set, at least
one prompt token for each sequence is computed, so that prompts never stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.rates import UNKNOWN_PREFILL_RATE, DecayingAverage, DecayingRate

DEFAULT_MULTIPLE = 3.0
"""Default target of a pass, in times of a step alone."""
ROW_TOKENS = 8
"""Smallest number of prompt tokens for each sequence of the batch, if no target is set."""
MEASURE_EVERY = 64
"""Number of passes with prompts after which one pass has none, to measure a step alone."""
ALONE_S = 0.25
"""Seconds of a pass without a step. A sequence that becomes ready meanwhile waits for the end of the pass."""
ALONE_TOKENS = 64
"""Smallest number of tokens of a pass without a step; shorter passes use a processor badly."""

_WEIGHT = 0.25
_LEAST_SHARE = 0.1
"""Smallest part of a mixed pass that counts as time of its prompts: a step alone may have been slower by chance."""


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
    """Prompt tokens that a pass may have: those that take `seconds` at `rate` tokens/s, but at least `least`."""

    seconds: float
    rate: float
    least: int


class PassBudget:
    """Decides how many prompt tokens a pass may have; `target_s` is 0 if no target is set."""

    def __init__(self, target_s: float = 0.0) -> None:
        self._target_s = target_s
        self._alone: dict[int, DecayingAverage] = {}
        self._mixed_rate, self._prompt_rate = DecayingRate(), DecayingRate()
        self._since_alone = 0

    def step_alone(self, running: int) -> float:
        """Seconds of a step of `running` sequences without prompts; 0 while unknown."""
        known = self._alone.get(_size_class(running))
        return known.value if known is not None else 0.0

    def next(self, running: int) -> Budget | None:
        """The budget of the next pass, which has a step of `running` sequences; None if it must have no prompts."""
        if not running:
            return Budget(ALONE_S, self._prompt_rate.value or UNKNOWN_PREFILL_RATE, ALONE_TOKENS)
        alone = self.step_alone(running)
        if not alone or self._since_alone >= MEASURE_EVERY:
            return None
        rate = self._mixed_rate.value or self._prompt_rate.value or UNKNOWN_PREFILL_RATE
        if self._target_s:
            return Budget(self._target_s - alone, rate, running)
        return Budget((DEFAULT_MULTIPLE - 1) * alone, rate, ROW_TOKENS * running)

    def record(self, tokens: int, running: int, seconds: float) -> float:
        """Record a pass; returns the seconds of it that its `tokens` prompt tokens took."""
        if not running:
            self._prompt_rate.add(tokens, seconds)
            return seconds
        if not tokens:
            self._alone.setdefault(_size_class(running), DecayingAverage(_WEIGHT)).add(seconds)
            self._since_alone = 0
            return 0.0
        self._since_alone += 1
        own = max(seconds - self.step_alone(running), _LEAST_SHARE * seconds)
        self._mixed_rate.add(tokens, own)
        return own


def next_rows(parts: Iterable[Part], budget: Budget) -> list[tuple[int, int]]:
    """The rows of prompts in a pass, in the order of `parts`: the index of the prompt, and the end of its tokens.

    A prompt that is far has its own rate, because attention to the past is most of its time; while that is unknown, it
    gets the least number of tokens. A prompt gets at most `most` tokens.
    """
    rows, seconds, least = list[tuple[int, int]](), budget.seconds, budget.least
    for index, part in enumerate(parts):
        rate = part.rate if part.is_far else budget.rate
        count = min(part.total - part.position, part.most, max(int(seconds * rate), least))
        if count <= 0:
            break
        rows.append((index, part.position + count))
        seconds -= count / (rate or budget.rate)
        least -= count
    return rows


def _size_class(running: int) -> int:
    return (running - 1).bit_length()
