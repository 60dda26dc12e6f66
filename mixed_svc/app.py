"""Starts and stops a mixed worker: engine, both services, listeners. They stop in reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

from baton.config.worker import MixedConfig
from baton.engine.contract import Engine
from baton.telemetry import metrics
from baton.transfer.fetcher import ExportFetcher
from baton.worker.in_place import InPlaceTransfers
from baton.worker.start import WorkerAddresses, WorkerApp, WorkerRuntime, start_runtime
from baton.worker.status import WorkerLoad, WorkerRole
from decode_svc.app import decode_service
from decode_svc.attempts import PublishedBlocks
from decode_svc.worker import DecodeWorker
from mixed_svc.budget import PassBudget
from mixed_svc.passes import MixedPasses, PackedChunks
from prefill_svc.app import prefill_service
from prefill_svc.prefix import PeerFetcher
from prefill_svc.servicer import PrefillServicer
from prefill_svc.worker import PrefillWorker, SharedEngine


class MixedApp(WorkerApp):
    """A running mixed worker."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        addresses: WorkerAddresses,
        drain_s: float,
        decode: DecodeWorker,
        prefill: PrefillWorker,
        servicer: PrefillServicer,
    ) -> None:
        super().__init__(runtime, addresses, drain_s, [decode, prefill])
        self.decode = decode
        self.prefill = prefill
        self._servicer = servicer

    async def wait_finished(self) -> None:
        """As in WorkerApp; answers are sent too."""
        await super().wait_finished()
        await self._servicer.wait_sent()


@contextlib.asynccontextmanager
async def run(config: MixedConfig, *, engine: Engine | None = None) -> AsyncIterator[MixedApp]:
    """Run a mixed worker until the block ends; if `engine` is None, the settings decide which engine is built.

    An engine that is passed in is not closed; all its pages are free at the end. Raises ConfigError and ModelError.
    """
    async with contextlib.AsyncExitStack() as stack:
        base = await stack.enter_async_context(
            start_runtime(
                config,
                WorkerRole.MIXED,
                lambda: load_report(prefill, decode),
                engine=engine,
                cache_memory=config.cache_memory,
                lease_s=config.lease_s,
            )
        )
        fetcher = ExportFetcher(base.engine, base.tls, base.identity.consumer, config.fetch_silence_s)
        stack.push_async_callback(fetcher.close)
        decode, prefill = make_services(config, base, fetcher)
        servicer = PrefillServicer(prefill, base.engine.spec)
        addresses = await stack.enter_async_context(
            base.serve([prefill_service(servicer), decode_service(decode)], lambda: set_gauges(prefill, decode))
        )
        decode.start(base.thread)
        stack.push_async_callback(decode.close)
        prefill.start()
        # First, because its jobs end with the passes of decode's loop.
        stack.push_async_callback(prefill.close)
        stack.callback(base.status.drain)
        yield MixedApp(base, addresses, config.drain_s, decode, prefill, servicer)


def make_services(
    config: MixedConfig, base: WorkerRuntime, fetcher: ExportFetcher
) -> tuple[DecodeWorker, PrefillWorker]:
    """Make both services over one engine."""
    passes = MixedPasses(base.engine.spec, base.watchdog, PassBudget(config.itl_target_ms / 1e3))
    transfers = InPlaceTransfers()
    decode = DecodeWorker(config, base, fetcher, transfers=transfers, prompts=passes)

    def write_back(owner: str, digests: Sequence[bytes], stored: int) -> None:
        decode.write_backs.add(PublishedBlocks(owner, digests, stored))

    admission = decode.admission
    shared = SharedEngine(
        transfers, config.start_timeout_s, admission.may_take_for_prompt, admission.record_prompt, write_back
    )
    peers = PeerFetcher(base.engine, base.tls, base.identity.consumer, config.cache_budget_s)
    chunks = partial(PackedChunks, passes, decode.decode_loop, config.chunk_size)
    prefill = PrefillWorker(config, base, peers, chunks, shared)
    return decode, prefill


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
