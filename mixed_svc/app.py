"""Starts and stops a mixed worker: engine, both services, listeners. They stop in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.config.worker import MixedConfig
from baton.engine.contract import Engine
from baton.kv.prefix.contract import PrefixCache
from baton.telemetry import metrics
from baton.transfer.export import ExportRegistry
from baton.transfer.fetcher import ExportFetcher
from baton.transfer.transport import SERVICE as KV_SERVICE
from baton.transfer.transport import KvServicer
from baton.worker.health import Watchdog, WorkerAudit
from baton.worker.in_place import InPlaceTransfers
from baton.worker.prefix_cache import CacheAdmin, open_worker_cache
from baton.worker.start import Service, WorkerAddresses, serve_listeners, start_runtime
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerLoad, WorkerRole
from decode_svc.app import decode_service
from decode_svc.attempts import PublishedBlocks
from decode_svc.messages import FailureKind
from decode_svc.worker import DecodeWorker
from mixed_svc.budget import PassBudget
from mixed_svc.passes import MixedPasses, PackedChunks
from prefill_svc.app import prefill_service
from prefill_svc.prefix import PeerFetcher, PrefixBackends
from prefill_svc.servicer import PrefillServicer
from prefill_svc.worker import PrefillWorker, SharedEngine

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MixedApp:
    """A running mixed worker."""

    addresses: WorkerAddresses
    prefill: PrefillWorker
    decode: DecodeWorker
    servicer: PrefillServicer
    cache: PrefixCache
    status: StatusHub
    engine: Engine
    config: MixedConfig

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        return str(self.addresses)

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets an exception when the engine can't go on; then both services have failed."""
        return self.decode.failed

    async def drain(self) -> None:
        """Serve until the routers have left, and jobs, attempts, exports and write-backs have ended.

        It takes at most `drain_s` seconds. Attempts that are left after that are ended. Routers send nothing new once
        they have read that the worker drains.
        """
        grace_s = self.config.drain_s
        self.status.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self.status.wait_unwatched()
                self._refuse()
                await self.decode.wait_finished()
                await self.prefill.wait_finished()
                await self.servicer.wait_sent()
                # The last prompts in place may have left blocks to write back.
                await self.decode.wait_finished()
            _log.info("drained")
        except TimeoutError:
            self._refuse()
            _log.info("drained: %d sequences moved after %g s", self.decode.attempts.held_sequences, grace_s)
            self.decode.fail_all(FailureKind.DRAINING, f"the worker stops; {grace_s:g} s were given to finish")

    def _refuse(self) -> None:
        self.prefill.refuse()
        self.decode.refuse()


@contextlib.asynccontextmanager
async def run(config: MixedConfig, *, engine: Engine | None = None) -> AsyncIterator[MixedApp]:
    """Run a mixed worker until the block ends; if `engine` is None, the settings decide which engine is built.

    An engine that is passed in is not closed; all its pages are free at the end. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(start_runtime(config, WorkerRole.MIXED, engine=engine))
        spec = base.engine.spec
        cache = open_worker_cache(config, spec.kv_format, cache_memory=config.cache_memory)
        stack.push_async_callback(cache.close)
        await cache.check()
        exports = ExportRegistry(
            base.engine, base.identity.incarnation, lease_s=config.lease_s, shards=base.identity.shards
        )
        fetcher = ExportFetcher(base.engine, base.tls, base.identity.consumer, config.fetch_silence_s)
        stack.push_async_callback(fetcher.close)
        peers = PeerFetcher(base.engine, base.tls, base.identity.consumer, config.cache_budget_s)
        watchdog = Watchdog(work_counter=base.engine.work_counter)
        prefix_changes = PrefixChangeFeed(base.engine, cache, lambda: status.notify())
        stack.callback(prefix_changes.close)
        status = StatusHub(base.identity, lambda: load_report(prefill, decode), prefix_changes)
        cache_admin = CacheAdmin(base.engine, cache)
        audit = WorkerAudit(base.identity, base.engine)
        transfers = InPlaceTransfers()
        passes = MixedPasses(spec, watchdog, PassBudget(config.itl_target_ms / 1e3))
        decode = DecodeWorker(
            config,
            base.engine,
            base.identity,
            fetcher,
            exports,
            cache,
            cache_admin,
            watchdog,
            status.notify,
            audit=audit,
            transfers=transfers,
            prompts=passes,
        )

        def write_back(owner: str, digests: Sequence[bytes], stored: int) -> None:
            decode.write_backs.add(PublishedBlocks(owner, digests, stored))

        prefill = PrefillWorker(
            config,
            base.engine,
            base.identity,
            exports,
            PrefixBackends(cache, cache_admin, peers),
            audit,
            watchdog,
            status.notify,
            partial(PackedChunks, passes, decode.decode_loop, config.chunk_size),
            SharedEngine(transfers, config.start_timeout_s, decode.admission.may_take_for_prompt, write_back),
        )
        servicer = PrefillServicer(prefill, spec)
        addresses = await stack.enter_async_context(
            serve_listeners(
                config,
                status,
                watchdog,
                base.probes,
                control=[prefill_service(servicer), decode_service(decode)],
                kv=Service(KV_SERVICE, KvServicer(exports, base.tickets).add_to_server),
                tls=base.tls,
                tickets=base.tickets,
                ledger=audit.ledger,
                cache=cache_admin.list_tiers,
                clear=cache_admin.clear,
                fail=audit.fail,
                watch_failure=base.engine.watch_failure,
                measure=lambda: set_gauges(prefill, decode),
            )
        )
        decode.start(base.thread)
        stack.push_async_callback(decode.close)
        # First, because its jobs end with the passes of decode's loop.
        stack.push_async_callback(prefill.close)
        stack.callback(status.drain)
        yield MixedApp(addresses, prefill, decode, servicer, cache, status, base.engine, config)


def load_report(prefill: PrefillWorker, decode: DecodeWorker) -> WorkerLoad:
    """The load of both services; the rate is that of prompts."""
    prompts, load = prefill.load_report(), decode.load_report()
    return replace(
        load,
        pending_tokens=prompts.pending_tokens,
        tokens_per_second=prompts.tokens_per_second,
        # A prompt in place counts as an attempt.
        requests_without_token=load.requests_without_token + prefill.prompts_for_others,
    )


def set_gauges(prefill: PrefillWorker, decode: DecodeWorker) -> None:
    """Set the gauges of both services; those that both have are sums."""
    prefill.set_gauges()
    decode.set_gauges()
    metrics.WAITING.inc(prefill.waiting_prompts)
    metrics.RUNNING.inc(prefill.running_prompts)
