"""The identity and the load of a worker, and the Watch stream that sends them to routers.

`WorkerIdentity` is valid for one incarnation, which is a new random id at every start. `StatusHub` is the
worker's side: services call `notify`, `drain` and `set_stalled`. Each watcher gets the status at once, then after each
change, and at least every MAX_INTERVAL_S. Changes that come while a message is being sent, or within MIN_INTERVAL_S of
it, are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from baton.config.worker import WorkerConfig
from baton.engine.contract import EngineSpec
from baton.kv.format import KvFormat, Shard
from baton.worker.prefix_changes import PrefixChange, PrefixChangeFeed

WIRE_VERSION = 4
"""Version of the messages between Baton's processes. Routers and workers of different versions refuse each other."""

MAX_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.02


class WorkerRole(enum.Enum):
    """The role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


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

    @property
    def consumer(self) -> str:
        """Audience of KV tickets for this worker."""
        return self.principal or self.incarnation


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Facts that change all the time; `tokens_per_second` is 0 while unknown."""

    pending_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    page_size: int = 0
    slots_used: int = 0
    slots_total: int = 0
    tokens_per_second: float = 0.0
    newcomers: int = 0
    """Requests of all routers that have not received a token from the worker yet."""


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
        """Whether the worker refuses new work."""
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
        """Tell watchers that fetching KV needs a ticket; every status calls `key_ids` for the keys that are valid
        then.
        """
        self._ticket_key_ids = key_ids
        self.notify()

    def notify(self) -> None:
        """Tell watchers that the status has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Tell watchers that the worker refuses new work."""
        self._draining = True
        self.notify()

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
        try:
            while not self._closed:
                changed = self._changed
                yield replace(self.status(), prefixes=subscriber.pop() if subscriber else None)
                await asyncio.sleep(MIN_INTERVAL_S)
                if subscriber and subscriber.has_changes:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MAX_INTERVAL_S - MIN_INTERVAL_S):
                        await changed.wait()
        finally:
            if self._prefixes and subscriber:
                self._prefixes.unsubscribe(subscriber)
