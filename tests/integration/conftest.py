from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.router_rig import RouterRig, router_rig
from tests.redis_server import BINARIES, Server, running


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    with running("valkey", tmp_path, tcp=True) as server:
        yield server


@pytest.fixture(params=list(BINARIES))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A Valkey and a Redis of the test's own, in turn."""
    with running(request.param, tmp_path, tcp=True) as server:
        yield server


@pytest.fixture
async def b(tmp_path: Path) -> AsyncIterator[RouterRig]:
    """A router, and one stub worker of each role."""
    async with router_rig(tmp_path) as rig:
        yield rig
