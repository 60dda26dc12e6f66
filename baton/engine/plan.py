"""The plan of one forward pass, the only input of a ModelRunner. It is plain data.

    Engine ── ForwardPlan ──▶ Executor ──▶ ModelRunner of each rank ── PlanResult ──▶ Engine

A ModelRunner knows slots, not requests. It gets the page table, sampling parameters and tokens of a slot once. Each
plan with a step begins with the changes since the plan before: a reset, slots that were left, slots that were joined,
page tables that grew. After a failed step, the next one resets the ModelRunner and joins every sequence again. So
nothing remains of the failed plan and of the plans launched after it. A plan without a step changes no slot.

A plan has rows. Each row has new tokens of one sequence: a chunk of a prompt, or the newest token of a slot. One
forward pass takes any mixture of rows. The row of a prompt contains its page table, because a prompt has no slot. All
fields are numbers, tuples, arrays and dataclasses, so that a plan can be sent to another process. Page tables are
arrays, because long prompts have tens of thousands of pages.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from baton.request import SequenceState, TokenInfo


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence that takes an empty slot, with its pages in the order of its tokens, its parameters and its tokens.

    The pages have the KV of all tokens except the last one, which is the input of the next step.
    """

    slot: int
    pages: array[int]
    state: SequenceState


@dataclass(frozen=True, slots=True)
class Growth:
    """New pages of a slot; they follow the pages that it has."""

    slot: int
    pages: array[int]


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Inputs of a prompt's row.

    `token_ids` are the new tokens. `pages` are the pages of all tokens up to the last new one, in the order of the
    tokens. One token is sampled for each state of `sample`. `successors` has the token after each new token, as far as
    it is known; if `prompt_logprobs` is not None, the log-probability of each successor is computed, with that many
    alternatives.
    """

    token_ids: tuple[int, ...]
    pages: array[int]
    sample: tuple[SequenceState, ...] = ()
    prompt_logprobs: int | None = None
    successors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """`count` new tokens of one sequence, at positions from `start` on.

    `source` is a prompt or the number of a slot. The ModelRunner has the new token of a slot already: from its Join, or
    because it has sampled it in the step before. A token is sampled after each new token whose index is in `sampled`.
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
    """Changes of slots, and the rows of one forward pass: rows of prompts, then none or one for each taken slot."""

    reset: bool = False
    left: tuple[int, ...] = ()
    joined: tuple[Join, ...] = ()
    grew: tuple[Growth, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row: the sampled `tokens`, or a `problem` that says why none could be chosen.

    `prompt_logprobs` has each successor of a prompt's row, with its log-probability.
    """

    tokens: tuple[TokenInfo, ...] = ()
    prompt_logprobs: tuple[TokenInfo, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The results of a plan's rows, in the order of the rows."""

    rows: tuple[RowResult, ...] = ()
