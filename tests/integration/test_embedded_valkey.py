"""The Valkey server of our own: it evicts, is started again when it dies, and dies with its parent."""

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis, RedisError

from baton.errors import Unavailable
from baton.kv import embedded
from baton.kv.embedded import embedded_valkey
from tests.prefix_redis import BLOCKS, CLOCK, DIGESTS, fill, found, hits, open_cache


class Said(logging.Handler):
    """What was logged, and a wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def until(self, pattern: str) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: any(re.match(pattern, line) for line in self.lines), 60)
            assert there, self.lines


def pid_of(url: str) -> int:
    with Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


@pytest.fixture
def said() -> Iterator[Said]:
    handler, logger = Said(), logging.getLogger("baton.kv.embedded")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


async def test_a_killed_server_is_started_again(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is a miss, and no error; what comes after it is cached again, at the same URL."""
    monkeypatch.setattr(embedded, "PAUSE_S", 0.2)
    with embedded_valkey() as url:
        cache = open_cache(url)
        await fill(cache)
        assert await hits(cache) == (6, 6)
        os.kill(pid_of(url), signal.SIGKILL)
        assert await found(cache) == 0
        await asyncio.to_thread(said.until, "the embedded Valkey is there again, and empty, after 1 ends")
        async with asyncio.timeout(60):
            # The cache looks again after its own pause, and drops what it is given meanwhile.
            while not await found(cache):
                CLOCK.pause_over()
                for digest, block in zip(DIGESTS, BLOCKS, strict=True):
                    cache.put(digest, block)
                await cache.flush()
        assert await hits(cache) == (6, 6)
        await cache.close()
    assert said.lines == [
        "the embedded Valkey was killed by signal 9: requests go on without it; it is started again in 0.2 s (end 1)",
        "the embedded Valkey is there again, and empty, after 1 ends",
    ], "the end of the context is no death"


def test_the_pause_grows_to_its_limit(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PAUSE_S", 0.02)
    monkeypatch.setattr(embedded, "MOST_PAUSE_S", 0.05)
    with embedded_valkey() as url:
        for death in (1, 2, 3):
            os.kill(pid_of(url), signal.SIGKILL)
            said.until(f"the embedded Valkey is there again, and empty, after {death} ends")
    pauses = re.findall(r"again in (\S+) s \(end \d\)", "\n".join(said.lines))
    assert pauses == ["0.02", "0.04", "0.05"]


def test_a_server_that_is_to_stop_is_not_started_again(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PAUSE_S", 60.0)
    with embedded_valkey() as url:
        with Redis.from_url(url) as client, suppress(RedisError):
            client.execute_command("SHUTDOWN", "NOSAVE", "FORCE")
        said.until("the embedded Valkey ended with exit status 0: .* again in 60 s")
        begin = time.monotonic()
    assert time.monotonic() - begin < 30, "the pause was not waited out"
    assert len(said.lines) == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name == "valkey-keeper"]


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "get_binary_path", lambda: "/bin/false")
    with pytest.raises(Unavailable, match=r"Valkey did not start: .*it ended with exit status 1"), embedded_valkey():
        pytest.fail("it has started")
    assert not [thread.name for thread in threading.enumerate() if thread.name == "valkey-keeper"]


async def test_embedded_valkey_evicts_and_ends() -> None:
    with embedded_valkey(maxmemory=4 << 20) as url:
        directory = Path(url.removeprefix("unix://")).parent
        cache = open_cache(url)
        await fill(cache)
        assert await hits(cache) == (6, 6)
        for _ in range(20):
            for _ in range(1_000):
                cache.put(os.urandom(32), BLOCKS[0])
            await cache.flush()
        assert await found(cache) == 0, "the least recently used blocks went"
        await cache.close()
    assert not directory.exists()


@pytest.mark.parametrize("killed_before", [False, True])
def test_embedded_valkey_dies_with_its_parent(killed_before: bool) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import logging, sys\nfrom baton.kv.embedded import embedded_valkey\n"
            "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
            "with embedded_valkey() as url:\n    print(url, flush=True)\n    sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().decode().strip()
    if killed_before:
        os.kill(pid_of(url), signal.SIGKILL)
        assert b"was killed by signal 9" in parent.stdout.readline()
        assert b"is there again" in parent.stdout.readline()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(url.removeprefix("unix://"))
        connection.sendall(b"PING\r\n")
        assert connection.recv(7) == b"+PONG\r\n"
        parent.kill()
        parent.wait()
        assert connection.recv(1) == b"", "the server closed the connection by dying"
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)
    parent.communicate()
