"""What routers and the decode service say to each other, in plain Python; see decode.proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.request import CachePolicy
from baton.transfer.remote import RemoteExport
from baton.worker.messages import Output, Reserved


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """One attempt at serving a request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Asks for pages: `context_tokens` are transferred, each choice may generate `max_new_tokens` more.

    `deadline_s` from now is the request's deadline, None without one. `prefix_digests` are names of the context's
    leading full blocks, one after the other, whose KV need not be transferred if it is here already; `cache_salt` is
    that of their chain (`baton.kv.hashing`).
    """

    key: AttemptKey
    context_tokens: int
    max_new_tokens: int
    choices: int
    deadline_s: float | None = None
    prefix_digests: bytes = b""
    cache_salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE


@dataclass(frozen=True, slots=True)
class Start:
    """Says where to fetch the KV; `deadline_s` as in Reserve.

    What was pinned is exported as `prefix_transfer_id`, unless that is empty.
    """

    key: AttemptKey
    source: RemoteExport
    deadline_s: float | None = None
    prefix_transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends an attempt, or one choice of it."""

    key: AttemptKey
    choice_index: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The router is there, and these are all the attempts of the session that it goes on with."""

    live: frozenset[AttemptKey]


Command = Reserve | Start | Cancel | Heartbeat


class FailureKind(enum.Enum):
    """What ended an attempt before its time."""

    SOURCE_UNREACHABLE = "source unreachable"
    TRANSFER = "transfer"
    ENGINE = "engine"
    DEADLINE = "deadline"
    DRAINING = "draining"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Failure:
    """Ends an attempt with a fault."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class Down:
    """One message to a router; `live` are all the attempts of the session, where a heartbeat is due."""

    reserved: list[tuple[AttemptKey, Reserved]] = field(default_factory=list)
    outputs: list[tuple[AttemptKey, Output]] = field(default_factory=list)
    failures: list[tuple[AttemptKey, Failure]] = field(default_factory=list)
    live: list[AttemptKey] | None = None

    def __bool__(self) -> bool:
        return bool(self.reserved or self.outputs or self.failures or self.live is not None)
