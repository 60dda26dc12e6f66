"""The Admin service: the ledger of a process and its prefix cache, and their messages. Translates only.

A worker serves it on its control listener, a router on the listener for clients. The function that builds a ledger
checks the sums of its pages, and describes the fault in `violation`. A router has no cached KV, but an index of
which worker has which prefix: this is its only tier, and can't be cleared.
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
"""Builds the ledger of a process as it is now; bounded in time."""

CacheSource: TypeAlias = Callable[[], Awaitable[Sequence[CacheTier]]]
"""The tiers of a process's prefix cache as they are now, nearest first; bounded in time."""

CacheClearer: TypeAlias = Callable[[bool], Awaitable[Sequence[CacheTier]]]
"""Drops all cached KV, in shared stores too if the argument is True; returns the dropped blocks and bytes by tier."""

_ENTRY_FIELDS = ("owner", "kind", "state", "pages", "bytes", "age_s", "deadline_s", "tenant", "detail")
_TIER_FIELDS = ("name", "blocks", "bytes", "capacity_bytes", "hits", "misses", "bytes_per_second", "state")
_LEDGER_FIELDS = ("process", "role", "incarnation", "pages_total", "pages_free", "pages_cached", "violation")


@dataclass(frozen=True, slots=True)
class AdminSources:
    """Sources of a process's answers, with its id and role; without `clear` it has nothing to clear."""

    process: str
    role: str
    ledger: LedgerSource
    cache: CacheSource
    clear: CacheClearer | None = None


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves ledger and cache to every caller that its listener accepts."""

    def __init__(self, sources: AdminSources) -> None:
        self._sources = sources

    async def Ledger(
        self, request: admin_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LedgerResponse:
        """The ledger now."""
        return ledger_to_proto(await self._sources.ledger())

    async def Cache(
        self, request: admin_pb2.CacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.CacheResponse:
        """The tiers now."""
        tiers = await self._sources.cache()
        return admin_pb2.CacheResponse(
            process=self._sources.process, role=self._sources.role, tiers=map(_tier_to_proto, tiers)
        )

    async def ClearCache(
        self, request: admin_pb2.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ClearCacheResponse:
        """Clear the tiers. Raises Unsupported if the process caches no KV."""
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
