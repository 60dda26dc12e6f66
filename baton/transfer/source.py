"""Sources of a consumer's frames: the protocol of a transport for KV, and gRPC as one.

Another transport (RDMA) implements `KvSource`. It does not decide what is fetched, and does not check or write frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn, Protocol

import grpc

from baton.config import parse_address
from baton.errors import (
    ConfigError,
    IncompleteTransfer,
    SourceUnreachable,
    StaleIncarnation,
    TicketRefused,
    TransferError,
)
from baton.kv.format import Shard
from baton.pb import kv_pb2
from baton.transfer import wire
from baton.transfer.channels import KvChannels
from baton.transfer.coverage import Box
from baton.transfer.remote import RemoteExport

FAULT_METADATA = "kv-fault"
"""Trailing metadata with the class of an error, for errors that the status of a failed FetchKv does not identify."""

_SERVICE = "/baton.v1.Kv"
_RELEASE_TIMEOUT_S = 0.5
_UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class KvSource(Protocol):
    """One shard of an export, as its consumer sees it."""

    @property
    def shard(self) -> Shard:
        """Its layers and heads."""

    @property
    def seed(self) -> int:
        """The seed of its frames' checksums (`wire.seed_of`)."""

    def frames(self, box: Box) -> AsyncGenerator[bytes, None]:
        """Encoded frames of the box, as they become final, up to the commit.

        Closing the generator ends the stream. Raises TransferError; SourceUnreachable if the source sends nothing.
        """

    async def release(self) -> None:
        """End the export, if the source can be reached. Takes a bounded time, and does not raise if it fails."""


@contextlib.asynccontextmanager
async def open_sources(
    channels: KvChannels,
    export: RemoteExport,
    *,
    timeout_s: float,
    stall_timeout_s: float,
    consumer: str = "",
) -> AsyncIterator[list[KvSource]]:
    """Yield a source for each shard of an export; the other parameters are those of GrpcSource.

    Raises TransferError if `export` can't be an export.
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
                    stall_timeout_s=stall_timeout_s,
                    consumer=consumer,
                )
            )
        yield sources


class GrpcSource:
    """One shard of an export over a gRPC channel.

    `timeout_s` limits each call, at both ends. `stall_timeout_s` limits the time between two frames; it starts when the
    export is open, since a prompt may wait in a queue before that, and does not run while the consumer itself is busy.
    The export's ticket is made out to `consumer`; each stream counts as another retry of it.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        export: RemoteExport,
        shard: Shard,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        consumer: str = "",
    ) -> None:
        self.shard = shard
        self.seed = wire.seed_of(export.transfer_id)
        self._transfer_id = export.transfer_id
        self._incarnation = export.incarnation
        self._ticket = export.ticket
        self._consumer = consumer
        self._retries = itertools.count()
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._fetch = channel.unary_stream(
            f"{_SERVICE}/FetchKv", request_serializer=kv_pb2.FetchKvRequest.SerializeToString
        )
        self._release = channel.unary_unary(
            f"{_SERVICE}/ReleaseKv", request_serializer=kv_pb2.ReleaseKvRequest.SerializeToString
        )

    async def frames(self, box: Box) -> AsyncGenerator[bytes, None]:
        request = kv_pb2.FetchKvRequest(
            transfer_id=self._transfer_id,
            incarnation=self._incarnation,
            token_start=box.tokens.start,
            token_end=box.tokens.stop,
            layer_start=box.layers.start,
            layer_end=box.layers.stop,
            head_start=box.heads.start,
            head_end=box.heads.stop,
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
            async with asyncio.timeout(self._stall_timeout_s):
                return await call.read()
        except TimeoutError:
            raise SourceUnreachable(
                f"transfer {self._transfer_id}: its source sent nothing for {self._stall_timeout_s} s"
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
