"""What decode workers tell routers of an attempt, in plain types; see decode.proto. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.request import FinishReason, TokenInfo


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answers a reservation; `never` when the request can't fit even an empty worker, `retry_after_s` 0 when unknown.

    The KV of the context's first `cached_tokens` is at the worker, and stays there. `room_tokens` are the largest
    context that another request could have now, where this one was refused for want of pages.
    """

    granted: bool
    reason: str = ""
    never: bool = False
    retry_after_s: float = 0.0
    cached_tokens: int = 0
    room_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Durations on decode's clock, in milliseconds: from Start to commit, from commit to slot."""

    fetch_ms: float
    slot_wait_ms: float


@dataclass(slots=True)
class Output:
    """Tokens of one choice; `output_index` is that of the first, `finish` belongs to the last.

    `timings` come with a choice's first. One is made for every token, and a frozen one would take three times as long.
    """

    choice_index: int
    output_index: int
    tokens: Sequence[TokenInfo]
    finish: FinishReason | None = None
    timings: DecodeTimings | None = None
