"""Commands that come from a router, and messages that go to it. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import BatonError, EngineError, SourceUnreachable
from baton.kv.hashing import PackedDigests
from baton.request import CachePolicy, Output, RemoteExport, ReserveResult


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """The name of an attempt: the id of its request, its number, and the number of its reservation."""

    request_id: str
    attempt: int
    reservation: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Command to reserve pages for a context of `context_tokens` tokens and `max_new_tokens` outputs of each choice.

    `deadline_s` is the number of seconds until the request's deadline, or None. `prefix_digests` are the joined digests
    of leading full blocks of the context; blocks that this worker already has are not transferred. `cache_salt` is the
    salt of these digests (`baton.kv.hashing`).
    """

    key: AttemptKey
    context_tokens: int
    max_new_tokens: int
    choices: int
    deadline_s: float | None = None
    prefix_digests: bytes = b""
    cache_salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE

    @property
    def pinnable_digests(self) -> PackedDigests:
        """Digests of the leading blocks to pin; empty if the request does not read the cache."""
        return PackedDigests(self.prefix_digests if self.cache.reads else b"")


@dataclass(frozen=True, slots=True)
class Start:
    """Command to fetch the KV of an attempt from `source`; `deadline_s` as in Reserve.

    If `prefix_transfer_id` is not empty, the attempt's pinned blocks are exported under this id.
    """

    key: AttemptKey
    source: RemoteExport
    deadline_s: float | None = None
    prefix_transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command to end an attempt, or one choice of it if `choice_index` is not None."""

    key: AttemptKey
    choice_index: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of a router, with all attempts of the session that it has not ended."""

    live: frozenset[AttemptKey]


Command = Reserve | Start | Cancel | Heartbeat


class FailureKind(enum.Enum):
    """Reasons for which an attempt can fail."""

    SOURCE_UNREACHABLE = "source unreachable"
    TRANSFER = "transfer"
    ENGINE = "engine"
    DEADLINE = "deadline"
    DRAINING = "draining"
    PREEMPTED = "preempted"

    @classmethod
    def of(cls, error: BatonError) -> FailureKind:
        """The kind of failure of an attempt whose transfer ended with this error."""
        match error:
            case SourceUnreachable():
                return cls.SOURCE_UNREACHABLE
            case EngineError():
                return cls.ENGINE
        return cls.TRANSFER


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an attempt."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an attempt without a failure; the worker holds nothing of it any more."""


@dataclass(slots=True)
class SessionDown:
    """One message to a router.

    `live` is the list of all attempts of the session in a heartbeat, and None in other messages.
    """

    reserved: list[tuple[AttemptKey, ReserveResult]] = field(default_factory=list)
    outputs: list[tuple[AttemptKey, Output]] = field(default_factory=list)
    failures: list[tuple[AttemptKey, Failure]] = field(default_factory=list)
    ended: list[AttemptKey] = field(default_factory=list)
    live: list[AttemptKey] | None = None

    def __bool__(self) -> bool:
        return bool(self.reserved or self.outputs or self.failures or self.ended or self.live is not None)
