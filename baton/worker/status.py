"""Status of a worker for its routers: identity, load, cached prefix blocks, and the Watch stream that carries them.

`WorkerIdentity` is valid for one incarnation, which is a new random id at every start. `StatusHub` is the
worker's side: services call `notify`, `drain` and `set_stalled`. Each watcher gets the status at once, then after each
change, and at least every MAX_INTERVAL_S. Changes that come while a message is being sent, or within MIN_INTERVAL_S of
it, are sent together. A router that has read that the worker drains ends its watch when it needs nothing more from it:
until then, messages may be on their way in both directions.

A block counts as cached while the engine's pages or the cache's host memory have it. It is reported as stored when the
first of them gets it, and as dropped when the last has lost it. The tiers report changes from any thread, and the
engine holds its pool's lock meanwhile. So a change only goes into an inbox; the asyncio loop merges it soon after, in
slices. Each subscriber keeps the changes that it has not sent yet, and of each block only the latest one. When these
become more than all cached blocks, it sends the whole list again. This limits the memory of a subscriber that nobody
reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import grpc

from baton.config import parse_address
from baton.config.values import complete_address
from baton.config.worker import WorkerConfig
from baton.engine.contract import Engine, EngineSpec
from baton.errors import ConfigError, InvalidRequest
from baton.kv.format import KvFormat, Shard
from baton.kv.hashing import NAME_BYTES
from baton.pb import kv_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc.convert import kv_format_from_proto, kv_format_to_proto, shard_from_proto, shard_to_proto

if TYPE_CHECKING:
    from baton.kv.prefix.contract import PrefixCache

WIRE_VERSION = 6
"""Version of the messages between Baton's processes. Routers and workers of different versions refuse each other."""

MAX_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.02


class WorkerRole(enum.Enum):
    """The role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        """Whether workers of this role compute prompts."""
        return self is not WorkerRole.DECODE

    @property
    def decodes(self) -> bool:
        """Whether workers of this role generate tokens."""
        return self is not WorkerRole.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Facts that do not change during one incarnation, except the ids of ticket keys."""

    worker_id: str
    role: WorkerRole
    incarnation: str
    model: str
    fingerprint: str
    kv_format: KvFormat
    converts_kv: bool
    tokenizer_digest: str
    max_model_len: int
    shards: tuple[Shard, ...]
    principal: str = ""
    ticket_key_ids: tuple[bytes, ...] = ()
    """Ids of the keys whose tickets the kv listener accepts now; they may change. Empty: it needs no tickets."""
    wire_version: int = WIRE_VERSION
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def consumer(self) -> str:
        """Audience of KV tickets for this worker."""
        return self.principal or self.incarnation

    def shards_at(self, dialled: str) -> tuple[Shard, ...]:
        """The shards with complete KV addresses; `dialled` is the "host:port" at which the worker was reached."""
        return tuple(replace(each, kv_address=complete_address(each.kv_address, dialled)) for each in self.shards)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker; rates and durations are 0 while unknown.

    `tokens_per_second` is the rate of prompts, but that of outputs if the worker only decodes.
    """

    pending_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    page_size: int = 0
    slots_used: int = 0
    slots_total: int = 0
    tokens_per_second: float = 0.0
    requests_without_token: int = 0
    """Requests of all routers that have not received a token from the worker yet."""
    step_seconds: float = 0.0
    """Mean duration of a decode step."""
    transfer_bytes_per_second: float = 0.0
    """Rate at which KV arrives from other workers."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One message of a watch."""

    identity: WorkerIdentity
    load: WorkerLoad
    draining: bool
    stalled: bool = False
    prefixes: PrefixChange | None = None


def new_identity(
    config: WorkerConfig,
    role: WorkerRole,
    spec: EngineSpec,
    tokenizer_digest: str,
    *,
    converts_kv: bool = False,
    principal: str = "",
) -> WorkerIdentity:
    """The identity of a starting worker, with a fresh incarnation; its one shard has no address yet."""
    incarnation = secrets.token_hex(8)
    return WorkerIdentity(
        worker_id=config.worker_id or f"{role.value}-{socket.gethostname()}-{incarnation[:6]}",
        role=role,
        incarnation=incarnation,
        model=config.model_name,
        fingerprint=spec.fingerprint,
        kv_format=spec.kv_format,
        converts_kv=converts_kv,
        tokenizer_digest=tokenizer_digest,
        max_model_len=spec.max_model_len,
        shards=(spec.kv_format.whole,),
        principal=principal,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
    )


