"""The Kv service over a worker's exports. Translates, and checks tickets.

With a TicketVerifier every call needs a ticket, which is checked before anything is looked up. The service is
registered by hand and not through the generated stubs, because the frames of FetchKv are already bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from baton.errors import InvalidRequest, PermissionDenied, StaleIncarnation
from baton.pb import kv_pb2
from baton.request import check_id
from baton.rpc.tls import peer_principal
from baton.transfer.coverage import Box
from baton.transfer.export import Export
from baton.transfer.registry import ExportRegistry
from baton.transfer.source import FAULT_METADATA
from baton.transfer.tickets import RequestedBox, TicketVerifier, Use

SERVICE = "baton.v1.Kv"


class KvServicer:
    """Serves FetchKv and ReleaseKv; the server's interceptor turns errors into statuses.

    Without `tickets`, every caller that reaches the listener and knows a transfer id may fetch and release the export.
    """

    def __init__(self, exports: ExportRegistry, tickets: TicketVerifier | None = None) -> None:
        self._exports = exports
        self._tickets = tickets

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        handlers = {
            "FetchKv": grpc.unary_stream_rpc_method_handler(
                self.FetchKv, request_deserializer=kv_pb2.FetchKvRequest.FromString
            ),
            "ReleaseKv": grpc.unary_unary_rpc_method_handler(
                self.ReleaseKv,
                request_deserializer=kv_pb2.ReleaseKvRequest.FromString,
                response_serializer=kv_pb2.ReleaseKvResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def FetchKv(
        self, request: kv_pb2.FetchKvRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        """Stream encoded frames; the initial metadata is sent when the export is open."""
        self._check(request, context, use=(_requested_box(request), request.retry))
        try:
            export = await self._exports.find(request.transfer_id, request.incarnation)
        except StaleIncarnation as error:
            context.set_trailing_metadata(((FAULT_METADATA, type(error).__name__),))
            raise
        box = _box(request, export)
        await context.send_initial_metadata(())
        async with aclosing(export.frames(box)) as frames:
            async for frame in frames:
                yield frame

    async def ReleaseKv(
        self, request: kv_pb2.ReleaseKvRequest, context: grpc.aio.ServicerContext
    ) -> kv_pb2.ReleaseKvResponse:
        """End the export."""
        self._check(request, context)
        self._exports.release(request.transfer_id, request.incarnation)
        return kv_pb2.ReleaseKvResponse()

    def _check(self, request: Any, context: grpc.aio.ServicerContext, use: Use | None = None) -> None:
        """Raise PermissionDenied without a ticket for this call, and for this `use` if given. Then check the ids.

        Raises InvalidRequest for an id that no export can have.
        """
        if self._tickets is not None:
            self._check_ticket(self._tickets, request, context, use)
        check_id("transfer_id", request.transfer_id)
        check_id("incarnation", request.incarnation, optional=True)

    def _check_ticket(
        self, tickets: TicketVerifier, request: Any, context: grpc.aio.ServicerContext, use: Use | None
    ) -> None:
        ticket = tickets.check(
            request.ticket,
            transfer_id=request.transfer_id,
            incarnation=request.incarnation,
            consumer=request.consumer,
        )
        if _uses_tls(context) and (peer := peer_principal(context)) != ticket.consumer:
            raise PermissionDenied(f"ticket: is for another consumer than the caller, {peer or 'which has no name'}")
        if use is not None:
            tickets.redeem(ticket, *use)


def _uses_tls(context: grpc.aio.ServicerContext) -> bool:
    """Whether the call came over TLS."""
    return bytes(next(iter(context.auth_context().get("transport_security_type", ())), b"")) == b"ssl"


def _requested_box(request: kv_pb2.FetchKvRequest) -> RequestedBox:
    return (
        request.token_start,
        request.token_end,
        request.layer_start,
        request.layer_end,
        request.head_start,
        request.head_end,
    )


def _box(request: kv_pb2.FetchKvRequest, export: Export) -> Box:
    kv_format = export.kv_format
    return Box(
        _span("token", request.token_start, request.token_end, export.tokens),
        _span("layer", request.layer_start, request.layer_end, kv_format.layers, least=1),
        _span("head", request.head_start, request.head_end, kv_format.heads, least=1),
    )


def _span(name: str, start: int, end: int, limit: int, least: int = 0) -> range:
    """The range `[start, end)` of a request; an `end` of 0 means `limit`."""
    end = end or limit
    if end > limit:
        raise InvalidRequest(f"{name}_end", f"must be at most {limit}", end)
    if start + least > end:
        raise InvalidRequest(f"{name}_start", f"must be in [0, {end - least}]", start)
    return range(start, end)
