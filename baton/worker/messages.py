"""Messages of decode workers to routers about an attempt, as plain types of decode.proto. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.request import FinishReason, TokenInfo


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """The answer to a reservation; `never` if the request does not even fit an empty worker.

    `retry_after_s` is 0 if unknown. The worker has the KV of the first `cached_tokens` tokens of the context, and keeps
    it. If pages were missing, `room_tokens` is the largest context that another request could reserve now.
    """

    granted: bool
    reason: str = ""
    never: bool = False
    retry_after_s: float = 0.0
    cached_tokens: int = 0
    room_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Durations on decode's clock, in milliseconds: from Start to commit, and from commit to slot."""

    fetch_ms: float
    slot_wait_ms: float


@dataclass(slots=True)
class Output:
    """Tokens of one choice; `output_index` is the index of the first token; `finish` is set if the last token ends it.

    `timings` come with the first output of a choice. An Output is made for every token, so it is not frozen: a frozen
    dataclass takes three times as long to make.
    """

    choice_index: int
    output_index: int
    tokens: Sequence[TokenInfo]
    finish: FinishReason | None = None
    timings: DecodeTimings | None = None
