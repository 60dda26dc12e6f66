"""The start of every worker: checkpoint, tokenizer, engine on its thread, identity. The end runs in reverse order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton import executors
from baton.config.worker import WorkerConfig
from baton.digest import tokenizer_digest
from baton.engine.contract import Engine, EngineSpec
from baton.engine.process import pin_compute_threads
from baton.executors import WORK
from baton.kv.format import KvFormat
from baton.kv.prefix import PrefixCache, open_prefix_cache
from baton.model.checkpoint import resolve
from baton.rpc.tls import Tls
from baton.transfer.tickets import TicketVerifier
from baton.worker.listeners import check_addresses
from baton.worker.status import WorkerIdentity, WorkerRole, new_identity
from baton.worker.thread import EngineThread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRuntime:
    """The parts from which a service is built."""

    thread: EngineThread
    engine: Engine
    identity: WorkerIdentity
    tls: Tls | None
    tickets: TicketVerifier | None


@contextlib.asynccontextmanager
async def start_runtime(
    config: WorkerConfig, role: WorkerRole, *, engine: Engine | None = None, converts_kv: bool = False
) -> AsyncIterator[WorkerRuntime]:
    """Yield an engine on its thread, and the identity of the worker, until the block ends.

    `engine` None builds the torch engine from the settings; an engine that is passed in is not closed. Raises
    ModelError. Before it loads anything, raises ConfigError for bad certificate or ticket-key files, and for addresses
    that other machines could reach without these.
    """
    check_addresses(config)
    tls = Tls.load(config, role.value)
    tickets = TicketVerifier(config.ticket_keys) if config.ticket_keys else None
    async with contextlib.AsyncExitStack() as stack:
        thread = EngineThread(f"{role.value}-engine")
        stack.push_async_callback(thread.close)
        directory = await executors.run(WORK, resolve, config.checkpoint)
        digest = await executors.run(WORK, tokenizer_digest, directory)
        if engine is None:
            engine = await thread.run(_build, config)
            stack.callback(engine.close)
        _warn_of_small_memory(engine.spec)
        principal = tls.principal if tls else ""
        identity = new_identity(config, role, engine.spec, digest, converts_kv=converts_kv, principal=principal)
        yield WorkerRuntime(thread, engine, identity, tls, tickets)


def _warn_of_small_memory(spec: EngineSpec) -> None:
    """Warn if the KV memory can't hold a request of the model's length, because such requests will be refused."""
    if (tokens := spec.pages * spec.page_size) < spec.max_model_len:
        _log.warning(
            "the KV memory holds %d tokens, less than max_model_len, which is %d: longer requests are refused; "
            "raise --kv-memory or lower --max-model-len",
            tokens,
            spec.max_model_len,
        )


def open_cache(config: WorkerConfig, kv_format: KvFormat, *, cache_memory: int = 0) -> PrefixCache:
    """The worker's prefix cache: `cache_memory` bytes of host memory, then Redis.

    Raises ConfigError for a bad URL.
    """
    limits = None
    if config.redis not in ("", "none"):
        from baton.kv.prefix.redis import RedisLimits

        limits = RedisLimits(budget_s=config.cache_budget_s, ttl_s=config.cache_ttl_s)
    return open_prefix_cache(
        config.redis,
        kv_format,
        config.fleet_secret,
        cache_memory=cache_memory,
        limits=limits,
        writes=config.cache_writes,
    )


def _build(config: WorkerConfig) -> Engine:
    from baton.engine.factory import build

    engine = build(config.engine_config())
    if config.cpus:
        pin_compute_threads()
    return engine
