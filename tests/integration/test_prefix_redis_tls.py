"""The Redis prefix cache over TLS, to a real server behind a TLS end of its own: the embedded one has none."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests import certificates
from tests.prefix_redis import fill, hits, open_cache
from tests.redis_server import Server, agreed, cluster, running


@asynccontextmanager
async def tls_end(server: Server, client_certificates: bool = False) -> AsyncIterator[int]:
    """A port that takes TLS for the server."""
    ours = certificates.fleet()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ours / "router.crt", ours / "router.key")
    if client_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ours / "ca.crt")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield listener.sockets[0].getsockname()[1]
    listener.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    with running("valkey", tmp_path, tcp=True) as server:
        yield server


async def test_tls_with_our_ca_and_client_certificates(server: Server) -> None:
    ours = certificates.fleet()
    options = f"ssl_ca_certs={ours}/ca.crt&ssl_certfile={ours}/client.crt&ssl_keyfile={ours}/client.key"
    async with tls_end(server, client_certificates=True) as port:
        cache = open_cache(f"rediss://127.0.0.1:{port}?{options}")
        await fill(cache)
        assert await hits(cache) == (6, 6)
        await cache.close()


async def test_a_cluster_over_tls(tmp_path: Path) -> None:
    """Each node announces its TLS end, so that whatever a client learns of the cluster leads there."""
    with cluster(tmp_path) as servers:
        async with AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(tls_end(server)) for server in servers]
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


async def test_a_server_that_we_do_not_trust_is_out_of_reach(server: Server) -> None:
    async with tls_end(server) as port:
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
