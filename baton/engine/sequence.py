"""A sequence of the generation batch, and the right to its pages. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from baton.request import SequenceState


class KvHandle(Protocol):
    """The right to the pages of one sequence."""

    @property
    def owner(self) -> str:
        """Name of its owner, for the ledger: "request/attempt" or "request/attempt/choice"."""

    @property
    def capacity(self) -> int:
        """Tokens for which it has pages."""

    @property
    def alive(self) -> bool:
        """False from the moment `free` is called."""

    @property
    def cached(self) -> int:
        """Leading tokens whose KV was cached when the pages were reserved."""

    @property
    def in_host(self) -> bool:
        """Whether some of its pages are in host memory."""


class Sequence:
    """A choice that is decoded, from `Engine.insert` until its handle is freed; the engine thread owns it.

    `output_ids` are its tokens so far; `state` shows them too. The engine appends those of each pass that is read.
    """

    __slots__ = ("failed", "handle", "output_ids", "planned_pages", "slot", "state", "unread")

    def __init__(self, handle: KvHandle, state: SequenceState) -> None:
        """`state` is copied."""
        self.handle = handle
        self.output_ids = list(state.output_ids)
        self.state = replace(state, output_ids=self.output_ids)
        self.unread = 0
        """Passes in flight that it is in."""
        self.slot = -1
        self.planned_pages: int | None = None
        """How many of its pages plans have sent; None before its Join."""
        self.failed = False
        """Whether it got no token in a pass: it has left, and its tokens of later passes mean nothing."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output whose values are known."""
        return self.state.length

    @property
    def position(self) -> int:
        """The position at which the next step writes KV: that of the newest token, which may be on the device only."""
        return self.state.length - 1 + self.unread
