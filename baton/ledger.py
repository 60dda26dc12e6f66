"""Account of the memory that a process holds. Pure: routers and clients import it too.

The ledger has every owner of memory or of a request's state. Each owner is a `LedgerEntry`; `baton ledger` and the
chaos suite read them through the Admin RPC. The invariant is: each page of a pool is free, cached, or its reference
count equals the number of owners listed. A `CacheReport` has the tiers of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One owner; see admin.proto for the meaning of the fields. `deadline_s` is None without a deadline."""

    owner: str
    kind: str
    state: str
    pages: int = 0
    bytes: int = 0
    age_s: float = 0.0
    deadline_s: float | None = None
    tenant: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All owners of one process; `violation` describes what is wrong with the sums, "" if nothing is.

    The degrees are those of a worker's ranks; a router has none, 0.
    """

    process: str
    role: str
    incarnation: str = ""
    entries: Sequence[LedgerEntry] = ()
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    violation: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0


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
    """The tiers of one process, nearest first; `role` is "router", "prefill", "decode" or "mixed"."""

    process: str
    role: str
    tiers: tuple[CacheTier, ...] = ()
