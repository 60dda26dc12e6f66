"""The transport of KV, both ends: `KvSource` for the consumer, `KvServicer` over a worker's exports.

gRPC is the only transport so far. Another transport, such as RDMA, would implement `KvSource` and send the frames of
`Export.frames`. A transport does not choose the KV to fetch, and does not check or write frames.

With a TicketVerifier every call needs a ticket, which is checked before anything is looked up. The service is
registered without the generated stubs, because the frames of FetchKv are already bytes. All fetches share channels:
there is one channel for each address and each version of the TLS files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc

from baton.config import parse_address
from baton.errors import (
    ConfigError,
    IncompleteTransfer,
    InvalidRequest,
    PermissionDenied,
    SourceUnreachable,
    StaleIncarnation,
    TicketRefused,
    TransferError,
)
from baton.kv.format import Shard
from baton.pb import kv_pb2
from baton.process.executors import wait_to_end
from baton.request import RemoteExport, check_id
from baton.rpc.channel import kv_channel
from baton.rpc.tls import Tls, peer_principal
from baton.transfer import wire
from baton.transfer.export import Export, ExportRegistry
from baton.transfer.tickets import RequestedSlice, TicketVerifier, Use
from baton.transfer.wire import KvSlice

FAULT_METADATA = "kv-fault"
"""Key of the trailing metadata of a failed FetchKv with the class of its error, if the status does not identify it."""

SERVICE = kv_pb2.DESCRIPTOR.services_by_name["Kv"].full_name
_RELEASE_TIMEOUT_S = 0.5
_UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class KvSource(Protocol):
    """The consumer's end of one shard of an export."""

    @property
    def shard(self) -> Shard:
        """Its layers and heads."""

    @property
    def checksum_seed(self) -> int:
        """The seed of its frames' checksums (`wire.seed_of`)."""

    def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        """Yield the encoded frames of a slice as its KV becomes final, up to the commit; `aclose` ends the stream.

        Raises TransferError, or its subclass SourceUnreachable if the source sends nothing.
        """

    async def release(self) -> None:
        """End the export, if the source can be reached; takes a bounded time, and does not raise an error."""


@contextlib.asynccontextmanager
async def open_sources(
    channels: KvChannels,
    export: RemoteExport,
    *,
    timeout_s: float,
    silence_timeout_s: float,
    consumer: str = "",
) -> AsyncIterator[list[KvSource]]:
    """Yield a source for each shard of an export; the other parameters as in GrpcSource.

    Raises TransferError if `export` has no transfer id, no shards, or an invalid address.
    """
    if not export.transfer_id:
        raise TransferError("transfer_id is empty")
    if not export.shards:
        raise TransferError(f"transfer {export.transfer_id}: its source has no shards")
    async with contextlib.AsyncExitStack() as stack:
        sources: list[KvSource] = []
        for shard in export.shards:
            try:
                parse_address(shard.kv_address)
            except ConfigError as error:
                raise TransferError(f"transfer {export.transfer_id}: its source's address {error}") from None
            channel = await stack.enter_async_context(channels.use(shard.kv_address))
            sources.append(
                GrpcSource(
                    channel,
                    export,
                    shard,
                    timeout_s=timeout_s,
                    silence_timeout_s=silence_timeout_s,
                    consumer=consumer,
                )
            )
        yield sources


