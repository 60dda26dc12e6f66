"""The Redis prefix cache behind a real sentinel: the master is found, and its successor after it died."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prefix_redis import BLOCKS, CLOCK, faults, fill, found, hits, open_cache
from tests.redis_server import SERVICE, Server, free_port, sentinels


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Server, Server, Server]]:
    with sentinels(tmp_path) as servers:
        yield servers


async def test_the_master_is_used_and_a_failover_is_followed(service: tuple[Server, Server, Server]) -> None:
    master, replica, sentinel = service
    nobody = free_port()
    cache = open_cache(f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{sentinel.port}/{SERVICE}")
    await fill(cache)
    assert await hits(cache) == (6, 6)
    with master.client() as client:
        assert client.dbsize() == 6
        assert client.wait(1, 5000) == 1
    with replica.client() as client:
        assert client.info("commandstats").get("cmdstat_strlen") is None, "replicas are not read"
    master.kill()
    before = faults("connection")
    assert await hits(cache) == (0, 0)
    assert faults("connection") == before + 1
    async with asyncio.timeout(60):
        while await found(cache) != 6:
            CLOCK.pause_over()
            await cache.check()
    assert await hits(cache) == (6, 6)
    await cache.clear(shared=True)
    await fill(cache)
    with replica.client() as client:
        assert (client.dbsize(), client.info("replication")["role"]) == (6, "master")
    await cache.close()


async def test_a_sentinel_that_does_not_answer_takes_no_time(service: tuple[Server, Server, Server]) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1") as silent:
        port = silent.sockets[0].getsockname()[1]
        cache = open_cache(f"redis+sentinel://127.0.0.1:{port},127.0.0.1:{service[2].port}/{SERVICE}")
        before = faults("timeout")
        await fill(cache)
        assert await hits(cache) == (6, 6)
        assert faults("timeout") == before
        await cache.close()


async def test_a_master_that_refuses_a_write_is_left(service: tuple[Server, Server, Server]) -> None:
    master, replica, sentinel = service
    cache = open_cache(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}?client_name=cache")
    with master.client() as client:

        def connected() -> int:
            return sum(1 for each in client.client_list() if each["name"] == "cache")

        await fill(cache)
        assert await hits(cache) == (6, 6)
        assert connected() > 0
        before = faults("readonly")
        client.replicaof("127.0.0.1", replica.port)
        assert cache.put(bytes(32), BLOCKS[0])
        await cache.flush()
        assert faults("readonly") == before + 1
        async with asyncio.timeout(60):
            while await asyncio.to_thread(connected):
                pass  # the server sees the end of a connection in its own time
    await cache.close()


async def test_an_unknown_service_is_a_miss(service: tuple[Server, Server, Server]) -> None:
    cache = open_cache(f"redis+sentinel://127.0.0.1:{service[2].port}/other")
    assert await hits(cache) == (0, 0)
    (tier,) = await cache.stats()
    assert "No master found for 'other'" in tier.state
    await cache.close()
