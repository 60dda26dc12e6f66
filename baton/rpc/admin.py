"""The Admin service, which shows the ledger and the prefix cache of a process; it only translates messages.

A worker serves it on its control listener, a router on its listener for clients. The function that builds a ledger
checks the sums of its pages, and describes any fault in `violation`. A router caches no KV: its only tier is the index
of the prefixes that workers hold, which can't be cleared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from baton.errors import Unsupported
from baton.ledger import CacheReport, CacheTier, Ledger, LedgerEntry
from baton.pb import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

LedgerSource: TypeAlias = Callable[[], Awaitable[Ledger]]
"""A function that returns the current ledger of a process, within a time limit."""

CacheSource: TypeAlias = Callable[[], Awaitable[Sequence[CacheTier]]]
"""A function that returns the current tiers of a process's prefix cache, nearest first, within a time limit."""

CacheClearer: TypeAlias = Callable[[bool], Awaitable[Sequence[CacheTier]]]
"""A function that deletes all cached KV, in shared stores too if the argument is True.

It returns the deleted blocks and bytes of each tier.
"""

_ENTRY_FIELDS = ("owner", "kind", "state", "pages", "bytes", "age_s", "deadline_s", "tenant", "detail")
_TIER_FIELDS = ("name", "blocks", "bytes", "capacity_bytes", "hits", "misses", "bytes_per_second", "state")
_LEDGER_FIELDS = (
    *("process", "role", "incarnation", "pages_total", "pages_free", "pages_cached", "violation"),
    *("tensor_parallel", "pipeline_parallel"),
)


@dataclass(frozen=True, slots=True)
class AdminSources:
    """The id and role of a process, and the functions for its answers; `clear` is None if it caches no KV."""

    process: str
    role: str
    ledger: LedgerSource
    cache: CacheSource
    clear: CacheClearer | None = None


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves ledger and cache to all callers that its listener accepts."""

    def __init__(self, sources: AdminSources) -> None:
        self._sources = sources

    async def Ledger(
        self, request: admin_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LedgerResponse:
        """The current ledger."""
        return ledger_to_proto(await self._sources.ledger())

    async def Cache(
        self, request: admin_pb2.CacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.CacheResponse:
        """The current tiers of the prefix cache."""
        tiers = await self._sources.cache()
        return admin_pb2.CacheResponse(
            process=self._sources.process, role=self._sources.role, tiers=map(_tier_to_proto, tiers)
        )

    async def ClearCache(
        self, request: admin_pb2.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ClearCacheResponse:
        """Delete all cached KV. Raises Unsupported if the process caches none."""
        if self._sources.clear is None:
            role, process = self._sources.role, self._sources.process
            raise Unsupported(f"{role} {process} caches no KV, only its workers do")
        return admin_pb2.ClearCacheResponse(dropped=map(_tier_to_proto, await self._sources.clear(request.redis)))


def add_admin(server: grpc.aio.Server, sources: AdminSources) -> None:
    """Register the service; ADMIN_SERVICE is its name for health and reflection."""
    admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(sources), server)


def cache_from_proto(message: admin_pb2.CacheResponse) -> CacheReport:
    """The report in a message."""
    return CacheReport(message.process, message.role, tiers_from_proto(message.tiers))


def tiers_from_proto(messages: Iterable[admin_pb2.CacheTier]) -> tuple[CacheTier, ...]:
    """The tiers in messages."""
    return tuple(CacheTier(**{name: getattr(message, name) for name in _TIER_FIELDS}) for message in messages)


def ledger_to_proto(ledger: Ledger) -> admin_pb2.LedgerResponse:
    """A ledger as its message."""
    return admin_pb2.LedgerResponse(
        entries=[
            admin_pb2.LedgerEntry(**{name: getattr(entry, name) for name in _ENTRY_FIELDS}) for entry in ledger.entries
        ],
        **{name: getattr(ledger, name) for name in _LEDGER_FIELDS},
    )


def ledger_from_proto(message: admin_pb2.LedgerResponse) -> Ledger:
    """The ledger in a message."""
    return Ledger(
        entries=tuple(map(_entry_from_proto, message.entries)),
        **{name: getattr(message, name) for name in _LEDGER_FIELDS},
    )


def _entry_from_proto(message: admin_pb2.LedgerEntry) -> LedgerEntry:
    values = {name: getattr(message, name) for name in _ENTRY_FIELDS}
    if not message.HasField("deadline_s"):
        values["deadline_s"] = None
    return LedgerEntry(**values)


def _tier_to_proto(tier: CacheTier) -> admin_pb2.CacheTier:
    return admin_pb2.CacheTier(**{name: getattr(tier, name) for name in _TIER_FIELDS})
