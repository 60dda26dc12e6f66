"""Steps in flight: launched, not read yet.

    launch ──▶ in flight (pages pinned) ──▶ read: tokens appended to the sequences, pages unpinned
                      └─ a step fails: it and all after it are undone, and no sequence has moved since the one before

A step is launched from what the host knows of a sequence (its length) and what the device has of it (its newest
token), so it need not wait for the tokens of the step before. The pages of its sequences stay pinned until it is read
or undone: a sequence may be freed while a step that it no longer wants still writes to them.

Belongs to the engine thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from baton.engine.contract import KvHandle
from baton.engine.kv_manager import RunningSequence
from baton.engine.plan import PlanResult
from baton.errors import EngineError, NoToken
from baton.request import TokenInfo


class LaunchedStep:
    """A step of the batch; see `baton.engine.contract.StepHandle`."""

    def __init__(
        self,
        batch: Sequence[RunningSequence],
        wait: Callable[[], PlanResult],
        pins: ExitStack,
        read: Callable[[LaunchedStep], object],
        refused: Sequence[tuple[RunningSequence, NoToken]] = (),
    ) -> None:
        """`wait` returns the plan's result once the device is done, or raises; `read` reads steps up to this one.

        `refused` sequences are not in the batch, because they could not join it.
        """
        self.batch = batch
        self.found: list[tuple[RunningSequence, tuple[TokenInfo, ...] | NoToken]] = [*refused]
        self._wait = wait
        self._pins = pins
        self._read = read
        self._error: BaseException | None = None

    def result(self) -> list[tuple[KvHandle, tuple[TokenInfo, ...] | NoToken]]:
        """See StepHandle. Raises what the step raised; EngineError if it was undone with one before it."""
        self._read(self)
        if self._error is not None:
            raise self._error
        return [(each.handle, found) for each, found in self.found if each.handle.alive]

    def complete(self) -> None:
        """Wait for the device, and give the tokens to the sequences; if this raises, pages stay pinned."""
        result = self._wait()
        for each, tokens in zip(self.batch, result.steps, strict=True):
            each.unread -= 1
            if each.failed:
                continue
            if isinstance(tokens, str):
                each.failed = True
                self.found.append((each, NoToken(f"{each.handle.owner}: {tokens}")))
            else:
                each.output_ids.extend(info.token_id for info in tokens)
                self.found.append((each, tokens))
        self._pins.close()

    def undo(self, error: BaseException) -> None:
        """Let nothing come of it: `error` is its result."""
        if self._error is None:
            self._error = error
            # The device may still be at it.
            with contextlib.suppress(Exception):
                self._wait()
            self._pins.close()


class InflightSteps:
    """The steps in flight, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, step: LaunchedStep) -> bool:
        return step in self._steps

    def add(self, step: LaunchedStep) -> None:
        """`step` was launched."""
        self._steps.append(step)
        for each in step.batch:
            each.unread += 1

    def complete(self) -> LaunchedStep:
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
            for each in step.batch:
                each.unread -= 1
            cause = EngineError(f"undone, because a step before it failed: {error}")
            step.undo(cause if index else error)
        self._steps.clear()