class StatusHub:
    """Collects a worker's status and wakes its watchers; used from the asyncio loop only.

    With `prefixes`, each watcher gets the list of cached prefix blocks, and then its changes.
    """

    def __init__(
        self, identity: WorkerIdentity, load: Callable[[], WorkerLoad], prefixes: PrefixChangeFeed | None = None
    ) -> None:
        self._identity = identity
        self._load = load
        self._prefixes = prefixes
        self._draining = self._stalled = False
        self._closed = False
        self._watches = 0
        self._unwatched = asyncio.Event()
        self._unwatched.set()
        self._changed = asyncio.Event()
        self._ticket_key_ids: Callable[[], tuple[bytes, ...]] | None = None

    @property
    def identity(self) -> WorkerIdentity:
        """The worker's identity."""
        if self._ticket_key_ids is None:
            return self._identity
        return replace(self._identity, ticket_key_ids=self._ticket_key_ids())

    @property
    def draining(self) -> bool:
        """Whether the worker should get no new work."""
        return self._draining

    def status(self) -> WorkerStatus:
        """The status now, without changes of prefixes."""
        return WorkerStatus(self.identity, self._load(), self._draining, self._stalled)

    def advertise(self, *kv_addresses: str) -> None:
        """Set the address of each shard, once their listeners are bound."""
        addressed = zip(self._identity.shards, kv_addresses, strict=True)
        shards = tuple(replace(shard, kv_address=address) for shard, address in addressed)
        self._identity = replace(self._identity, shards=shards)
        self.notify()

    def set_ticket_keys(self, key_ids: Callable[[], tuple[bytes, ...]]) -> None:
        """Tell watchers that fetching KV needs a ticket. Each status calls `key_ids` for the ids of the valid keys."""
        self._ticket_key_ids = key_ids
        self.notify()

    def notify(self) -> None:
        """Tell watchers that the status has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Tell watchers that the worker should get no new work."""
        self._draining = True
        self.notify()

    async def wait_unwatched(self) -> None:
        """Wait until no watch is open; for a drain."""
        await self._unwatched.wait()

    def set_stalled(self, stalled: bool) -> None:
        """Set whether the engine has work but makes no progress, and tell watchers."""
        if stalled != self._stalled:
            self._stalled = stalled
            self.notify()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self.notify()

    async def watch(self) -> AsyncIterator[WorkerStatus]:
        """Yield the status at once, on change, and at least every MAX_INTERVAL_S, until the hub is closed."""
        subscriber = self._prefixes.subscribe() if self._prefixes else None
        told_drain = False
        self._watches += 1
        self._unwatched.clear()
        try:
            # An idle worker may close the hub right after it began to drain.
            while not self._closed or told_drain != self._draining:
                changed, told_drain = self._changed, self._draining
                yield replace(self.status(), prefixes=subscriber.pop() if subscriber else None)
                if self._closed:
                    continue
                await asyncio.sleep(MIN_INTERVAL_S)
                if subscriber and subscriber.has_changes:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MAX_INTERVAL_S - MIN_INTERVAL_S):
                        await changed.wait()
        finally:
            if self._prefixes and subscriber:
                self._prefixes.unsubscribe(subscriber)
            self._watches -= 1
            if not self._watches:
                self._unwatched.set()


MAX_NAMES = 2048
"""Largest number of names in one message; the others follow in the next ones."""

_POOL, _HOST = 1, 2
_BUCKETS = 256
"""Number of dicts of names, by their last byte: a single large dict takes many milliseconds to grow or to list."""


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """Blocks that a worker has stored and dropped, by the first NAME_BYTES of their digests.

    No block is in both. After a `reset` the worker has only the blocks that this message and later ones list as stored.
    """

    reset: bool
    stored: tuple[bytes, ...]
    dropped: tuple[bytes, ...]


