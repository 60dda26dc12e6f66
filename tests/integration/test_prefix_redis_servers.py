"""The Redis prefix cache over a real cluster, and behind a real sentinel: servers that move, die and are replaced."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot

from baton.kv.prefix.redis.cache import RedisPrefixCache, key_prefix
from tests.prefix_redis import (
    BLOCKS,
    CLOCK,
    CODEC,
    DIGESTS,
    FORMAT,
    KEYS,
    dropped,
    faults,
    fill,
    found,
    hits,
    open_cache,
)
from tests.redis_server import SERVICE, SLOTS, Server, cluster, free_port, sentinels

MASTERS = 3


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    with cluster(tmp_path, MASTERS) as servers:
        yield servers


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A cluster that no test kills anything of."""
    with cluster(tmp_path_factory.mktemp("cluster"), MASTERS) as servers:
        yield servers


@pytest.fixture
def shared(living: list[Server]) -> list[Server]:
    for server in living:
        with server.client() as client:
            client.flushall()
            client.config_resetstat()
    return living


async def until_found(cache: RedisPrefixCache) -> None:
    """Wait until the cache has found the new master."""
    async with asyncio.timeout(60):
        while await found(cache) != 6:
            CLOCK.pause_over()
            await cache.check()
    assert await hits(cache) == (6, 6)


@pytest.fixture
async def cache(servers: list[Server]) -> AsyncIterator[RedisPrefixCache]:
    cache = open_cache(url(servers[:2]))
    yield cache
    await cache.close()


