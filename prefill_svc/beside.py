"""Tasks beside the engine: look-ups, loads and write-backs of a worker's jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.errors import BatonError, EngineError
from prefill_svc.job import Job, SharedPages

_log = logging.getLogger(__name__)


class Beside:
    """Runs them, and waits for all; lives on the asyncio loop. A fault in one ends its job through `failed`."""

    def __init__(self, failed: Callable[[Job, BatonError], object]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, job: Job, steps: Callable[[Job], Awaitable[None]], pages: SharedPages | None = None
    ) -> asyncio.Task[None]:
        """Run `steps` for a job, as one more owner of `pages`."""
        task = asyncio.create_task(self._guard(job, steps), name=f"prefix of {job.task.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if pages is not None:
            pages.share()
            # Not by the task: one that is cancelled before its first step never runs.
            task.add_done_callback(lambda _: pages.release())
        return task

    async def finished(self) -> None:
        """Return once none is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _guard(self, job: Job, steps: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await steps(job)
        except Exception as error:
            _log.exception("%s: work beside the engine failed", job.task.name)
            self._failed(job, EngineError(f"{type(error).__name__}: {error}"))
