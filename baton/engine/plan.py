"""The plan of one forward pass, as plain data: a ModelRunner gets nothing else.

    Engine ── ForwardPlan ──▶ Executor ──▶ ModelRunner of each rank ── PlanResult ──▶ Engine

A ModelRunner knows slots, not requests. The page table, sampling parameters and tokens of a slot are sent once; each
plan of the batch begins with the changes since the one before it: reset, slots that were left, slots that were joined,
page tables that grew. After a failed plan, the next one resets and joins every slot again, so nothing remains of the
failed plan, nor of those launched after it.

A plan has rows: new tokens of one sequence each. A row of many tokens is a chunk of a prompt, one of a single token a
step; any mixture is one forward pass. A prompt's row brings its page table with it: it takes far longer than its table
travels, and a prompt has no slot. Fields hold numbers, tuples, arrays and dataclasses alone, so a plan can be sent to
another process. Page tables are arrays: those of long prompts have tens of thousands of entries.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from baton.request import SequenceState, TokenInfo


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence takes the empty `slot`: its `pages` in token order, and its parameters and tokens so far.

    KV of all tokens but the last is in the pages; the next step takes the last one.
    """

    slot: int
    pages: array[int]
    state: SequenceState


@dataclass(frozen=True, slots=True)
class Growth:
    """`pages` follow those that `slot` has."""

    slot: int
    pages: array[int]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Inputs of a prompt's row: its new tokens, and `pages` of these and all before, in token order.

    A token is sampled for each state of `sample`. With `prompt_logprobs`, log-probabilities of `successors`, each the
    token after the position of a new token, are reported, with so many alternatives.
    """

    token_ids: tuple[int, ...]
    pages: array[int]
    sample: tuple[SequenceState, ...] = ()
    prompt_logprobs: int | None = None
    successors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """`count` new tokens of one sequence, a prompt or the sequence of a slot, at positions from `start` on.

    Tokens are sampled after those that `sampled` names, by their place among the new ones. The ModelRunner has the new
    token of a slot: from the Join, or from what it sampled itself in the step before.
    """

    source: int | PromptInput
    start: int
    count: int = 1
    sampled: tuple[int, ...] = (0,)

    @property
    def positions(self) -> range:
        """Positions of the new tokens."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Rows of one forward pass. If there are rows of slots, there is one for each slot that is taken."""

    reset: bool = False
    left: tuple[int, ...] = ()
    joined: tuple[Join, ...] = ()
    grew: tuple[Growth, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row: 0 or more `tokens`, or why none could be chosen (`problem`).

    `prompt_logprobs`: each successor of a prompt's row, with its log-probability.
    """

    tokens: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The results of a plan's rows, in their order."""

    rows: tuple[RowResult, ...] = ()
