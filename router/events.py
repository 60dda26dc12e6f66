"""What happens to an attempt, in plain Python, wherever it comes from.

Prefill call and decode session deliver into the attempt's one inbox, so the pipeline reads them in order of arrival
and need not care which of the two was first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.request import CachedTokens, FirstToken, TokenInfo
from baton.worker.messages import Output
from router.workers.losses import WorkerLoss


class Blame(enum.Enum):
    """Which part of an attempt a fault lies in."""

    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"


class Cause(enum.Enum):
    """What kind of failure it was; only a fault is held against whom it lies in."""

    FAULT = "fault"
    LOST = "lost"
    """The connection with the worker was lost: its watch or session broke or fell silent, or the worker said that it
    makes no progress. Whether the worker died is seen later."""
    DRAIN = "drain"
    PREEMPTED = "preempted"
    """The worker ran out of memory for the sequence; nothing is wrong with it."""
    REFUSED = "refused"
    """The worker was full."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill is done; `prompt_tokens` carry prompt log-probabilities, if they were asked for.

    `cached_tokens` were not computed, and `cached` tells where they came from.
    """

    first_tokens: tuple[FirstToken, ...]
    cached_tokens: int
    prompt_tokens: tuple[TokenInfo, ...] = ()
    cached: CachedTokens = field(default_factory=CachedTokens)


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt can't go on."""

    error: BatonError
    blame: Blame
    cause: Cause = Cause.FAULT
    loss: WorkerLoss | None = None
    """The lost connection, if the request is one of its suspects."""


Event = Prefilled | Output | Failed
Deliver = Callable[[Event], None]
