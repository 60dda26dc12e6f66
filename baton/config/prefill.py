"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.options import option
from baton.config.worker import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """Settings of one prefill worker.

    Raises ConfigError naming the field and the value seen.
    """

    chunk_size: int = option(0, help="Tokens in a chunk; 0: depends on prompt length and measured rate.", minimum=0)
    long_prompt_chunks: int = option(
        16,
        help="Chunks from which a prompt is long: its blocks go to Redis after each chunk, so that another worker can "
        "resume it; 0: never.",
        minimum=0,
        hidden=True,
    )
    max_waiting: int = option(
        64, help="Largest number of prompts that wait for their first chunk.", minimum=1, hidden=True
    )
    lease_s: float = option(
        10.0, help="Seconds for which finished KV is kept if nobody fetches it.", minimum=0.01, hidden=True
    )
    drain_s: float = option(
        30.0, help="Seconds that running prompts and fetches of finished KV get in a drain.", minimum=0
    )

    @property
    def cache_memory(self) -> int:
        """Bytes of host memory for cached prefixes: --host-memory, unless the pool has it."""
        return 0 if self.kv_home == "auto" else self.host_memory
