"""The Admin service: the ledger of a process, in messages and back. Translates only.

A worker serves it on its control listener, a router beside Inference. Whoever supplies the ledger checks the
sums of its pages while making it, and says in `violation` what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc

from baton.ledger import Ledger, LedgerEntry
from baton.pb import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = "baton.v1.Admin"

LedgerSource: TypeAlias = Callable[[], Awaitable[Ledger]]
"""Makes the ledger of a process as it is now; bounded in time."""

_ENTRY_FIELDS = ("owner", "kind", "state", "pages", "bytes", "age_s", "deadline_s", "tenant", "detail")
_LEDGER_FIELDS = ("process", "role", "incarnation", "pages_total", "pages_free", "pages_cached", "violation")


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves the ledger to whoever reaches it; listeners decide who that is."""

    def __init__(self, ledger: LedgerSource) -> None:
        self._ledger = ledger

    async def Ledger(
        self, request: admin_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LedgerResponse:
        """The ledger now."""
        return ledger_to_proto(await self._ledger())


def add_admin(server: grpc.aio.Server, ledger: LedgerSource) -> None:
    """Register the service; ADMIN_SERVICE is its name for health and reflection."""
    admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(ledger), server)


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
