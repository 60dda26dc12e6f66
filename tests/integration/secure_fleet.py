"""Fleets with everything on: mutual TLS, tickets, API keys and tenants, in one process with fake engines."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton import AsyncClient, bundled, keys
from baton.engine.fake import FakeEngine
from baton.rpc.channel import CLIENT_OPTIONS
from baton.rpc.tls import role_name
from tests.certificates import fleet, router, worker
from tests.fleet import Fleet
from tests.integration.router_rig import until

MAX_STREAMS = 2
STEP_S = 0.2
"""Of a decode step: long enough for streams to be open while others are asked for."""


@dataclass
class SecureFleet:
    prefill: Any
    decode: Any
    app: Any
    keys: dict[str, str]
    """API keys by who has them."""

    def client(self, who: str) -> AsyncClient:
        return AsyncClient(self.app.address, api_key=self.keys[who], ca=fleet() / "ca.crt")


def client_channel(address: str, own: tuple[Path, str] | None = None) -> grpc.aio.Channel:
    """A channel to a router as a client dials it, with a certificate of its `own` or none."""
    pem: list[bytes | None] = [(fleet() / "ca.crt").read_bytes(), None, None]
    if own is not None:
        directory, name = own
        pem[1:] = [(directory / f"{name}.{kind}").read_bytes() for kind in ("key", "crt")]
    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", role_name("router"))]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options)


@contextlib.asynccontextmanager
async def secure_fleet(folder: Path, **settings: Any) -> AsyncIterator[SecureFleet]:
    """The whole fleet; `settings` go to the router, whose keys are kept in `folder`."""
    key_file = folder / "keys.json"
    made = {
        "acme": keys.add(key_file, tenant="acme", max_streams=MAX_STREAMS),
        "beta": keys.add(key_file, tenant="beta"),
        "operator": keys.add(key_file, tenant="operator", admin=True),
    }
    async with Fleet(bundled.path()) as running:
        prefill = await running.prefill(engine=FakeEngine(), **worker(fleet(), "prefill"))
        decode = await running.decode(engine=FakeEngine(step_time=STEP_S), **worker(fleet(), "decode-1"))
        secure = {**router(fleet()), "api_keys": str(key_file), **settings}
        app = await running.start_router([prefill], [decode], **secure)
        await until(app, lambda: app.pool.serving)
        yield SecureFleet(prefill, decode, app, made)