class GrpcSource:
    """One shard of an export over a gRPC channel.

    `timeout_s` limits each call, at both ends. `silence_timeout_s` limits the wait for each frame after the export is
    open; before that, its prompt may wait in a queue. `consumer` is the name of this worker in the export's ticket.
    Each stream uses the ticket with another retry number.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        export: RemoteExport,
        shard: Shard,
        *,
        timeout_s: float,
        silence_timeout_s: float,
        consumer: str = "",
    ) -> None:
        self.shard = shard
        self.checksum_seed = wire.seed_of(export.transfer_id)
        self._transfer_id = export.transfer_id
        self._incarnation = export.incarnation
        self._ticket = export.ticket
        self._consumer = consumer
        self._retries = itertools.count()
        self._timeout_s = timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._fetch = channel.unary_stream(
            f"/{SERVICE}/FetchKv", request_serializer=kv_pb2.FetchKvRequest.SerializeToString
        )
        self._release = channel.unary_unary(
            f"/{SERVICE}/ReleaseKv", request_serializer=kv_pb2.ReleaseKvRequest.SerializeToString
        )

    async def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        request = kv_pb2.FetchKvRequest(
            transfer_id=self._transfer_id,
            incarnation=self._incarnation,
            token_start=kv_slice.tokens.start,
            token_end=kv_slice.tokens.stop,
            layer_start=kv_slice.layers.start,
            layer_end=kv_slice.layers.stop,
            head_start=kv_slice.heads.start,
            head_end=kv_slice.heads.stop,
            ticket=self._ticket,
            consumer=self._consumer,
            retry=next(self._retries),
        )
        try:
            call = self._fetch(request, timeout=self._timeout_s)
        except grpc.aio.UsageError as error:
            raise SourceUnreachable(f"transfer {self._transfer_id}: {error}") from error
        try:
            # Returns without raising if the call fails; the first read raises then.
            await call.initial_metadata()
            while (frame := await self._next(call)) is not grpc.aio.EOF:
                yield frame
        finally:
            call.cancel()

    async def release(self) -> None:
        request = kv_pb2.ReleaseKvRequest(
            transfer_id=self._transfer_id,
            incarnation=self._incarnation,
            ticket=self._ticket,
            consumer=self._consumer,
        )
        try:
            await self._release(request, timeout=_RELEASE_TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            # If the release fails, the lease ends the export.
            return
        except asyncio.CancelledError:
            _raise_if_own()

    async def _next(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                return await call.read()
        except TimeoutError:
            raise SourceUnreachable(
                f"transfer {self._transfer_id}: its source sent nothing for {self._silence_timeout_s} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            self._raise(error)
        except asyncio.CancelledError:
            _raise_if_own()
            raise SourceUnreachable("the channel was closed") from None

    def _raise(self, error: grpc.aio.AioRpcError) -> NoReturn:
        code, details = error.code(), error.details() or ""
        message = f"transfer {self._transfer_id}: {details} ({code.name})"
        if code in _UNREACHABLE:
            raise SourceUnreachable(message) from error
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise IncompleteTransfer(message) from error
        if code is grpc.StatusCode.PERMISSION_DENIED:
            raise TicketRefused(message) from error
        if (FAULT_METADATA, StaleIncarnation.__name__) in tuple(error.trailing_metadata() or ()):
            raise StaleIncarnation(message) from error
        raise TransferError(message) from error


def _raise_if_own() -> None:
    """Re-raise a cancellation of this task; gRPC raises the same when a channel is closed under a call."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


MAX_IDLE = 32


@dataclass(slots=True)
class _PooledChannel:
    channel: grpc.aio.Channel
    users: int = 0


class KvChannels:
    """Channels to exporters: those in use, and up to MAX_IDLE idle ones. Used on the asyncio loop only.

    With `tls`, exporters must have a certificate of `role`. A channel with an older version of the TLS files is closed
    after its last use.
    """

    def __init__(self, tls: Tls | None = None, role: str = "prefill") -> None:
        self._tls = tls
        self._role = role
        self._entries: dict[tuple[str, int], _PooledChannel] = {}

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yield a channel to `address` ("host:port")."""
        key = (address, self._generation)
        entry = self._entries.pop(key, None) or _PooledChannel(kv_channel(address, self._tls, self._role))
        self._entries[key] = entry
        entry.users += 1
        try:
            yield entry.channel
        finally:
            entry.users -= 1
            # Channels that are to be closed are not in the pool any more, so a cancellation must not leave them open.
            await wait_to_end(asyncio.ensure_future(self._close_idle(MAX_IDLE)))

    async def close(self) -> None:
        """Close all channels that are not in use."""
        await self._close_idle(0)

    @property
    def _generation(self) -> int:
        return self._tls.generation if self._tls else 0

    async def _close_idle(self, keep: int) -> None:
        now = self._generation
        idle = [key for key, entry in self._entries.items() if not entry.users]
        current = [key for key in idle if key[1] == now]
        surplus = current[: max(0, len(current) - keep)]
        closing = [self._entries.pop(key) for key in idle if key[1] != now or key in surplus]
        for entry in closing:
            await entry.channel.close()


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
        self._check(request, context, use=(_requested_slice(request), request.retry))
        try:
            export = await self._exports.find(request.transfer_id, request.incarnation)
        except StaleIncarnation as error:
            context.set_trailing_metadata(((FAULT_METADATA, type(error).__name__),))
            raise
        kv_slice = _slice(request, export)
        await context.send_initial_metadata(())
        async with aclosing(export.frames(kv_slice)) as frames:
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
        """Check the ticket of a call, redeem it for `use`, check ids; raises PermissionDenied or InvalidRequest."""
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


def _requested_slice(request: kv_pb2.FetchKvRequest) -> RequestedSlice:
    return (
        request.token_start,
        request.token_end,
        request.layer_start,
        request.layer_end,
        request.head_start,
        request.head_end,
    )


def _slice(request: kv_pb2.FetchKvRequest, export: Export) -> KvSlice:
    kv_format = export.kv_format
    return KvSlice(
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
