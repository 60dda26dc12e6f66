"""The process around a decode worker: engine thread, status, ledger, drain, end.

If the engine thread ends, or the audit of the idle worker finds pages without owner, the worker can't go on. Then
`failed` gets the exception, and the supervisor starts another process.
"""

from __future__ import annotations

import asyncio
import logging

from baton.config.worker import DecodeConfig
from baton.engine.contract import Engine
from baton.kv.prefix import PrefixCache
from baton.ledger import Ledger, LedgerEntry
from baton.process.executors import EngineThread
from baton.transfer.export import ExportRegistry
from baton.worker.health import IdleAudit, Progress, build_ledger
from baton.worker.prefix_cache import CacheTiers
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerIdentity, WorkerLoad
from decode_svc.messages import FailureKind
from decode_svc.sequence import ledger_entries
from decode_svc.worker import DecodeWorker, FetchKv

_log = logging.getLogger(__name__)


class DecodeService:
    """A decode worker with its engine thread, status and audit; used on the asyncio loop only."""

    def __init__(
        self,
        config: DecodeConfig,
        engine: Engine,
        identity: WorkerIdentity,
        fetch: FetchKv,
        exports: ExportRegistry,
        cache: PrefixCache,
    ) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._engine = engine
        self._cache = cache
        self._news = PrefixChangeFeed(engine, cache, lambda: self.status.notify())
        self.status = StatusHub(identity, self._load, self._news)
        self.progress = Progress(work_counter=engine.work_counter)
        self.cache_tiers = CacheTiers(engine, cache)
        self._audit = IdleAudit(self.ledger, lambda: self._is_idle, lambda error: self.worker.fail_engine(error))
        self.worker = DecodeWorker(
            config,
            engine,
            fetch,
            exports,
            cache,
            self.cache_tiers,
            self.progress,
            changed=self._on_load_change,
            on_idle=self._audit.notify,
        )
        self._auditing: asyncio.Task[None] | None = None
        self._retry_scheduled = False

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on."""
        return self.worker.failed

    def start(self, thread: EngineThread) -> asyncio.Future[None]:
        """Run the decode loop on the engine thread; the future is done when the loop has stopped."""
        self._engine.watch_pages(self.on_pages_returned)
        self._auditing = asyncio.create_task(self._audit.run(), name="audit")
        self._auditing.add_done_callback(self._on_stopped)
        turning = thread.run(self.worker.decode_loop.run)
        turning.add_done_callback(self._on_stopped)
        return turning

    async def drain(self, grace_s: float) -> None:
        """Refuse new reservations; return when all attempts have ended and their blocks are stored or dropped.

        Attempts that are left after `grace_s` seconds are ended.
        """
        self._refuse()
        worker = self.worker
        try:
            async with asyncio.timeout(grace_s):
                await worker.idle.wait()
                await worker.write_backs.wait_finished()
                await self._cache.flush()
            _log.info("drained")
        except TimeoutError:
            _log.info("drained: %d sequences moved after %g s", worker.attempts.sequences, grace_s)
            worker.fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    async def ledger(self) -> Ledger:
        """The owners of pages, and whether the sums are right."""

        def listed() -> list[LedgerEntry]:
            now = self._asyncio.time()
            return [
                *ledger_entries(self.worker.attempts, self._engine, now),
                *self.worker.write_backs.entries(now),
            ]

        return await build_ledger(self.status.identity, self._engine, listed)

    async def close(self, turning: asyncio.Future[None]) -> None:
        """End all sessions, stop the loop, and wait for everything that was started."""
        self._refuse()
        for session in list(self.worker.sessions.values()):
            self.worker.close_session(session)
        self._engine.watch_pages(None)
        self._news.close()
        self.worker.decode_loop.stop()
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.gather(self._auditing, return_exceptions=True)
        await asyncio.gather(turning, return_exceptions=True)
        await self.worker.close()

    def on_pages_returned(self) -> None:
        """Called when pages have returned to the pool, from any thread."""
        if not self._retry_scheduled:
            self._retry_scheduled = True
            self._asyncio.call_soon_threadsafe(self._retry_allocations)

    def _retry_allocations(self) -> None:
        self._retry_scheduled = False
        self.worker.advance()

    @property
    def _is_idle(self) -> bool:
        return not self.worker.attempts and not self.worker.write_backs

    def _refuse(self) -> None:
        self.worker.refusal = self.worker.refusal or "the worker is draining"
        self.status.drain()

    def _on_stopped(self, running: asyncio.Future[None]) -> None:
        """Called when the engine thread or the audit has ended."""
        error = None if running.cancelled() else running.exception()
        if error is not None:
            _log.error("the worker can't continue: %s", error)
            self.worker.fail_engine(error)

    def _load(self) -> WorkerLoad:
        return self.worker.load.status(self.worker.attempts.requests_without_token)

    def _on_load_change(self) -> None:
        self.worker.load.set_page_metrics()
        self.status.notify()