class PrefixChangeFeed:
    """Merges the tiers' changes; made and used on the asyncio loop, until `close`.

    `changed` is called on the loop when subscribers have something new to `pop`.
    """

    def __init__(self, engine: Engine, cache: PrefixCache, changed: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._cache = cache
        self._changed = changed
        self._inbox: deque[tuple[int, Sequence[bytes] | None, bool]] = deque()
        self._merged = 0
        """Number of digests of the first change in the inbox that are merged; of buckets, if all names are dropped."""
        self._due = False
        self._tiers: list[dict[bytes, int]] = [{} for _ in range(_BUCKETS)]
        self._subscribers: set[PrefixSubscriber] = set()
        engine.watch_prefixes(partial(self._put, _POOL))
        cache.watch(partial(self._put, _HOST))

    def subscribe(self) -> PrefixSubscriber:
        """Add a subscriber, which gets the whole list first."""
        subscriber = PrefixSubscriber(self._tiers)
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: PrefixSubscriber) -> None:
        """Remove a subscriber."""
        self._subscribers.discard(subscriber)

    def close(self) -> None:
        """Stop watching the tiers."""
        self._engine.watch_prefixes(None)
        self._cache.watch(None)

    def _put(self, tier: int, stored: Sequence[bytes], dropped: Sequence[bytes] | None) -> None:
        """Called from any thread."""
        if stored:
            self._inbox.append((tier, stored, True))
        if dropped is None or dropped:
            self._inbox.append((tier, dropped, False))
        if not self._due:
            self._due = True
            # If the loop is closed, there are no subscribers.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._merge)

    def _merge(self) -> None:
        # Reset this first: a change that comes from now on needs another merge.
        self._due = False
        changes: dict[bytes, bool] = {}
        merged = 0
        while self._inbox:
            if merged >= MAX_NAMES:
                self._due = True
                self._loop.call_soon(self._merge)
                break
            tier, names, is_stored = self._next_names()
            merged += len(names)
            for name in names:
                bucket = self._tiers[name[-1]]
                before = bucket.get(name, 0)
                after = before | tier if is_stored else before & ~tier
                if after:
                    bucket[name] = after
                elif before:
                    del bucket[name]
                if bool(before) != bool(after):
                    changes[name] = is_stored
        if changes:
            for subscriber in self._subscribers:
                subscriber.add(changes)
            self._changed()

    def _next_names(self) -> tuple[int, list[bytes], bool]:
        """A slice of the first change in the inbox."""
        tier, digests, is_stored = self._inbox[0]
        if digests is None:
            names, end = [name for name, tiers in self._tiers[self._merged].items() if tiers & tier], _BUCKETS
            self._merged += 1
        else:
            names = [digest[:NAME_BYTES] for digest in digests[self._merged : self._merged + MAX_NAMES]]
            end = len(digests)
            self._merged += MAX_NAMES
        if self._merged >= end:
            self._inbox.popleft()
            self._merged = 0
        return tier, names, is_stored


class PrefixSubscriber:
    """The changes that one watcher has not received yet, by bucket."""

    def __init__(self, cached: Sequence[Mapping[bytes, int]]) -> None:
        self._cached = cached
        self._reset = True
        self._unsent: list[dict[bytes, bool]] = [{} for _ in cached]
        self._listed = 0
        """Number of buckets listed since the last reset. The others come later, with their blocks of that time."""

    @property
    def has_changes(self) -> bool:
        """Whether there is something to send."""
        return self._reset or any(self._unsent) or any(self._cached[self._listed :])

    def add(self, changes: Mapping[bytes, bool]) -> None:
        """Add blocks that are cached now (True) or no longer (False)."""
        for name, is_cached in changes.items():
            if name[-1] < self._listed:
                self._unsent[name[-1]][name] = is_cached
        if sum(map(len, self._unsent)) > sum(map(len, self._cached)) + MAX_NAMES:
            self._reset, self._listed = True, 0
            self._unsent = [{} for _ in self._cached]

    def pop(self) -> PrefixChange | None:
        """The next message: first all cached blocks, then the changes since the last message; None without changes."""
        if not self.has_changes:
            return None
        reset, self._reset = self._reset, False
        stored, dropped, room = list[bytes](), list[bytes](), MAX_NAMES
        for number, unsent in enumerate(self._unsent):
            if number == self._listed and room:
                unsent.update(dict.fromkeys(self._cached[number], True))
                self._listed += 1
            while unsent and room:
                name, is_cached = unsent.popitem()
                (stored if is_cached else dropped).append(name)
                room -= 1
        return PrefixChange(reset, tuple(stored), tuple(dropped))


_ROLES = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    WorkerRole.MIXED: worker_pb2.WORKER_ROLE_MIXED,
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
            tensor_parallel=identity.tensor_parallel,
            pipeline_parallel=identity.pipeline_parallel,
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
            tensor_parallel=identity.tensor_parallel,
            pipeline_parallel=identity.pipeline_parallel,
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
    raise InvalidRequest("identity.role", "must be prefill, decode or mixed", number)
