"""What the test of a decode worker knows of its attempts, and the parts that stand for the worker's surroundings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from baton.engine.contract import KvHandle
from baton.request import FinishReason
from decode_svc.messages import AttemptKey, FailureKind
from decode_svc.session import Session
from tests.decoding import LoggingEngine, Prefilled


@dataclass(eq=False)
class Try:
    """An attempt as its router sees it."""

    session: Session
    key: AttemptKey
    ready: Prefilled
    fetched: Any
    deadline: float
    reserved_at: float
    granted: bool = False
    refused: bool = False
    started_at: float | None = None
    told_to_end: bool = False
    failed: FailureKind | None = None
    cancelled: set[int] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether nothing may be told of it any more."""
        over = set(self.tokens) <= set(self.finished) | self.cancelled
        # What prefill has finished already is known here at once, and to decode when it has fetched it.
        known = self.fetched.done() or set(self.tokens) <= self.cancelled
        return bool(self.failed) or self.told_to_end or (over and known)


class NoChannels:
    """Fetches go through the test, not through gRPC."""

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[None]:
        yield None

    async def close(self) -> None:
        return


class PausingEngine(LoggingEngine):
    """Notes the owner of each sequence that is paused, and those of the batch that it leaves."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.paused: list[tuple[str, list[str]]] = []

    def pause(self, handle: KvHandle) -> None:
        self.paused.append((handle.owner, [row.handle.owner for row in self._rows if row.handle.alive]))
        super().pause(handle)
