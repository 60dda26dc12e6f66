"""`baton bench serve` with CA, client certificate, server name and API key: who is served, and who is told why not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton import keys
from baton.bench.load.outcome import RequestFailed
from baton.bench.load.session import Load, Settings, measured
from baton.bench.load.targets import Place
from baton.engine.fake import FakeEngine
from baton.errors import ConfigError
from baton.rpc.channel import control_channel
from tests import openai_server as behaviour
from tests.certificates import fleet, settings, tls
from tests.checkpoints import make_checkpoint
from tests.fleet import SECRET, Fleet
from tests.integration.test_tls import until_serving
from tests.openai_server import openai_server

WAIT_S = 60
RUN = ["--concurrency=2", "--requests=4", "--input-tokens=8", "--output-tokens=3", "--vocab-size=200", "--json=-"]


async def command(target: str, *flags: str) -> tuple[int, str, str]:
    """Exit status, standard output and error of `baton bench serve`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton", "bench", "serve", target, *RUN, *flags), stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def refused(url: str, reach: Mapping[str, Any]) -> RequestFailed:
    """What a run with these credentials ends with."""
    wanted = Settings(Place(url, reach=reach, connections=2), [Load(concurrency=1)], requests=1, timeout_s=20.0)
    with pytest.raises(RequestFailed) as caught:
        _ = [each async for each in measured(wanted, Console(quiet=True))]
    return caught.value


async def test_a_router_that_wants_keys_and_certificates(tmp_path: Path) -> None:
    ours, theirs = fleet(), fleet("theirs")
    api_keys = tmp_path / "api_keys.json"
    own = {"tls_ca": str(ours / "ca.crt"), "ticket_keys": str(ours / "ticket.pub")}
    given: dict[str, Any] = {
        "api_key": keys.add(api_keys, tenant="acme"),
        "ca": ours / "ca.crt",
        "cert": ours / "client.crt",
        "key": ours / "client.key",
        "server_name": "router.baton",
    }
    async with Fleet(make_checkpoint("llama", tmp_path)) as running:
        prefill = await running.prefill(
            engine=FakeEngine(vocab_size=256), fleet_secret=SECRET, **settings(ours, "prefill") | own
        )
        decode = await running.decode(engine=FakeEngine(vocab_size=256), **settings(ours, "decode-1") | own)
        signs = {"ticket_key": str(ours / "ticket.key"), "fleet_secret": SECRET, "api_keys": str(api_keys)}
        app = await running.start_router([prefill], [decode], **settings(ours, "router"), **signs, client_certs=True)
        await until_serving(app, control_channel(app.address, tls("admin")))
        url = f"grpc://{app.address}"

        status, out, err = await command(url, *(f"--{name.replace('_', '-')}={given[name]}" for name in given))
        assert status == 0, err
        found = json.loads(out)
        assert found["requests"]["finished"] == 4
        assert given["api_key"] not in out

        assert (await refused(url, given | {"api_key": None})).kind == "Unauthenticated"
        assert (await refused(url, given | {"cert": None, "key": None})).kind == "Unavailable"
        stranger = {name: theirs / f"client.{kind}" for name, kind in (("cert", "crt"), ("key", "key"))}
        assert (await refused(url, given | stranger)).kind == "Unavailable"
        assert (await refused(url, given | {"ca": theirs / "ca.crt"})).kind == "Unavailable"
        assert (await refused(url, given | {"server_name": "elsewhere.example"})).kind == "Unavailable"
        with pytest.raises(ConfigError, match="key: is missing"):
            await refused(url, given | {"key": None})


async def test_an_http_server_that_wants_certificates() -> None:
    ours, theirs = fleet(), fleet("theirs")
    flags = [f"--ca={ours / 'ca.crt'}", f"--cert={ours / 'client.crt'}", f"--key={ours / 'client.key'}"]
    async with openai_server(behaviour.with_ids, tls=settings(ours, "router")) as server:
        status, out, err = await command(server.url, *flags, "--api-key=sesame")
        assert status == 0, err
        assert json.loads(out)["requests"]["finished"] == 4
        assert server.headers[-1]["authorization"] == "Bearer sesame"
        asked = len(server.bodies)
        own = {"cert": ours / "client.crt", "key": ours / "client.key"}
        for reach in ({"ca": ours / "ca.crt"}, {**own, "ca": theirs / "ca.crt"}):
            assert (await refused(server.url, reach)).kind in ("connection", "connection lost")
        elsewhere = {**own, "ca": ours / "ca.crt", "server_name": "elsewhere.example"}
        assert (await refused(server.url, elsewhere)).kind in ("connection", "connection lost")
        assert len(server.bodies) == asked
