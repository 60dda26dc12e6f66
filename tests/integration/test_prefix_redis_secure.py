"""The Redis prefix cache over TLS, to a real server behind a TLS end of its own: the embedded one has none."""

from contextlib import AsyncExitStack
from pathlib import Path

from tests import certificates
from tests.prefix_redis import fill, hits, open_cache
from tests.redis_server import Server, agreed, cluster
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
