"""The Worker service, and the conversion between a worker's status and its message."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.config import parse_address
from baton.errors import ConfigError, InvalidRequest
from baton.kv.format import Shard
from baton.kv.hashing import NAME_BYTES
from baton.pb import kv_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc.convert import kv_format_from_proto, kv_format_to_proto, shard_from_proto, shard_to_proto
from baton.worker.prefix_changes import PrefixChange
from baton.worker.status import (
    StatusHub,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerStatus,
)

_ROLES = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
_LOAD_FIELDS = WorkerLoad.__slots__


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Streams one worker's status."""

    def __init__(self, status: StatusHub) -> None:
        self._status = status

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        """Stream the status until the worker stops or the watcher cancels."""
        async for status in self._status.watch():
            yield status_to_proto(status)


def status_to_proto(status: WorkerStatus) -> worker_pb2.WorkerStatus:
    """The message of a status."""
    identity = status.identity
    return worker_pb2.WorkerStatus(
        identity=worker_pb2.WorkerIdentity(
            worker_id=identity.worker_id,
            role=_ROLES[identity.role],
            incarnation=identity.incarnation,
            model=identity.model,
            fingerprint=identity.fingerprint,
            kv_format=kv_format_to_proto(identity.kv_format),
            converts_kv=identity.converts_kv,
            tokenizer_digest=identity.tokenizer_digest,
            max_model_len=identity.max_model_len,
            shards=map(shard_to_proto, identity.shards),
            principal=identity.principal,
            ticket_key_ids=identity.ticket_key_ids,
            wire_version=identity.wire_version,
        ),
        load=worker_pb2.WorkerLoad(**{name: getattr(status.load, name) for name in _LOAD_FIELDS}),
        draining=status.draining,
        stalled=status.stalled,
        prefixes=_prefixes_to_proto(status.prefixes),
    )


def status_from_proto(message: worker_pb2.WorkerStatus) -> WorkerStatus:
    """The status in a message.

    Raises InvalidRequest for an unknown role, no shard, a bad address, a block size below 1, or prefix names of
    the wrong length.
    """
    identity = message.identity
    if not identity.shards:
        raise InvalidRequest("identity.shards", "must not be empty", [])
    if not identity.kv_format.block_size:
        raise InvalidRequest("identity.kv_format.block_size", "must be at least 1", 0)
    return WorkerStatus(
        identity=WorkerIdentity(
            worker_id=identity.worker_id,
            role=_role(identity.role),
            incarnation=identity.incarnation,
            model=identity.model,
            fingerprint=identity.fingerprint,
            kv_format=kv_format_from_proto(identity.kv_format),
            converts_kv=identity.converts_kv,
            tokenizer_digest=identity.tokenizer_digest,
            max_model_len=identity.max_model_len,
            shards=tuple(map(_shard, identity.shards)),
            principal=identity.principal,
            ticket_key_ids=tuple(identity.ticket_key_ids),
            wire_version=identity.wire_version,
        ),
        load=WorkerLoad(**{name: getattr(message.load, name) for name in _LOAD_FIELDS}),
        draining=message.draining,
        stalled=message.stalled,
        prefixes=_prefixes_from_proto(message.prefixes) if message.HasField("prefixes") else None,
    )


def _shard(shard: kv_pb2.Shard) -> Shard:
    address = shard.kv_address
    try:
        parse_address(f"dialled{address}" if address.startswith(":") else address)
    except ConfigError:
        raise InvalidRequest("identity.shards.kv_address", "must be HOST:PORT or :PORT", address) from None
    return shard_from_proto(shard)


def _prefixes_to_proto(change: PrefixChange | None) -> worker_pb2.PrefixChanges | None:
    if change is None:
        return None
    return worker_pb2.PrefixChanges(
        reset=change.reset, stored=b"".join(change.stored), dropped=b"".join(change.dropped)
    )


def _prefixes_from_proto(message: worker_pb2.PrefixChanges) -> PrefixChange:
    return PrefixChange(
        message.reset, _names("prefixes.stored", message.stored), _names("prefixes.dropped", message.dropped)
    )


def _names(field: str, joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % NAME_BYTES:
        raise InvalidRequest(field, f"must be names of {NAME_BYTES} bytes each", f"{len(joined)} bytes")
    return tuple(joined[i : i + NAME_BYTES] for i in range(0, len(joined), NAME_BYTES))


def _role(number: int) -> WorkerRole:
    for role, known in _ROLES.items():
        if known == number:
            return role
    raise InvalidRequest("identity.role", "must be prefill or decode", number)
