"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.config.options import option
from baton.config.worker import WorkerConfig
from baton.engine.config import EngineConfig
from baton.kv.format import KvCompression


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """Settings of one decode worker.

    It only writes to the prefix cache in Redis, and reads what its own pages hold. Raises ConfigError naming the field
    and the value seen.
    """

    slots: int = option(32, help="Most sequences in the generation batch.", minimum=1)
    reserve_tokens: int = option(
        256, help="New tokens of a choice that a reservation has pages for; beyond them it grows.", minimum=1
    )
    host_kv_memory: int = option(
        512 << 20, help="Host memory for the KV of sequences paused for want of pages.", unit="bytes"
    )
    convert_kv: bool = option(
        False, help="Accept KV of another element type and convert it; none is then left for later prompts."
    )
    kv_compression: str = option(
        "none",
        help="Fetch KV in a byte an element and accept the error; none of it is then left for later prompts.",
        choices=[each.value for each in KvCompression],
    )
    start_timeout_s: float = option(
        10.0, help="Seconds for which pages are held for a request that is not started.", minimum=0.01
    )
    fetch_timeout_s: float = option(
        600.0, help="Most seconds from a request's start until its KV is there.", minimum=0.01
    )
    fetch_stall_s: float = option(
        30.0, help="Seconds without a frame after which a KV transfer is given up.", minimum=0.01
    )
    drain_s: float = option(30.0, help="Seconds that running sequences have to finish at a drain.", minimum=0)

    @property
    def fetches_exact(self) -> bool:
        """Whether KV comes as it was computed, so that others may have it by its name: that of its element type too."""
        return self.kv_compression == KvCompression.NONE and not self.convert_kv

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings."""
        return replace(
            super().engine_config(),
            slots=self.slots,
            host_kv_memory=self.host_kv_memory,
        )
