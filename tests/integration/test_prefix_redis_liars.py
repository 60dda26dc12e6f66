"""The Redis prefix cache against what says it is a server."""

import asyncio
import time
from contextlib import suppress

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
    cache = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    before, started = faults("timeout"), time.monotonic()
    assert await cache.fetch(DIGESTS) == []
    assert time.monotonic() - started < 4 * BUDGET_S
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


async def test_clearing_keeps_no_look_up_waiting() -> None:
    scanning = asyncio.Event()

    async def think(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if b"SCAN" in data:
                scanning.set()
            else:
                writer.write((b":0\r\n" if b"STRLEN" in data else b"+OK\r\n") * data.count(b"*"))

    listener = await asyncio.start_server(think, "127.0.0.1", 0)
    cache, before = open_cache(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"), faults("busy")
    clearing = [asyncio.create_task(cache.clear(shared=True)) for _ in range(16)]
    await scanning.wait()
    await cache.lookup(DIGESTS)
    assert faults("busy") == before
    await asyncio.gather(*clearing)
    await cache.close()
    listener.close()
