"""Fleets with everything on: mutual TLS, tickets, API keys and tenants, in one process with fake engines.

The certificates are made by `baton certs`, those of a stranger by the same command with another CA.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

import decode_svc.app
import prefill_svc.app
import router.app
from baton import AsyncClient, keys
from baton.cli import certs
from baton.config.decode import DecodeConfig
from baton.config.prefill import PrefillConfig
from baton.config.router import RouterConfig
from baton.engine.fake import FakeEngine
from baton.rpc.channel import CLIENT_OPTIONS, control_channel
from baton.rpc.tls import Tls, role_name
from tests.fleet import SECRET
from tests.integration.router_bench import until
from tests.integration.router_stubs import checkpoint

VOCABULARY = 300
MAX_STREAMS = 2
STEP_S = 0.2
"""Of a decode step: long enough for streams to be open while others are asked for."""


class Files:
    """Certificates of one CA, and the keys of its fleet's tickets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certs.make_all(folder)
        for name in ("decode-1", "decode-2"):
            certs.issue(folder, "decode", name)
        certs.issue(folder, "client", "client")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def settings(self, name: str, ca: str = "") -> dict[str, str]:
        """TLS settings of a process."""
        return {
            "tls_cert": self.path(f"{name}.crt"),
            "tls_key": self.path(f"{name}.key"),
            "tls_ca": ca or self.path("ca.crt"),
        }

    def tls(self, name: str, believes: Files | None = None) -> Tls:
        """A process's TLS; it may have been told to believe another CA, as a thief would."""
        own = Tls(*self.settings(name).values())
        if believes is not None:
            ca = Path(believes.path("ca.crt")).read_bytes()
            credentials = grpc.ssl_channel_credentials(
                ca, Path(self.path(f"{name}.key")).read_bytes(), Path(self.path(f"{name}.crt")).read_bytes()
            )
            own.channel_credentials = lambda: credentials  # type: ignore[method-assign]
        return own


@dataclass
class SecureFleet:
    """A prefill and a decode worker behind a router."""

    files: Files
    prefill: prefill_svc.app.App
    decode: decode_svc.app.App
    app: router.app.App
    keys: dict[str, str]
    """API keys by who has them."""

    def client(self, who: str) -> AsyncClient:
        """A client with that key, and no certificate."""
        return AsyncClient(self.app.address, api_key=self.keys[who], ca=self.files.path("ca.crt"))

    def channel(self) -> grpc.aio.Channel:
        """A channel to the router of a client without a certificate."""
        return client_channel(self.app.address, self.files)

    def control(self, name: str, address: str, role: str) -> grpc.aio.Channel:
        """A channel to a worker of `role` with the certificate `name`."""
        return control_channel(address, self.files.tls(name), role)


def client_channel(address: str, believes: Files, own: tuple[Files, str] | None = None) -> grpc.aio.Channel:
    """A channel to a router as a client dials it, with a certificate of its `own` or none."""
    pem: list[bytes | None] = [Path(believes.path("ca.crt")).read_bytes(), None, None]
    if own is not None:
        files, name = own
        pem[1:] = [Path(files.path(f"{name}.{kind}")).read_bytes() for kind in ("key", "crt")]
    options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", role_name("router"))]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=options)


@contextlib.asynccontextmanager
async def secure_fleet(folder: Path, files: Files, **settings: Any) -> AsyncIterator[SecureFleet]:
    """The whole fleet; `settings` go to the router. Fails if a worker still holds a page at the end."""
    model = str(checkpoint(folder))
    key_file = folder / "keys.json"
    made = {
        "acme": keys.add(key_file, tenant="acme", max_streams=MAX_STREAMS),
        "beta": keys.add(key_file, tenant="beta"),
        "operator": keys.add(key_file, tenant="operator", admin=True),
    }
    engines = [FakeEngine(vocab_size=VOCABULARY, step_time=STEP_S) for _ in range(2)]
    shared = {"model": model, "served_model_name": "m", "ticket_keys": files.path("ticket.pub")}
    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            prefill_svc.app.run(
                PrefillConfig(**shared, fleet_secret=SECRET, **files.settings("prefill")),
                engine=engines[0],
            )
        )
        decode = await stack.enter_async_context(
            decode_svc.app.run(DecodeConfig(**shared, **files.settings("decode-1")), engine=engines[1])
        )
        config = RouterConfig(
            model=model,
            served_model_name="m",
            prefill=(prefill.addresses.control,),
            decode=(decode.addresses.control,),
            ticket_key=files.path("ticket.key"),
            api_keys=str(key_file),
            fleet_secret=SECRET,
            **{**files.settings("router"), **settings},
        )
        app = await stack.enter_async_context(router.app.run(config))
        await until(app, lambda: app.pool.serving)
        yield SecureFleet(files, prefill, decode, app, made)
    for engine in engines:
        assert engine.audit() == {}
