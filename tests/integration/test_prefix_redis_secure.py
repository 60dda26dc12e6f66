"""The Redis prefix cache with TLS and ACL users: the documented user suffices, and all is encrypted.

The embedded server has no TLS, so each has an end before it that takes TLS and plain connections alike: the servers and
the sentinel speak plainly with each other.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests import certificates
from tests.prefix_redis import BLOCKS, DIGESTS, faults, fill, hits, open_cache
from tests.redis_server import SERVICE, Server, agreed, cluster, running, sentinels
from tests.tls_ends import TlsEnds


async def test_tls_with_our_ca_and_client_certificates(valkey: Server) -> None:
    ours = certificates.fleet()
    options = f"ssl_ca_certs={ours}/ca.crt&ssl_certfile={ours}/client.crt&ssl_keyfile={ours}/client.key"
    async with TlsEnds(client_certificates=True).of(valkey) as port:
        cache = open_cache(f"rediss://127.0.0.1:{port}?{options}")
        await fill(cache)
        assert await hits(cache) == (6, 6)
        await cache.close()


async def test_a_cluster_over_tls(tmp_path: Path) -> None:
    """Each node announces its TLS end, so that whatever a client learns of the cluster leads there."""
    with cluster(tmp_path) as servers:
        async with AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(TlsEnds().of(server)) for server in servers]
            for server, port in zip(servers, ports, strict=True):
                with server.client() as client:
                    client.config_set("cluster-announce-port", port)

            def announced(server: Server) -> set[int]:
                with server.client() as client:
                    return {int(slots[2][1]) for slots in client.execute_command("CLUSTER", "SLOTS")}

            agreed(lambda: all(announced(server) == set(ports) for server in servers))
            options = f"ssl_ca_certs={certificates.fleet()}/ca.crt"
            cache = open_cache(f"rediss+cluster://127.0.0.1:{ports[0]}?{options}")
            await fill(cache)
            assert await hits(cache) == (6, 6)
            await cache.close()
        held = []
        for server in servers:
            with server.client() as client:
                held.append(client.dbsize())
        assert sum(held) == 6
        assert min(held) > 0


async def test_a_server_that_we_do_not_trust_is_out_of_reach(valkey: Server) -> None:
    async with TlsEnds().of(valkey) as port:
        for url in (
            f"rediss://127.0.0.1:{port}",
            f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificates.fleet('theirs')}/ca.crt",
            f"redis://127.0.0.1:{port}",
        ):
            cache = open_cache(url)
            assert await hits(cache) == (0, 0)
            (tier,) = await cache.stats()
            assert tier.state.startswith("out of reach: ")
            await cache.close()


DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"
RULE = re.search(r"(?m)^(ACL SETUSER baton .*)$", DEPLOY.read_text())


@contextmanager
def standalone(directory: Path) -> Iterator[list[Server]]:
    with running("valkey", directory, tcp=True) as server:
        yield [server]


def refused() -> list[float]:
    return [faults(reason) for reason in ("auth", "server", "connection")]


@pytest.mark.parametrize(("servers", "scheme"), [(standalone, "redis"), (cluster, "redis+cluster")])
async def test_the_documented_redis_user_has_enough_rights(
    servers: object, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert RULE is not None
    assert callable(servers)
    with servers(tmp_path) as nodes:
        for node in nodes:
            with node.client() as client:
                client.execute_command(*RULE[1].replace("PASSWORD", "p@ss").split())
                client.execute_command("ACL", "SETUSER", "default", "off")
        before = refused()
        cache = open_cache(f"{scheme}://baton:p%40ss@" + ",".join(f"127.0.0.1:{node.port}" for node in nodes))
        await cache.check()
        await fill(cache)
        assert await hits(cache) == (len(BLOCKS), len(BLOCKS))
        await cache._renew_expiry(DIGESTS)
        (tier,) = await cache.stats()
        assert (tier.blocks, tier.state) == (len(BLOCKS), "")
        (tier,) = await cache.clear(shared=True)
        assert tier.blocks == len(BLOCKS)
        await cache.close()
        assert not caplog.records
        assert refused() == before
        with Redis(port=nodes[0].port, username="baton", password="p@ss") as client:
            for command in (("GET", "other"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
                with pytest.raises(NoPermissionError):
                    client.execute_command(*command)


WATCHER = "user watcher on >w@tch resetchannels -@all +ping +sentinel|masters"
SECRETS = b"p@ss", b"w@tch"


@asynccontextmanager
async def secure_service(directory: Path) -> AsyncIterator[tuple[TlsEnds, int, tuple[Server, Server, Server]]]:
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
    async with secure_service(tmp_path) as (ends, port, (master, _, sentinel)):
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
    async with secure_service(tmp_path) as (_, port, _):
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
