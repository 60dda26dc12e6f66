"""A router in one piece: everything starts with `run`, and stops, in reverse, when its block ends."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.digest import tokenizer_digest
from baton.model.checkpoint import resolve
from baton.model.config import ModelConfig
from baton.pb import inference_pb2_grpc
from baton.rpc.server import Listener, listen
from baton.telemetry.ops import serve_ops
from baton.tokenizer import Tokenizer
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.intake import Intake, Model
from router.pipeline import Pipeline
from router.pool import Pool
from router.servicer import InferenceServicer

SERVICE = "baton.v1.Inference"


@dataclass(frozen=True, slots=True)
class App:
    """A running router; addresses are "host:port" as bound."""

    address: str
    ops_address: str
    pool: Pool
    _servicer: InferenceServicer
    _health: _Health
    _drain_s: float

    async def drain(self) -> None:
        """Refuse new requests and let the running ones finish, for `drain_s` seconds at most."""
        self._health.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._servicer.drain()


@contextlib.asynccontextmanager
async def run(config: RouterConfig) -> AsyncIterator[App]:
    """Start a router; it is healthy once a prefill and a decode worker that match are there.

    Raises ConfigError for an address that is refused or taken, ModelError for an unusable checkpoint.
    """
    model, longest, digest = await asyncio.to_thread(_load, config)
    pool = Pool(config, f"router-{socket.gethostname()}-{secrets.token_hex(4)}", digest)

    def max_model_len() -> int:
        lengths = [identity.max_model_len for identity in pool.identities] or [longest]
        return min([*lengths, config.max_model_len or max(lengths)])

    intake = Intake(model, max_model_len)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(pool.running())
        dispatcher = Dispatcher(pool, config)
        stack.callback(dispatcher.close)
        servicer = InferenceServicer(model, intake, pool, dispatcher, Pipeline(dispatcher, config))
        listener = await stack.enter_async_context(
            listen(
                config.grpc,
                insecure=config.insecure,
                add=lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server),
                services=[SERVICE],
                field="grpc",
            )
        )
        health = _Health(pool, listener)
        ops = await stack.enter_async_context(serve_ops(config.ops, ready=lambda: health.serving))
        yield App(listener.address, ops.address, pool, servicer, health, config.drain_s)


class _Health:
    """Serving while at least one pair of workers is, until the router drains."""

    def __init__(self, pool: Pool, listener: Listener) -> None:
        self._pool = pool
        self._listener = listener
        self._stopped = False
        self.serving = False
        """Whether requests succeed now."""
        pool.on_news(self._report)
        self._report()

    def stop(self) -> None:
        """Report that no request will be taken any more."""
        self._stopped = True
        self._report()

    def _report(self) -> None:
        serving = self._pool.serving and not self._stopped
        if serving != self.serving:
            self.serving = serving
            self._listener.set_serving(serving)


def _load(config: RouterConfig) -> tuple[Model, int, str]:
    """The model, its own greatest length, and the digest of its tokenizer."""
    directory = resolve(config.checkpoint)
    numbers = ModelConfig.from_pretrained(directory)
    digest = tokenizer_digest(directory)
    tokenizer = Tokenizer.load(directory) if digest else None
    model = Model(config.model_name, numbers.vocab_size, numbers.eos_token_ids, tokenizer)
    return model, numbers.max_position_embeddings, digest
