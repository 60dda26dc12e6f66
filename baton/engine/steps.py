"""Steps in flight: launched on the device, not read yet.

    launch ──▶ in flight (pages pinned) ──▶ read: tokens appended to the rows, pages unpinned
                      └─ a step fails: it and all after it are undone, and no sequence has moved since the one before

A step is launched from what the host knows of a sequence (its length) and what the device has of it (its last
token), so it need not wait for the tokens of the step before. The pages of its rows stay pinned until it is read or
undone: a sequence may be freed while a step that it no longer wants still writes to them.

Belongs to the engine thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from baton.engine.contract import KvHandle
from baton.errors import EngineError, NoToken
from baton.kv.pool import PageHandle
from baton.request import SequenceState, TokenInfo


@dataclass(eq=False, slots=True)
class Row:
    """A sequence in the batch, with its own copy of the output ids; `unread` steps that it is in are in flight.

    One that has `failed` got no token in a step: it has left, and its tokens of later steps mean nothing.
    """

    handle: PageHandle
    state: SequenceState
    output_ids: list[int]
    unread: int = 0
    failed: bool = False

    @property
    def position(self) -> int:
        """Where the next step writes KV: the position of the sequence's last token, which may be on the device only."""
        return self.state.length - 1 + self.unread


class Step:
    """A step of the batch; see `baton.engine.contract.StepHandle`."""

    def __init__(
        self,
        rows: Sequence[Row],
        wait: Callable[[], Sequence[TokenInfo | NoToken]],
        pins: ExitStack,
        read: Callable[[Step], object],
    ) -> None:
        """`wait` returns each row's token or error once the device is done, or raises; `read` completes steps up to
        this one."""
        self.rows = rows
        self.found: list[tuple[Row, TokenInfo | NoToken]] = []
        self._wait = wait
        self._pins = pins
        self._read = read
        self._error: BaseException | None = None

    def result(self) -> list[tuple[KvHandle, tuple[TokenInfo, ...] | NoToken]]:
        """See StepHandle. Raises what the step raised; EngineError if it was undone with one before it."""
        self._read(self)
        if self._error is not None:
            raise self._error
        living = [(row.handle, found) for row, found in self.found if row.handle.alive]
        return [(handle, found if isinstance(found, NoToken) else (found,)) for handle, found in living]

    def complete(self) -> None:
        """Wait for the device, and give the tokens to the rows; raises what the step raised, and leaves it pinned."""
        tokens = self._wait()
        for row, token in zip(self.rows, tokens, strict=True):
            row.unread -= 1
            if row.failed:
                continue
            self.found.append((row, token))
            if isinstance(token, NoToken):
                row.failed = True
            else:
                row.output_ids.append(token.token_id)
        self._pins.close()

    def undo(self, error: BaseException) -> None:
        """Let nothing come of it: `error` is its result."""
        if self._error is None:
            self._error = error
            # The device may still be at it.
            with contextlib.suppress(Exception):
                self._wait()
            self._pins.close()


class Flight:
    """The steps in flight, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step: Step) -> bool:
        return step in self._steps

    def add(self, step: Step) -> None:
        """`step` was launched."""
        self._steps.append(step)
        for row in step.rows:
            row.unread += 1

    def complete(self) -> Step:
        """Read the oldest; if that raises, all are undone."""
        step = self._steps[0]
        try:
            step.complete()
        except BaseException as error:
            self.undo(error)
            raise
        self._steps.popleft()
        return step

    def undo(self, error: BaseException) -> None:
        """Undo all, the oldest for `error`."""
        for index, step in enumerate(self._steps):
            for row in step.rows:
                row.unread -= 1
            cause = EngineError(f"undone, because a step before it failed: {error}")
            step.undo(cause if index else error)
        self._steps.clear()
