"""Forward passes in flight: launched, and their results not taken yet.

    launch ──▶ in flight (pages pinned) ──▶ read: tokens appended to the sequences, pages unpinned ──▶ result taken
                      └─ a pass fails: it and all after it are undone, and no sequence has moved since the one before

A step is launched from what the host knows of a sequence (its length) and what the device has of it (its newest
token), so it need not wait for the tokens of the step before. The pages of its sequences stay pinned until it is read
or undone: a sequence may be freed while a step that it no longer wants still writes to them.

Belongs to the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections import abc, deque
from contextlib import ExitStack

from baton.engine.contract import ChunkResult, OnLayer, PassResult, PromptChunk
from baton.engine.executor import PassEnded
from baton.engine.plan import PlanResult, Row, RowResult
from baton.engine.sequence import Sequence
from baton.errors import BatonError, EngineError, NoToken
from baton.request import TokenInfo

_log = logging.getLogger(__name__)


class PassChunks:
    """The chunks of a pass, with the error of each: one that has failed is not called again, and has no result."""

    def __init__(self, chunks: abc.Sequence[PromptChunk]) -> None:
        self.chunks = chunks
        self.step = False
        """Whether the pass has a step too, for which it goes on without chunks."""
        self._errors: list[Exception | None] = [None] * len(chunks)
        self._planned: list[int] = []

    def plan(self, row_of: abc.Callable[[PromptChunk], Row]) -> list[Row]:
        """The rows of the chunks for which `row_of` raises nothing."""
        rows = []
        for index, chunk in enumerate(self.chunks):
            try:
                rows.append(row_of(chunk))
            except Exception as error:
                self._errors[index] = _without_frames(error)
            else:
                self._planned.append(index)
        return rows

    @property
    def on_layer(self) -> OnLayer | None:
        """The `on_layer` of the pass; None if no planned chunk has one."""
        return None if all(self.chunks[index].on_layer is None for index in self._planned) else self._call

    def _call(self, layer: int) -> None:
        for index in self._planned:
            on_layer = self.chunks[index].on_layer
            if on_layer is None or self._errors[index] is not None:
                continue
            try:
                on_layer(layer)
            except Exception as error:
                self._errors[index] = _without_frames(error)
        if not self.step and all(self._errors[index] is not None for index in self._planned):
            raise PassEnded

    def results(self, rows: abc.Sequence[RowResult]) -> tuple[list[ChunkResult | Exception], abc.Sequence[RowResult]]:
        """The chunks' results, from those of the pass's rows; and the rows that are not theirs."""
        own = dict(zip(self._planned, rows[: len(self._planned)], strict=True))
        results = [
            error or _chunk_result(chunk, own[index])
            for index, (chunk, error) in enumerate(zip(self.chunks, self._errors, strict=True))
        ]
        return results, rows[len(own) :]


def _without_frames(error: Exception) -> Exception:
    """An error to keep. Its frames hold the pass that keeps it: both would stay until garbage is collected."""
    if not isinstance(error, BatonError):
        _log.error("a chunk ends with an unexpected error", exc_info=error)
    return error.with_traceback(None)


def _chunk_result(chunk: PromptChunk, row: RowResult) -> ChunkResult | NoToken:
    if row.problem:
        return NoToken(f"{chunk.handle.owner}: {row.problem}")
    return ChunkResult(row.tokens, row.prompt_logprobs)


class LaunchedPass:
    def __init__(
        self,
        chunks: PassChunks,
        batch: abc.Sequence[Sequence],
        wait: abc.Callable[[], PlanResult],
        pins: ExitStack,
        take: abc.Callable[[LaunchedPass], object],
        refused: abc.Sequence[tuple[Sequence, NoToken]] = (),
    ) -> None:
        """`wait` returns the plan's result once the device is done, or raises; `take` reads passes up to this one.

        `refused` sequences are not in the batch, because they could not join it.
        """
        self.launched_at = 0.0
        self.batch = batch
        self.read = False
        self.found: list[tuple[Sequence, tuple[TokenInfo, ...] | NoToken]] = [*refused]
        self._chunks = chunks
        self._chunk_results: list[ChunkResult | Exception] = []
        self._wait, self._waited = wait, False
        self._pins = pins
        self._take = take
        self._error: BaseException | None = None

    def result(self) -> PassResult:
        """Raises what the pass raised; EngineError if it was undone with one before it."""
        self._take(self)
        if self._error is not None:
            raise self._error
        return PassResult(self._chunk_results, [(each, found) for each, found in self.found if each.handle.alive])

    def complete(self) -> None:
        """Wait for the device, and give the tokens to the sequences; if this raises, pages stay pinned."""
        self._waited = True
        self._chunk_results, steps = self._chunks.results(self._wait().rows)
        for each, row in zip(self.batch, steps, strict=True):
            each.unread -= 1
            if each.failed:
                continue
            if row.problem:
                each.failed = True
                self.found.append((each, NoToken(f"{each.handle.owner}: {row.problem}")))
            else:
                each.output_ids.extend(info.token_id for info in row.tokens)
                self.found.append((each, row.tokens))
        self.read = True
        self._pins.close()

    def undo(self, error: BaseException) -> None:
        """Let nothing come of it: `error` is its result."""
        if self._error is None:
            self._error = error
            if not self._waited:
                # The device may still be at it.
                with contextlib.suppress(Exception):
                    self._wait()
            self._pins.close()


class InflightPasses:
    """The passes whose result nobody has taken, oldest first; those that are read come before the others."""

    def __init__(self) -> None:
        self.passes: deque[LaunchedPass] = deque()

    @property
    def unread(self) -> list[LaunchedPass]:
        """Passes that are not read yet."""
        return [launched for launched in self.passes if not launched.read]

    def add(self, launched: LaunchedPass) -> None:
        """`launched` is the newest."""
        self.passes.append(launched)
        for each in launched.batch:
            each.unread += 1

    def complete(self) -> LaunchedPass:
        """Read the oldest unread one; if that raises, all unread ones are undone."""
        oldest = self.unread[0]
        try:
            oldest.complete()
        except BaseException as error:
            self.undo(error)
            raise
        return oldest

    def take(self, launched: LaunchedPass) -> None:
        """Its result is taken."""
        if launched in self.passes:
            self.passes.remove(launched)

    def undo(self, error: BaseException) -> None:
        """Undo the unread ones, the oldest for `error`."""
        for index, launched in enumerate(self.unread):
            for each in launched.batch:
                each.unread -= 1
            cause = EngineError(f"undone, because a pass before it failed: {error}")
            launched.undo(cause if index else error)
            self.take(launched)
