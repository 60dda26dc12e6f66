"""A router process: `run` starts all of its parts, and stops them in reverse order when the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import grpc

from baton.config.router import RouterConfig
from baton.kv.hashing import request_salt
from baton.model.checkpoint import resolve, tokenizer_digest
from baton.model.config import ModelConfig, default_sampling
from baton.process import allocator, executors
from baton.process.executors import WORK
from baton.process.ops import serve_ops
from baton.rpc.admin import ADMIN_SERVICE, AdminSources, add_admin
from baton.rpc.channel import CONTROL_MESSAGE_BYTES
from baton.rpc.server import MAX_STREAMS, Listener, check_reach, listen
from baton.rpc.tls import Tls
from baton.telemetry.metrics import Exposition
from baton.tokenizer import Tokenizer
from baton.transfer.tickets import TicketSigner
from baton.worker.status import WorkerRole
from router.dispatcher import Dispatcher
from router.gauges import RouterGauges
from router.request_runner import RequestRunner
from router.serving.front_door import ApiKeys, FrontDoor, StallGuard
from router.serving.servicer import SERVICE, ApiKeyGuard, InferenceServicer
from router.serving.threads import TenantThreads
from router.serving.tokenizer_processes import TokenizerProcesses
from router.serving.validator import RequestValidator, ServedModel, largest_request
from router.workers.pool import WorkerPool

if TYPE_CHECKING:
    from router.serving.http import HttpListener

_CLIENT_ROLES = ("client", "admin")

_FINAL_READ_S = 2.0
"""Seconds for clients to read the end of their streams before the streams are cut."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterApp:
    """A running router; addresses are "host:port" as bound."""

    address: str
    ops_address: str
    pool: WorkerPool
    _door: FrontDoor
    _health: _Health
    _listener: Listener
    _config: RouterConfig
    failed: asyncio.Future[None]
    """A future that gets an exception if the router can't go on."""
    _http: HttpListener | None = None

    @property
    def http_address(self) -> str:
        """The address of the HTTP API; empty if there is none."""
        return self._http.address if self._http else ""

    @property
    def listening(self) -> str:
        """The addresses of its listeners."""
        http = f" http={self.http_address}" if self._http else ""
        return f"grpc={self.address}{http} ops={self.ops_address}"

    async def drain(self) -> None:
        """Accept no new requests after `drain_delay_s`, and let the running ones finish, for at most `drain_s` seconds.

        During the delay health is negative, so load balancers send no new connections, and clients leave the old ones,
        which are told to end at `connection_age_s`. So no client sends a request to a port that is closed.
        """
        self._health.stop()
        if (delay_s := self._config.drain_delay_s) > 0:
            _log.info("not ready; new requests are accepted for %g s more", delay_s)
            await asyncio.sleep(delay_s)
        self._listener.stop_accepting()
        if self._http:
            self._http.stop_accepting()
        if running := self._door.running:
            requests = f"{running} request{'s' if running > 1 else ''}"
            _log.warning("draining %s, up to %g s; press Ctrl-C again to stop now", requests, self._config.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await self._door.drain()


@contextlib.asynccontextmanager
async def run(config: RouterConfig, *, shared: bool = False) -> AsyncIterator[RouterApp]:
    """Start a router; it is healthy while there is a prefill worker with a matching decode worker.

    With `shared`, other processes may listen on the same port.
    Raises ConfigError if an address is refused or taken, or if a file of keys or certificates can't be used, and
    ModelError if the checkpoint can't be used.
    """
    keys = {"api_keys": config.api_keys}
    check_addresses(config)
    tls = Tls.load(config, "router")
    api_keys = ApiKeys(config.api_keys, config.fleet_secret)
    async with contextlib.AsyncExitStack() as stack:
        parts = await stack.enter_async_context(_running_parts(config, tls, api_keys))
        pool, door = parts.pool, parts.door
        listener = await stack.enter_async_context(
            listen(
                config.grpc,
                insecure=config.insecure,
                add=parts.add_services,
                services=[SERVICE, ADMIN_SERVICE],
                field="grpc",
                tls=tls,
                roles=_CLIENT_ROLES if config.client_certs else (),
                keys=keys,
                streams=max(MAX_STREAMS, 2 * config.queue_capacity),
                message_bytes=min(parts.largest_request, CONTROL_MESSAGE_BYTES),
                guards=[ApiKeyGuard(api_keys)],
                shared=shared,
                connection_age_s=config.connection_age_s,
            )
        )
        health = _Health(pool, listener)
        http = await stack.enter_async_context(_http(config, parts, health, tls, shared=shared))
        metrics = Exposition(
            "router",
            config.model_name,
            measure=RouterGauges(pool, parts.dispatcher.queue, parts.request_runner).set_gauges,
            model=lambda: {"fingerprint": door.model().fingerprint, "max_model_len": door.model().max_model_len},
        )
        ops = await stack.enter_async_context(
            serve_ops(config.ops, metrics, not_ready=lambda: "" if health.serving else "not ready")
        )
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stack.callback(failed.cancel)
        stack.push_async_callback(parts.stop)
        yield RouterApp(listener.address, ops.address, pool, door, health, listener, config, failed, http)


def check_addresses(config: RouterConfig) -> None:
    """Raise ConfigError if other machines could reach clients' addresses without the settings that this needs."""
    keys = {"api_keys": config.api_keys}
    for field in ("grpc", "http"):
        if address := getattr(config, field):
            check_reach(address, insecure=config.insecure, tls=bool(config.tls_cert), keys=keys, field=field)


@contextlib.asynccontextmanager
async def _http(
    config: RouterConfig, parts: _Parts, health: _Health, tls: Tls | None, *, shared: bool
) -> AsyncIterator[HttpListener | None]:
    """The HTTP API, if there is an address for it."""
    if not config.http:
        yield None
        return
    # It loads pydantic, which a router without HTTP does not need.
    from router.serving import http

    api = http.HttpApi(
        parts.door,
        parts.threads,
        largest=parts.largest_request,
        not_ready=lambda: "" if health.serving else "not ready",
        origins=config.http_origins,
        roles=_CLIENT_ROLES if config.client_certs else (),
    )
    async with http.listen(config.http, api, tls=tls, client_certs=config.client_certs, shared=shared) as listener:
        yield listener


@dataclass(frozen=True, slots=True)
class _Parts:
    """All of a router but its listeners."""

    router_id: str
    model: ServedModel
    pool: WorkerPool
    dispatcher: Dispatcher
    request_runner: RequestRunner
    door: FrontDoor
    threads: TenantThreads
    largest_request: int
    """Size of the largest request in bytes."""

    def add_services(self, server: grpc.aio.Server) -> None:
        """Register what clients and admins call."""
        InferenceServicer(self.door).add_to_server(server)
        ledger, tiers = self.request_runner.ledger, self.pool.prefixes.tiers
        add_admin(server, AdminSources(self.router_id, "router", ledger, tiers))

    async def stop(self) -> None:
        """Cancel the requests that a drain has left, tell their clients, and wait until all have ended."""
        self.request_runner.stop()
        if self.model.processes is not None:
            self.model.processes.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_READ_S):
                await self.door.drain()
        await self.request_runner.wait_stopped()


