"""Fetches of KV, each a task: what comes of it is told once, unless it was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from baton.config.decode import DecodeConfig
from baton.engine.contract import Engine, KvHandle
from baton.errors import BatonError, EngineError, SourceUnreachable
from baton.kv.format import KvCompression
from baton.request import Handoff
from baton.rpc.tls import Tls
from baton.transfer.channels import KvChannels
from baton.transfer.fetcher import fetch
from baton.transfer.remote import RemoteExport
from baton.transfer.source import open_sources
from decode_svc.attempt import Attempt
from decode_svc.messages import FailureKind, Start

_log = logging.getLogger(__name__)


class Fetch(Protocol):
    """Pulls tokens `[first, tokens)` of an export into the handle; raises TransferError if they do not all arrive."""

    async def __call__(self, source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff: ...


@contextlib.asynccontextmanager
async def fetching(config: DecodeConfig, engine: Engine, consumer: str, tls: Tls | None) -> AsyncIterator[Fetch]:
    """Fetches over gRPC in the name of `consumer`, as the settings say."""
    channels = KvChannels(tls)

    async def fetch_kv(source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff:
        async with open_sources(
            channels,
            source,
            timeout_s=config.fetch_timeout_s,
            stall_timeout_s=config.fetch_stall_s,
            consumer=consumer,
            compression=KvCompression(config.kv_compression),
        ) as sources:
            return await fetch(sources, engine, handle, tokens=tokens, first=first, timeout_s=config.fetch_timeout_s)

    try:
        yield fetch_kv
    finally:
        await channels.close()


class Fetches:
    """Runs fetches into attempts' first handles; lives on the asyncio loop.

    What an attempt has pinned is not fetched. `names` computes the digests of a handoff's blocks, None where nobody
    needs them. `fetched` gets the handoff, those, and the milliseconds that it took, `failed` the kind of fault and a
    message.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        names: Callable[[Attempt, Handoff], Awaitable[Sequence[bytes] | None]],
        fetched: Callable[[Attempt, Handoff, Sequence[bytes] | None, float], object],
        failed: Callable[[Attempt, FailureKind, str], object],
    ) -> None:
        self._fetch = fetch
        self._names = names
        self._fetched, self._failed = fetched, failed
        self._running: dict[Attempt, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, attempt: Attempt, start: Start) -> None:
        """Fetch what `start` names."""
        task = asyncio.create_task(self._run(attempt, start), name=f"fetch {start.key}")
        self._running[attempt] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, attempt: Attempt) -> None:
        """End the attempt's fetch, if one is running; nothing is told of it any more."""
        task = self._running.pop(attempt, None)
        if task is not None and task is not asyncio.current_task():
            # A task that is cancelled before its first step would never release the export.
            asyncio.get_running_loop().call_soon(task.cancel)

    async def close(self) -> None:
        """Wait for all fetches, which must have been stopped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, attempt: Attempt, start: Start) -> None:
        started = time.monotonic()
        try:
            tokens, first = attempt.request.context_tokens, attempt.handle.cached
            handoff = await self._fetch(start.source, attempt.handle, tokens=tokens, first=first)
            digests = await self._names(attempt, handoff)
            if self._going(attempt):
                self._fetched(attempt, handoff, digests, (time.monotonic() - started) * 1e3)
        except BatonError as error:
            self._fail(attempt, _kind(error), str(error))
        except Exception as error:
            _log.exception("fetching %s failed", start.key)
            self._fail(attempt, FailureKind.ENGINE, f"{type(error).__name__}: {error}")
        finally:
            if self._going(attempt):
                del self._running[attempt]

    def _going(self, attempt: Attempt) -> bool:
        return self._running.get(attempt) is asyncio.current_task()

    def _fail(self, attempt: Attempt, kind: FailureKind, message: str) -> None:
        if self._going(attempt):
            self._failed(attempt, kind, message)


def _kind(error: BatonError) -> FailureKind:
    match error:
        case SourceUnreachable():
            return FailureKind.SOURCE_UNREACHABLE
        case EngineError():
            return FailureKind.ENGINE
    return FailureKind.TRANSFER
