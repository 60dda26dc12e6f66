"""`baton bench serve` with CA, client certificate, server name and API key: who is served, and who is told why not."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.bench.load.outcome import RequestFailed
from baton.bench.load.session import Load, LoadSettings, measure
from baton.bench.load.targets import Endpoint
from baton.cli.main import main
from baton.errors import ConfigError
from tests import openai_server as behaviour
from tests.certificates import fleet, settings
from tests.integration.secure_fleet import secure_fleet
from tests.openai_server import openai_server

OURS, THEIRS = fleet(), fleet("theirs")
OWN = {"ca": OURS / "ca.crt", "cert": OURS / "client.crt", "key": OURS / "client.key"}
RUN = ["--concurrency=2", "--requests=4", "--input-tokens=8", "--output-tokens=3", "--vocab-size=200", "--json=-"]


async def served(target: str, reach: Mapping[str, Any]) -> str:
    """The report of `baton bench serve`, of whose requests all finish."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in reach.items()]
    result = await asyncio.to_thread(CliRunner().invoke, main, ["bench", "serve", target, *RUN, *flags])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["requests"]["finished"] == 4
    return result.stdout


async def refused(url: str, reach: Mapping[str, Any]) -> str:
    """The kind of failure that a run with these credentials ends with."""
    wanted = LoadSettings(Endpoint(url, reach=reach, connections=2), [Load(concurrency=1)], requests=1, timeout_s=20.0)
    with pytest.raises(RequestFailed) as caught:
        _ = [each async for each in measure(wanted, Console(quiet=True))]
    return caught.value.kind


async def test_a_router_that_wants_keys_and_certificates(tmp_path: Path) -> None:
    async with secure_fleet(tmp_path, client_certs=True) as running:
        url = f"grpc://{running.app.address}"
        given = {**OWN, "api_key": running.keys["beta"], "server_name": "router.baton"}
        assert given["api_key"] not in await served(url, given)  # type: ignore[operator]
        assert await refused(url, given | {"api_key": None}) == "Unauthenticated"
        for wrong in (
            {"cert": None, "key": None},
            {"cert": THEIRS / "client.crt", "key": THEIRS / "client.key"},
            {"ca": THEIRS / "ca.crt"},
            {"server_name": "elsewhere.example"},
        ):
            assert await refused(url, given | wrong) == "Unavailable"
        with pytest.raises(ConfigError, match="key: is missing"):
            await refused(url, given | {"key": None})


async def test_an_http_server_that_wants_certificates() -> None:
    async with openai_server(behaviour.with_ids, tls=settings(OURS, "router")) as server:
        await served(server.url, {**OWN, "api_key": "sesame"})
        assert server.headers[-1]["authorization"] == "Bearer sesame"
        asked = len(server.bodies)
        for reach in (
            {"ca": OURS / "ca.crt"},
            {**OWN, "ca": THEIRS / "ca.crt"},
            {**OWN, "server_name": "elsewhere.example"},
        ):
            assert await refused(server.url, reach) in ("connection", "connection lost")
        assert len(server.bodies) == asked
