"""The Valkey server of our own: it evicts, comes back empty at the same URL when it dies, and leaves nothing."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from redis import Redis

from baton.errors import Unavailable
from baton.kv import embedded
from baton.kv.embedded import embedded_valkey
from tests.prefix_redis import BLOCKS, CLOCK, DIGESTS, fill, found, hits, open_cache


async def test_a_killed_server_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Its death is a miss, and no error; what comes after it is cached again, at the same URL."""
    caplog.set_level("INFO", "baton.process.supervisor")
    async with embedded_valkey() as url:
        cache = open_cache(url)
        await fill(cache)
        assert await hits(cache) == (6, 6)
        with Redis.from_url(url) as client:
            os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
        assert await found(cache) == 0
        async with asyncio.timeout(60):
            # The cache looks again after its own pause, and drops what it is given meanwhile.
            while not await found(cache):
                CLOCK.pause_over()
                for digest, block in zip(DIGESTS, BLOCKS, strict=True):
                    cache.put(digest, block)
                await cache.flush()
        assert await hits(cache) == (6, 6)
        await cache.close()
    killed, ready = (record.getMessage() for record in caplog.records if record.name == "baton.process.supervisor")
    assert killed.startswith("the embedded Valkey was killed by SIGKILL; its last line: ")
    assert killed.endswith("; it is started again at once")
    assert ready == "the embedded Valkey is ready again"


async def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "get_binary_path", lambda: "/bin/false")
    with pytest.raises(Unavailable, match=r"^the embedded Valkey ended with exit status 1; its last line: none"):
        async with embedded_valkey():
            pytest.fail("it has started")


async def test_an_embedded_valkey_evicts_blocks_and_ends() -> None:
    async with embedded_valkey(maxmemory=4 << 20) as url:
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
