"""Messages between routers and the decode service, as plain types; see decode.proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import BatonError, EngineError, SourceUnreachable
from baton.request import CachePolicy, Output, RemoteExport, ReserveResult


@dataclass(frozen=True, slots=True)
class AttemptKey:
    """Names one attempt at a request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve pages for a context of `context_tokens` tokens, and `max_new_tokens` more for each choice.

    The request's deadline is `deadline_s` seconds from now, None without one. `prefix_digests` are the joined digests
    of the leading full blocks of the context; blocks that this worker has already are not transferred. `cache_salt` is
    the salt of their chain (`baton.kv.hashing`).
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
    """Fetch the KV of an attempt from `source`; `deadline_s` as in Reserve.

    If `prefix_transfer_id` is not empty, the pinned blocks are exported under it.
    """

    key: AttemptKey
    source: RemoteExport
    deadline_s: float | None = None
    prefix_transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an attempt, or one choice of it."""

    key: AttemptKey
    choice_index: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The router is alive, and goes on with exactly these attempts of the session."""

    live: frozenset[AttemptKey]


Command = Reserve | Start | Cancel | Heartbeat


class FailureKind(enum.Enum):
    """Why an attempt failed."""

    SOURCE_UNREACHABLE = "source unreachable"
    TRANSFER = "transfer"
    ENGINE = "engine"
    DEADLINE = "deadline"
    DRAINING = "draining"
    PREEMPTED = "preempted"

    @classmethod
    def of(cls, error: BatonError) -> FailureKind:
        """The kind of an error that ended a transfer."""
        match error:
            case SourceUnreachable():
                return cls.SOURCE_UNREACHABLE
            case EngineError():
                return cls.ENGINE
        return cls.TRANSFER


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt has failed."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has ended without a failure; nothing of it is held any more."""


@dataclass(slots=True)
class SessionDown:
    """One message to a router.

    A heartbeat has `live`, the list of all attempts of the session; other messages have None.
    """

    reserved: list[tuple[AttemptKey, ReserveResult]] = field(default_factory=list)
    outputs: list[tuple[AttemptKey, Output]] = field(default_factory=list)
    failures: list[tuple[AttemptKey, Failure]] = field(default_factory=list)
    ended: list[AttemptKey] = field(default_factory=list)
    live: list[AttemptKey] | None = None

    def __bool__(self) -> bool:
        return bool(self.reserved or self.outputs or self.failures or self.ended or self.live is not None)
