"""The Kv service over a worker's exports; it translates only.

Registered by hand instead of through the generated stubs, because FetchKv's frames are bytes already.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from baton.errors import InvalidRequest, StaleIncarnation
from baton.pb import kv_pb2
from baton.transfer.coverage import Box
from baton.transfer.export import Export
from baton.transfer.exports import Exports
from baton.transfer.source import FAULT_METADATA

SERVICE = "baton.v1.Kv"


class KvServicer:
    """Serves FetchKv, RenewLease and ReleaseKv; the server's interceptor turns errors into statuses."""

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        handlers = {
            "FetchKv": grpc.unary_stream_rpc_method_handler(
                self.FetchKv, request_deserializer=kv_pb2.FetchKvRequest.FromString
            ),
            "RenewLease": grpc.unary_unary_rpc_method_handler(
                self.RenewLease,
                request_deserializer=kv_pb2.RenewLeaseRequest.FromString,
                response_serializer=kv_pb2.RenewLeaseResponse.SerializeToString,
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
        """Encoded frames; the initial metadata is sent once the export is open."""
        try:
            export = await self._exports.find(_transfer_id(request), request.incarnation)
        except StaleIncarnation as error:
            context.set_trailing_metadata(((FAULT_METADATA, type(error).__name__),))
            raise
        box = _box(request, export)
        await context.send_initial_metadata(())
        async with aclosing(export.frames(box)) as frames:
            async for frame in frames:
                yield frame

    async def RenewLease(
        self, request: kv_pb2.RenewLeaseRequest, context: grpc.aio.ServicerContext
    ) -> kv_pb2.RenewLeaseResponse:
        """Let the lease run anew."""
        lease_s = self._exports.renew(_transfer_id(request), request.incarnation)
        return kv_pb2.RenewLeaseResponse(lease_ms=int(lease_s * 1000))

    async def ReleaseKv(
        self, request: kv_pb2.ReleaseKvRequest, context: grpc.aio.ServicerContext
    ) -> kv_pb2.ReleaseKvResponse:
        """End the export."""
        self._exports.release(_transfer_id(request), request.incarnation)
        return kv_pb2.ReleaseKvResponse()


def _transfer_id(request: Any) -> str:
    if not request.transfer_id:
        raise InvalidRequest("transfer_id", "must not be empty")
    return str(request.transfer_id)


def _box(request: kv_pb2.FetchKvRequest, export: Export) -> Box:
    kv_format = export.kv_format
    return Box(
        _span("token", request.token_start, request.token_end, export.tokens),
        _span("layer", request.layer_start, request.layer_end, kv_format.layers, least=1),
        _span("head", request.head_start, request.head_end, kv_format.heads, least=1),
    )


def _span(name: str, start: int, end: int, limit: int, least: int = 0) -> range:
    """`[start, end)` of a request, where an end of 0 means `limit`."""
    end = end or limit
    if end > limit:
        raise InvalidRequest(f"{name}_end", f"must be at most {limit}", end)
    if start + least > end:
        raise InvalidRequest(f"{name}_start", f"must be in [0, {end - least}]", start)
    return range(start, end)
