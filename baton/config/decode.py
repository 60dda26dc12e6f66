"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.config.options import option
from baton.config.worker import WorkerConfig
from baton.engine.config import EngineConfig
from baton.lifecycle import PREFILL_TOKEN_S


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of one decode worker.

    A decode worker reads cached prefixes from its own pages only, and writes new ones to Redis. Raises ConfigError
    naming the field and the value seen.
    """

    slots: int = option(32, help="Largest number of sequences in the generation batch.", minimum=1)
    reserve_tokens: int = option(
        256,
        help="New tokens of a choice that a reservation has pages for; longer outputs get more pages later.",
        minimum=1,
    )
    convert_kv: bool = option(
        False, help="Accept KV of another element type and convert it; decode then caches none of it."
    )
    start_timeout_s: float = option(
        10.0, help="Seconds for which pages are reserved for a request that has not started.", minimum=0.01, hidden=True
    )
    fetch_timeout_s: float = option(
        600.0,
        help="Longest time in seconds from a request's start until all its KV has arrived, with its prefill; 0.1 s "
        "more for each token of its context.",
        minimum=0.01,
        hidden=True,
    )
    fetch_stall_s: float = option(
        30.0,
        help="Seconds without a frame after which a KV transfer fails. An open export sends one each second.",
        minimum=0.01,
        hidden=True,
    )
    drain_s: float = option(30.0, help="Seconds that running sequences get to finish in a drain.", minimum=0)

    def fetch_limit_s(self, context_tokens: int) -> float:
        """Longest time in seconds that the KV of a context may take to arrive; a long prompt's prefill takes longer."""
        return self.fetch_timeout_s + PREFILL_TOKEN_S * context_tokens

    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return replace(super().engine_config(), slots=self.slots)
