"""The Redis prefix cache against what says it is a server."""

import asyncio
import tracemalloc
from contextlib import suppress

import pytest

from tests.prefix_redis import BUDGET_S, DIGESTS, faults, open_cache


async def test_a_server_that_dribbles_costs_one_budget() -> None:
    """Each byte comes well within any socket's timeout; the call is late all the same."""

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if b"GET" not in data:
                    writer.write(b"+OK\r\n" * data.count(b"*"))
                    continue
                writer.write(b"$65536\r\n")
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

    listener = await asyncio.start_server(dribble, "127.0.0.1", 0)
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", budget_s=BUDGET_S)
    before = faults("timeout")
    async with asyncio.timeout(60):  # all of it would take 20 minutes
        assert await cache.fetch(DIGESTS) == []
    assert faults("timeout") == before + 1
    await cache.close()
    listener.close()


async def test_an_answer_that_is_no_value_is_a_miss() -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write((b":5\r\n" if b"GET" in data else b"+OK\r\n") * data.count(b"*"))

    listener = await asyncio.start_server(lie, "127.0.0.1", 0)
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    assert await cache.fetch(DIGESTS) == []
    await cache.close()
    listener.close()


async def test_a_server_that_repeats_the_password_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """As any does that knows no AUTH: its operator has renamed it, or it is a proxy."""

    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"-ERR unknown command 'AUTH', with args beginning with: 'mine' 'hush' \r\n")

    listener = await asyncio.start_server(repeat, "127.0.0.1", 0)
    cache = open_cache(f"redis://mine:hush@127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    await cache.check()
    (tier,) = await cache.stats()
    assert tier.state == "out of reach: unknown command 'AUTH'"
    assert "unknown command 'AUTH'" in caplog.text
    assert "hush" not in caplog.text
    await cache.close()
    listener.close()


async def test_a_value_larger_than_any_record_takes_no_memory() -> None:
    """A writer without the secret may put one there once the look-up is over."""

    async def promise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(b"$536870912\r\nBKVR" if b"GET" in data else b"+OK\r\n" * data.count(b"*"))

    listener = await asyncio.start_server(promise, "127.0.0.1", 0)
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", budget_s=BUDGET_S)
    tracemalloc.start()
    assert await cache.fetch(DIGESTS) == []
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    await cache.close()
    listener.close()


async def test_clearing_keeps_no_look_up_waiting() -> None:
    scanning = asyncio.Event()

    async def think(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if b"SCAN" in data:
                scanning.set()
            else:
                writer.write((b":0\r\n" if b"STRLEN" in data else b"+OK\r\n") * data.count(b"*"))

    listener = await asyncio.start_server(think, "127.0.0.1", 0)
    # Long enough for a look-up on a busy machine; the clearing waits for its end.
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}", budget_s=2.0)
    before = faults("busy")
    clearing = [asyncio.create_task(cache.clear(shared=True)) for _ in range(16)]
    await scanning.wait()
    await cache.lookup(DIGESTS)
    assert faults("busy") == before
    await asyncio.gather(*clearing)
    await cache.close()
    listener.close()
