"""The Redis prefix cache against what says it is a server."""

import asyncio

import pytest

from tests.prefix_redis import DIGESTS, faults, open_cache


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