@contextlib.asynccontextmanager
async def _running_parts(config: RouterConfig, tls: Tls | None, api_keys: ApiKeys) -> AsyncIterator[_Parts]:
    """Load the tokenizer, and find and watch workers until the block ends."""
    signer = TicketSigner(config.ticket_key) if config.ticket_key else None
    model, longest, digest = await executors.run(WORK, _load, config)
    largest = largest_request(min(longest, config.max_model_len or longest), model.vocab_size)
    # Large requests are received, copied and parsed on the event loop, where page faults would hold up others.
    allocator.prefault(2 * largest)
    router_id = f"router-{socket.gethostname()}-{secrets.token_hex(4)}"
    pool = WorkerPool(config, router_id, digest, tls, signer)
    threads = TenantThreads(config.queue_capacity)
    validator = RequestValidator(
        model,
        partial(pool.max_model_len, longest),
        threads,
        partial(request_salt, config.fleet_secret),
        prefill_capacity=partial(pool.capacity, WorkerRole.PREFILL),
        decode_capacity=partial(pool.capacity, WorkerRole.DECODE),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(threads.close)
        await stack.enter_async_context(pool.run())
        dispatcher = Dispatcher(pool, config)
        stack.callback(dispatcher.close)
        request_runner = RequestRunner(pool, dispatcher, config, threads, router_id=router_id, signer=signer)
        stalls = StallGuard(config.client_stall_s)
        await stack.enter_async_context(stalls.run())
        timeout_s = config.request_timeout_s
        door = FrontDoor(
            model, validator, pool, dispatcher, request_runner, api_keys, stalls, request_timeout_s=timeout_s
        )
        yield _Parts(router_id, model, pool, dispatcher, request_runner, door, threads, largest)


class _Health:
    """The health of the router: serving while a pair of workers can serve, until the router drains."""

    def __init__(self, pool: WorkerPool, listener: Listener) -> None:
        self._pool = pool
        self._listener = listener
        self._stopped = False
        self.serving = False
        """Whether requests succeed now."""
        pool.subscribe(self._report)
        self._report()

    def stop(self) -> None:
        """Report from now on that the router is not serving."""
        self._stopped = True
        self._report()

    def _report(self) -> None:
        serving = self._pool.serving and not self._stopped
        if serving != self.serving:
            self.serving = serving
            self._listener.set_serving(serving)


def _load(config: RouterConfig) -> tuple[ServedModel, int, str]:
    """The model, the most tokens of its context, and the digest of its tokenizer."""
    directory = resolve(config.checkpoint)
    numbers = ModelConfig.from_pretrained(directory)
    digest = tokenizer_digest(directory)
    tokenizer = Tokenizer.load(directory) if digest else None
    processes = TokenizerProcesses(directory, digest, tokenizer) if tokenizer else None
    if tokenizer is None:
        _log.warning("the checkpoint has no tokenizer.json: prompts must be token ids, and output has no text")
    sampling = default_sampling(directory) if config.generation_config == "auto" else {}
    if sampling:
        values = ", ".join(f"{name} {value}" for name, value in sampling.items())
        _log.info("sampling defaults from generation_config.json: %s", values)
    model = ServedModel(config.model_name, numbers.vocab_size, numbers.eos_token_ids, tokenizer, processes, sampling)
    return model, numbers.max_position_embeddings, digest
