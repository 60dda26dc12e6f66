"""Requests that wait for workers, and the refusals of decode workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.lifecycle import Lifecycle
from baton.request import CachePolicy
from router.placement.prefix_directory import Digests
from router.workers.failures import AvoidedWorker


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The request of one attempt for workers.

    `is_retry` is set for an attempt that goes before new requests, because its request was accepted before;
    `needs_decode` if the attempt needs a decode worker; `isolated` if it gets workers for itself (`router/isolation.py`
    says which). The state of `lifecycle` changes from QUEUED to RESERVING when decode workers are asked, and back when
    all refuse.
    `digests` are the hashes of the context's blocks, and are empty for a request that must not read the prefix cache.
    """

    request_id: str
    attempt_number: int
    tenant: str
    lifecycle: Lifecycle
    context_tokens: int
    max_new_tokens: int
    choices: tuple[int, ...]
    is_retry: bool
    needs_decode: bool = True
    isolated: bool = False
    digests: Digests = field(default_factory=dict)
    salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    avoided_workers: frozenset[AvoidedWorker] = frozenset()
    """Workers that failed the request in earlier attempts."""
    avoided_pairs: frozenset[tuple[str, str]] = frozenset()
    """Addresses of (prefill, decode) pairs that failed it."""

    @property
    def deadline(self) -> float:
        """The deadline of the request, in seconds on the event loop's clock; infinite if it has none."""
        return self.lifecycle.request_deadline


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer of decode workers when all of them refuse a request; `retry_after_s` is infinite if they gave no time.

    `too_small_reasons` has the reason of each decode worker that can never hold the request, by address.
    """

    too_small_reasons: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float = math.inf
    reservable_tokens: int = 0
    """The largest context, in tokens, for which another request could get pages now."""
    excluded_workers: frozenset[str] = frozenset()
    """Addresses of decode workers that are in the fleet, but that the request could not use."""
    refused_for_choices: bool = False
    """Whether workers have room for the context, but not for all choices."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in the queue, which it joined at `queued_at`, in seconds on the caller's clock."""

    request: PlacementRequest
    queued_at: float
    refusal: Refusal = field(default_factory=Refusal)
    """The latest refusal."""
    turn_epoch: int = 0
    """The epoch (`RefusalGate.fleet_epoch`) in which its latest turn began."""
    overtook_head_of_line: bool = False
    """Whether its latest turn began while the head of line had to wait for the next epoch."""
