"""The Redis prefix cache behind a real sentinel, all of it over TLS, with ACL users of the servers and the sentinel.

The embedded server has no TLS, so each has an end before it that takes TLS and plain connections alike: the servers and
the sentinel speak plainly with each other.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests import certificates
from tests.integration.test_redis_rights import RULE
from tests.prefix_redis import faults, fill, hits, open_cache
from tests.redis_server import SERVICE, Server, sentinels
from tests.tls_ends import TlsEnds

WATCHER = "user watcher on >w@tch resetchannels -@all +ping +sentinel|masters"
SECRETS = b"p@ss", b"w@tch"


@asynccontextmanager
async def service(directory: Path) -> AsyncIterator[tuple[TlsEnds, int, tuple[Server, Server, Server]]]:
    """The ends, the port of the sentinel's, and master, replica and sentinel."""
    assert RULE is not None
    loop, ends = asyncio.get_running_loop(), TlsEnds(plain_too=True)
    async with AsyncExitStack() as stack:

        def end(server: Server) -> int:
            return asyncio.run_coroutine_threadsafe(stack.enter_async_context(ends.of(server)), loop).result(20)

        flags = ["--user", *RULE[1].removeprefix("ACL SETUSER ").replace("PASSWORD", "p@ss").split()]
        rig = sentinels(directory, end=end, flags=flags, settings=[WATCHER, "user default off"])
        servers = await asyncio.to_thread(rig.__enter__)
        try:
            async with ends.of(servers[2]) as port:
                yield ends, port, servers
        finally:
            await asyncio.to_thread(rig.__exit__, None, None, None)


def url(port: int, password: str = "p%40ss", watcher: str = "w%40tch") -> str:
    options = f"sentinel_username=watcher&sentinel_password={watcher}&ssl_ca_certs={certificates.fleet()}/ca.crt"
    return f"rediss+sentinel://baton:{password}@127.0.0.1:{port}/{SERVICE}?{options}"


async def test_all_is_encrypted(tmp_path: Path) -> None:
    async with service(tmp_path) as (ends, port, (master, _, sentinel)):
        cache = open_cache(url(port))
        await fill(cache)
        assert await hits(cache) == (6, 6)
        assert ends.tls == {master.port, sentinel.port}
        with master.client() as client:
            assert {each["user"] for each in client.client_list() if each["cmd"] in ("set", "getrange", "strlen")} == {
                "baton"
            }
        assert ends.plain, "the servers speak plainly with each other"
        assert not any(secret in ends.plain for secret in SECRETS)
        await cache.close()


async def test_a_wrong_password_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with service(tmp_path) as (_, port, _):
        for wrong, words in (
            ({"password": "wrong"}, "invalid username-password pair"),
            ({"watcher": "wrong"}, ": invalid username-password pair or user is disabled."),
        ):
            cache, before = open_cache(url(port, **wrong)), faults("auth")
            assert await hits(cache) == (0, 0)
            assert faults("auth") == before + 1
            (tier,) = await cache.stats()
            assert words in tier.state
            assert len(tier.state) < 300, "no settings of connections"
            said = (caplog.text, tier.state, repr(cache))
            assert not any(secret.decode() in text for secret in SECRETS for text in said)
            await cache.close()
