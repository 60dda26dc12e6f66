"""The Valkey server of our own: it evicts, its death is logged, and it dies with its parent."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from redis import Redis, RedisError

from baton.kv.embedded import embedded_valkey
from tests.prefix_redis import BLOCKS, fill, found, hits, open_cache


def test_the_death_of_the_embedded_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with embedded_valkey() as url:
        reader = next(thread for thread in threading.enumerate() if thread.name == "valkey-log")
        with Redis.from_url(url) as client, suppress(RedisError):
            client.execute_command("SHUTDOWN", "NOSAVE", "FORCE")
        reader.join(5)
        assert [record.message for record in caplog.records] == [
            "the embedded Valkey ended with exit status 0: requests go on without it"
        ]
    caplog.clear()
    with embedded_valkey():
        pass
    assert not caplog.records, "it was told to stop"


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


def test_embedded_valkey_dies_with_its_parent() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom baton.kv.embedded import embedded_valkey\n"
            "with embedded_valkey() as url:\n    print(url, flush=True)\n    sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().decode().strip()
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
