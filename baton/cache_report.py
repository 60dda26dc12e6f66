"""A process's report of its prefix cache, by tier. Pure: routers and clients import it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheTier:
    """The statistics of a tier; see admin.proto for the meaning of the fields."""

    name: str
    blocks: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_per_second: float = 0.0
    state: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The tiers of one process, nearest first; `role` is "router", "prefill" or "decode"."""

    process: str
    role: str
    tiers: tuple[CacheTier, ...] = ()
