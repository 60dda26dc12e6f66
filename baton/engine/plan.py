"""The plan of one forward pass, as plain data: a ModelRunner gets nothing else.

    Engine ── ForwardPlan ──▶ Executor ──▶ ModelRunner of each rank ── PlanResult ──▶ Engine

A ModelRunner knows slots, not requests. The page table, sampling parameters and tokens of a slot are sent once; each
plan begins with the changes since the plan before it: reset, slots that were left, slots that were joined, page tables
that grew. After a failed plan, the next one resets and joins every slot again, so nothing remains of the failed plan,
nor of those launched after it.

A plan has chunks, steps or both. A chunk brings its page table with it: it takes far longer than its table travels, and
a prompt has no slot. Fields hold numbers, tuples, arrays and dataclasses alone, so a plan can be sent to another
process. Page tables are arrays: those of long prompts have tens of thousands of entries.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from baton.engine.contract import ChunkResult
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
class Chunk:
    """Tokens of one prompt, at positions from `start` on; `pages` hold them and all before, in token order.

    A token is sampled after the last of them for each state of `sample`. With `prompt_logprobs`, log-probabilities of
    `successors`, each the token after its position, are reported, with so many alternatives.
    """

    token_ids: tuple[int, ...]
    start: int
    pages: array[int]
    sample: tuple[SequenceState, ...] = ()
    prompt_logprobs: int | None = None
    successors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The newest token of a slot, at `position`; the next token is sampled after it.

    The ModelRunner has that token: from the Join, or from what it sampled itself in the step before.
    """

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """See the module's text."""

    reset: bool = False
    left: tuple[int, ...] = ()
    joined: tuple[Join, ...] = ()
    grew: tuple[Growth, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The results of a plan: an entry for each of its chunks, and for each of its steps.

    A step has 0 or more tokens, or, as text, why none could be chosen.
    """

    chunks: tuple[ChunkResult, ...] = ()
    steps: tuple[tuple[TokenInfo, ...] | str, ...] = ()
