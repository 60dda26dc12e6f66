"""Waiting for work that must not be left behind."""

from __future__ import annotations

import asyncio
from typing import Any


async def wait_to_end(work: asyncio.Future[Any]) -> None:
    """Wait until `work` has ended, in whatever way; a caller that needs its result or its error then asks it.

    If the waiting task is cancelled meanwhile, CancelledError is raised after the end. A task may be cancelled again
    while it waits: by its caller, and by `asyncio.timeout`.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if not work.cancelled():
        # Otherwise asyncio logs an error that no caller asks for.
        work.exception()
    if cancelled is not None:
        raise cancelled
