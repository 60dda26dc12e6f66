"""Channels for KV: shared, kept for a while, and made anew when the TLS files change."""

from pathlib import Path

import grpc

from baton.transfer import transport
from baton.transfer.transport import KvChannels
from tests.certificates import copied, fleet, tls


def closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_one_channel_for_each_address() -> None:
    kept = KvChannels()
    async with kept.use("127.0.0.1:1") as first, kept.use("127.0.0.1:1") as second, kept.use("127.0.0.1:2") as other:
        assert first is second
        assert other is not first
    async with kept.use("127.0.0.1:1") as again:
        assert again is first
        await kept.close()
        assert closed(other)
        assert not closed(first)
    await kept.close()
    assert closed(first)


async def test_the_least_recently_used_idle_channels_are_closed() -> None:
    kept, made = KvChannels(), []
    for port in range(transport.MAX_IDLE + 2):
        async with kept.use(f"127.0.0.1:{port}") as channel:
            made.append(channel)
    assert [closed(channel) for channel in made] == [True] * 2 + [False] * transport.MAX_IDLE
    await kept.close()
    assert all(closed(channel) for channel in made)


async def test_new_files_mean_a_new_channel(tmp_path: Path) -> None:
    files = copied(tmp_path / "files", "decode")
    kept = KvChannels(tls("decode", files))
    async with kept.use("127.0.0.1:1") as old:
        copied(files, "decode", source=fleet("theirs"))
        async with kept.use("127.0.0.1:1") as new:
            assert new is not old
        assert not closed(old)
        assert not closed(new)
    assert closed(old)
    async with kept.use("127.0.0.1:1") as again:
        assert again is new
    await kept.close()