def url(servers: list[Server]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def owner(key: str) -> int:
    slot = key_slot(key.encode())
    return next(number for number in range(MASTERS) if slot < SLOTS * (number + 1) // MASTERS)


def commands(client: Redis, name: str) -> int:
    stats = client.info("commandstats").get(f"cmdstat_{name}", {})
    return int(stats.get("calls", 0))


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_blocks_are_spread_found_and_cleared(shared: list[Server]) -> None:
    servers, cache = shared, open_cache(url(shared[:2]))
    await fill(cache)
    other = open_cache(url(servers[2:]))
    assert await hits(other) == (6, 6)
    clients = [server.client() for server in servers]
    held = [{key.decode() for key in client.scan_iter()} for client in clients]
    assert held == [{key for key in KEYS if owner(key) == number} for number in range(MASTERS)]
    assert [commands(client, "strlen") for client in clients] == [len(keys) for keys in held]
    (tier,) = await cache.stats()
    assert (tier.blocks, tier.state) == (6, "")
    (cleared,) = await other.clear(shared=True)
    assert cleared.blocks == 6
    assert await hits(cache) == (0, 0)
    assert not any(client.dbsize() for client in clients)
    for client in clients:
        client.close()
    await other.close()
    await cache.close()


async def test_a_dead_node_makes_only_its_keys_misses(servers: list[Server], cache: RedisPrefixCache) -> None:
    await fill(cache)
    victim = owner(KEYS[3])
    gone = [index for index, key in enumerate(KEYS) if owner(key) == victim]
    servers[victim].kill()
    before = faults("connection")
    assert await hits(cache) == (gone[0], gone[0])
    assert faults("connection") == before + 1, "the fetch left the dead node alone"
    for index, digest in enumerate(DIGESTS):
        assert len(await cache.fetch([digest])) == (index not in gone)
    (tier,) = await cache.stats()
    assert tier.state.startswith("1 of 3 nodes out of reach: ")
    lost = dropped()
    assert [cache.put(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True)] == [
        index not in gone for index in range(6)
    ]
    assert dropped() == lost + len(gone)
    await cache.flush()


async def test_a_stalled_node_costs_one_budget_and_holds_up_no_other(shared: list[Server]) -> None:
    # Long enough for the other nodes on a busy machine.
    cache = open_cache(url(shared), budget_s=2.0)
    await fill(cache)
    victim = owner(KEYS[3])
    first = next(index for index, key in enumerate(KEYS) if owner(key) == victim)
    before = faults("timeout")
    with shared[victim].stalled():
        for _ in range(3):
            assert await hits(cache) == (first, first)
        assert faults("timeout") == before + 1
    async with asyncio.timeout(60):
        while await hits(cache) != (6, 6):
            CLOCK.pause_over()
    await cache.close()


async def test_slots_that_move_are_followed(servers: list[Server], cache: RedisPrefixCache) -> None:
    await fill(cache)
    old, slot = owner(KEYS[2]), key_slot(KEYS[2].encode())
    new = (old + 1) % MASTERS
    source, target = servers[old].client(), servers[new].client()
    ids = {number: servers[number].client().execute_command("CLUSTER", "MYID") for number in (old, new)}
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
    source.migrate("127.0.0.1", servers[new].port, KEYS[2], 0, 1000)
    moved = faults("moved")
    assert await hits(cache) == (2, 2), "on its way: a miss"
    assert faults("moved") == moved + 2
    for client in (target, source):
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
    async with asyncio.timeout(60):
        while await found(cache) != 6:
            CLOCK.pause_over()  # the first miss makes it look where the slot is now
    assert await hits(cache) == (6, 6)
    moved = faults("moved")
    assert cache.put(DIGESTS[2], BLOCKS[2])
    await cache.flush()
    assert await hits(cache) == (6, 6)
    assert faults("moved") == moved, "and learnt"
    source.close()
    target.close()


async def test_a_failover_is_followed(tmp_path: Path) -> None:
    with cluster(tmp_path, MASTERS, replicas=1, node_timeout_ms=500) as servers:
        cache = open_cache(url(servers[:MASTERS]))
        await fill(cache)
        with servers[0].client() as client:
            assert client.wait(1, 5000) == 1
        servers[0].kill()
        await until_found(cache)
        await fill(cache)
        await cache.close()


async def test_a_cluster_out_of_reach_is_a_miss_until_it_is_there(tmp_path: Path) -> None:
    with cluster(tmp_path, MASTERS, node_timeout_ms=500) as servers:
        for server in servers:
            server.kill()
        cache = open_cache(url(servers))
        before = faults("connection")
        assert await hits(cache) == (0, 0)
        assert faults("connection") == before + 1
        assert not cache.put(DIGESTS[0], BLOCKS[0])
        (tier,) = await cache.stats()
        assert tier.state.startswith("out of reach: ")
        for server in servers:
            server.start()
        async with asyncio.timeout(60):
            while await found(cache) != 6:  # they take a while to find each other, and refuse writes until then
                CLOCK.pause_over()
                for digest, block in zip(DIGESTS, BLOCKS, strict=True):
                    cache.put(digest, block)
                await cache.flush()
        assert await hits(cache) == (6, 6)
        await cache.close()


async def test_a_cluster_that_does_not_answer_costs_one_budget_not_one_each_time() -> None:
    async with contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(await asyncio.start_server(say_nothing, "127.0.0.1")) for _ in "1234"]
        hosts = ",".join(f"127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in silent)
        cache = open_cache(f"redis+cluster://{hosts}", budget_s=1.0)
        stack.push_async_callback(cache.close)
        before = faults("timeout")
        assert await asyncio.gather(found(cache), found(cache)) == [0, 0]
        assert faults("timeout") == before + 1
        (tier,) = await cache.stats()
        assert tier.state == "out of reach: no answer in time"
        # Nobody waits for that again, not for a turn of the loop.
        asking = asyncio.create_task(found(cache))
        await asyncio.sleep(0)
        assert asking.done()
        assert await asking == 0


async def test_large_chains_from_all_nodes(shared: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kv.prefix.redis.cache.WINDOW_BYTES", 3 * CODEC.record_bytes)
    cache = open_cache(url(shared))
    digests = [os.urandom(32) for _ in range(200)]
    blocks = [os.urandom(CODEC.payload_bytes) for _ in digests]
    assert all(map(cache.put, digests, blocks))
    await cache.flush()
    assert (await cache.lookup(digests)).blocks == 200
    assert [bytes(payload) for payload in await cache.fetch(digests)] == blocks
    gone = key_prefix(FORMAT) + digests[150].hex()
    with shared[owner(gone)].client() as client:
        client.delete(gone)
    assert [bytes(payload) for payload in await cache.fetch(digests)] == blocks[:150]
    await cache.close()


async def test_hash_slots_without_a_node_are_used_again_once_assigned(servers: list[Server]) -> None:
    lost = [number for number, key in enumerate(KEYS) if owner(key) == owner(KEYS[0])]
    slots = sorted({key_slot(KEYS[number].encode()) for number in lost})
    for server in servers:
        with server.client() as client:
            client.execute_command("CLUSTER", "DELSLOTS", *slots)
    cache = open_cache(url(servers))
    before = faults("cluster_down")
    await fill(cache)
    assert faults("cluster_down") == before + len(lost)
    with servers[owner(KEYS[0])].client() as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *slots)
    async with asyncio.timeout(60):
        while not await found(cache):
            assert cache.put(DIGESTS[0], BLOCKS[0]), "a try is made"
            await cache.flush()
            CLOCK.pause_over()
    await cache.close()


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
    await until_found(cache)
    await cache.clear(shared=True)
    await fill(cache)
    with replica.client() as client:
        assert (client.dbsize(), client.info("replication")["role"]) == (6, "master")
    await cache.close()


async def test_a_sentinel_that_does_not_answer_takes_no_time(service: tuple[Server, Server, Server]) -> None:
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
