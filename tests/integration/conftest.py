from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import Server, running


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    """A Valkey of the test's own."""
    with running("valkey", tmp_path) as server:
        yield server
