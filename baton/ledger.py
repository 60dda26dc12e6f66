"""The ledger: every owner of memory or of a request's state in one process. Pure.

Each owner is a `LedgerEntry`; `baton ledger` and the chaos suite read them through the Admin RPC. The invariant is:
each page of a pool is free, cached, or its reference count equals the number of owners listed.
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
    """All owners of one process; `violation` describes what is wrong with the sums, "" if nothing is."""

    process: str
    role: str
    incarnation: str = ""
    entries: Sequence[LedgerEntry] = ()
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    violation: str = ""
