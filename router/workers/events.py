"""Events of an attempt, from its two workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.request import Output, Prefilled, PrefillProgress, PromptLogprobs
from router.workers.failures import FailureEvent


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The attempt has ended at the decode worker without a fault, and holds nothing there."""


Event = PrefillProgress | PromptLogprobs | Prefilled | Output | DecodeEnded | FailureEvent
Deliver = Callable[[Event], None]
