"""The Redis prefix cache against real servers that stall, die, restart, lie, fill up and forget."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from redis import Redis, RedisError

from baton.errors import ConfigError
from baton.kv.embedded import embedded_valkey
from baton.kv.format import KvFormat, KvPart
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix import NullPrefixCache, open_prefix_cache
from baton.kv.prefix.breaker import Breaker
from baton.kv.prefix.record import RecordCodec
from baton.kv.prefix.redis import KEY_PREFIX, RedisLimits, RedisPrefixCache
from tests.redis_server import BINARIES, Server, running

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=4)
CODEC = RecordCodec(FORMAT, "secret")
DIGESTS = block_digests(chain_root("model", FORMAT.digest), list(range(24)), 4)
BLOCKS = [os.urandom(CODEC.payload_bytes) for _ in DIGESTS]
KEYS = [KEY_PREFIX + digest.hex() for digest in DIGESTS]
BUDGET_S = 0.25


@pytest.fixture(params=list(BINARIES))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path, tcp=True) as server:
        yield server


@pytest.fixture
async def cache(server: Server) -> AsyncIterator[RedisPrefixCache]:
    cache = open_cache(server.url)
    yield cache
    await cache.close()


def open_cache(url: str, **limits: float) -> RedisPrefixCache:
    bounds = RedisLimits(budget_s=BUDGET_S, **limits)  # type: ignore[arg-type]
    return RedisPrefixCache(url, FORMAT, "secret", bounds, Breaker(first_s=0.05, most_s=0.1))


async def fill(cache: RedisPrefixCache) -> None:
    assert all(cache.put(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True))
    await cache.flush()


def faults(reason: str) -> float:
    return REGISTRY.get_sample_value("baton_prefix_faults_total", {"reason": reason}) or 0.0


def dropped() -> float:
    return REGISTRY.get_sample_value("baton_prefix_blocks_total", {"outcome": "dropped"}) or 0.0


async def hits(cache: RedisPrefixCache) -> tuple[int, int]:
    """Blocks found by look-up and by fetch."""
    found = await cache.lookup(DIGESTS)
    payloads = await cache.fetch(DIGESTS)
    assert [bytes(payload) for payload in payloads] == BLOCKS[: len(payloads)]
    return found, len(payloads)


async def test_what_one_wrote_another_reads(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    other = open_cache(server.url)
    assert await hits(other) == (6, 6)
    await other.close()


async def test_records_expire(server: Server) -> None:
    cache = open_cache(server.url, ttl_s=77)
    await fill(cache)
    with server.client() as client:
        assert 0 < client.ttl(KEYS[0]) <= 77
    await cache.close()


async def test_bad_values_are_misses_by_reason(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    good = CODEC.encode(DIGESTS[2], BLOCKS[2])
    forged = RecordCodec(FORMAT, "guess").encode(DIGESTS[2], BLOCKS[2])
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    swapped = CODEC.encode(DIGESTS[3], BLOCKS[3])
    with server.client() as client:
        for value, reason in [(forged, "forged"), (flipped, "corrupt"), (swapped, "misplaced")]:
            before = faults(reason)
            client.set(KEYS[2], value)
            assert await hits(cache) == (6, 2)
            assert faults(reason) == before + 1
        for value in (b"", b"short", good + b"x"):
            client.set(KEYS[2], value)
            assert await hits(cache) == (2, 2)
        client.set(KEYS[2], good)
        assert await hits(cache) == (6, 6)


async def test_a_key_of_another_type_is_a_miss(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    before = faults("wrong_type")
    with server.client() as client:
        client.delete(KEYS[1])
        client.rpush(KEYS[1], b"a list")
    assert await hits(cache) == (1, 1)
    assert faults("wrong_type") == before + 2


async def test_eviction_between_look_up_and_fetch_shortens_the_hit(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    assert await cache.lookup(DIGESTS) == 6
    with server.client() as client:
        client.delete(KEYS[4])
    assert len(await cache.fetch(DIGESTS)) == 4


async def test_a_killed_server_is_a_miss_and_its_successor_is_used(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    server.kill()
    before = faults("connection")
    assert await hits(cache) == (0, 0)
    assert faults("connection") == before + 1
    server.start()
    async with asyncio.timeout(5):
        while not cache.put(DIGESTS[0], BLOCKS[0]):
            await cache.lookup(DIGESTS)
    await cache.flush()
    assert await hits(cache) == (1, 1)


async def test_killed_in_the_middle_of_a_fetch(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    with server.client() as client:
        client.client_pause(5_000)
    fetch = asyncio.create_task(cache.fetch(DIGESTS))
    await asyncio.sleep(0.05)
    server.kill()
    assert await fetch == []


async def test_a_stall_costs_one_budget_not_one_each_time(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    before = faults("timeout")
    with server.client() as client:
        client.client_pause(1_000)
    started = time.monotonic()
    assert await hits(cache) == (0, 0)
    assert time.monotonic() - started < 4 * BUDGET_S, "one budget, with slack"
    assert faults("timeout") == before + 1, "the fetch was not tried"
    async with asyncio.timeout(10):
        while await cache.lookup(DIGESTS) != 6:
            pass  # most of these do not leave the process
    assert faults("timeout") - before < 10
    assert await hits(cache) == (6, 6)


async def test_a_full_server_drops_writes_and_still_answers(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    with server.client() as client:
        client.delete(KEYS[3])
        client.config_set("maxmemory", "1")
    before, lost = faults("oom"), dropped()
    assert cache.put(DIGESTS[3], BLOCKS[3])
    await cache.flush()
    assert (faults("oom"), dropped()) == (before + 1, lost + 1)
    assert await hits(cache) == (3, 3)


async def test_a_read_only_replica_serves_reads(server: Server, cache: RedisPrefixCache) -> None:
    await fill(cache)
    before = faults("readonly")
    with server.client() as client:
        client.replicaof("127.0.0.1", 1)
        client.config_set("replica-serve-stale-data", "yes")
    cache.put(os.urandom(32), BLOCKS[0])
    await cache.flush()
    assert faults("readonly") == before + 1
    assert await hits(cache) == (6, 6)


async def test_the_write_queue_is_bounded_and_drops(server: Server) -> None:
    cache = open_cache(server.url, queue_bytes=3 * CODEC.payload_bytes)
    before = dropped()
    taken = [cache.put(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True)]
    assert taken == [True] * 3 + [False] * 3
    assert dropped() == before + 3
    await cache.flush()
    assert await cache.lookup(DIGESTS) == 3
    assert cache.put(DIGESTS[3], BLOCKS[3])
    await cache.close()
    assert not cache.put(DIGESTS[4], BLOCKS[4])


async def test_close_does_not_wait_for_a_stalled_server(server: Server) -> None:
    cache = open_cache(server.url)
    with server.client() as client:
        client.client_pause(60_000)
    assert cache.put(DIGESTS[0], BLOCKS[0])
    started = time.monotonic()
    await cache.close()
    assert time.monotonic() - started < 5


async def test_close_leaves_no_connection(server: Server) -> None:
    cache = open_cache(server.url)
    await fill(cache)
    await asyncio.gather(*(cache.lookup(DIGESTS) for _ in range(4)))
    with server.client() as client:
        assert len(client.client_list()) > 1
        await cache.close()
        async with asyncio.timeout(5):
            while len(await asyncio.to_thread(client.client_list)) > 1:
                pass  # the server sees the end of a connection in its own time


async def test_password_and_wrong_password(tmp_path: Path) -> None:
    with running("valkey", tmp_path, "--requirepass", "pass", tcp=True) as server:
        before = faults("auth")
        wrong = open_cache(server.url.replace("redis://", "redis://:guess@"))
        assert await hits(wrong) == (0, 0)
        assert faults("auth") == before + 1
        right = open_cache(server.url.replace("redis://", "redis://:pass@"))
        await fill(right)
        assert await hits(right) == (6, 6)
        await wrong.close()
        await right.close()


async def test_nothing_listens() -> None:
    cache = open_cache("redis://127.0.0.1:1")
    assert await hits(cache) == (0, 0)
    assert not cache.put(DIGESTS[0], BLOCKS[0]), "not worth queueing"
    await cache.close()


async def test_a_lost_store_is_logged_once_and_so_is_its_return(
    server: Server, cache: RedisPrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [record.levelname for record in caplog.records if record.name == "baton.kv.prefix.redis"]

    caplog.set_level("INFO")
    await cache.check()
    assert said() == []
    server.kill()
    for _ in range(3):
        await cache.check()
        await asyncio.sleep(0.11)  # longer than the breaker's pause
    assert said() == ["WARNING"]
    server.start()
    await cache.check()
    await cache.check()
    assert said() == ["WARNING", "INFO"]


def test_the_death_of_the_embedded_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with embedded_valkey() as url:
        reader = next(thread for thread in threading.enumerate() if thread.name == "valkey-log")
        with Redis.from_url(url) as client, suppress(RedisError):
            client.execute_command("SHUTDOWN", "NOSAVE", "FORCE")
        reader.join(5)
        assert [record.message for record in caplog.records] == [
            "the embedded Valkey ended with exit status 0: requests go on without the prefix cache"
        ]
    caplog.clear()
    with embedded_valkey():
        pass
    assert not caplog.records, "it was told to stop"


async def test_long_chains_take_several_round_trips(
    server: Server, cache: RedisPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv.prefix.redis.LOOKUP_KEYS", 2)
    monkeypatch.setattr(cache, "_batch", 4)
    await fill(cache)
    assert await hits(cache) == (6, 6)
    with server.client() as client:
        client.delete(KEYS[3])
    assert await hits(cache) == (3, 3)


async def test_urls() -> None:
    assert isinstance(open_prefix_cache("none", FORMAT, ""), NullPrefixCache)
    for url in ("memcached://host", "redis:/host", "embedded", "http://user:hidden@host"):
        with pytest.raises(ConfigError, match="redis: ") as caught:
            open_prefix_cache(url, FORMAT, "s")
        assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match="redis: ") as caught:
        open_prefix_cache("redis://:hidden@host:port", FORMAT, "s")
    assert "hidden" not in str(caught.value)


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
        assert await cache.lookup(DIGESTS) == 0, "the least recently used blocks went"
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
