from collections.abc import Iterator
from pathlib import Path

import pytest

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
