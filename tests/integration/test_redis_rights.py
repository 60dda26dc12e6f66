"""The ACL user of docs/deploy.md can do all that the prefix cache does, and no more."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests.prefix_redis import BLOCKS, DIGESTS, faults, fill, hits, open_cache
from tests.redis_server import Server, cluster, running

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"
RULE = re.search(r"(?m)^(ACL SETUSER baton .*)$", DEPLOY.read_text())


@contextmanager
def standalone(directory: Path) -> Iterator[list[Server]]:
    with running("valkey", directory, tcp=True) as server:
        yield [server]


def refused() -> list[float]:
    return [faults(reason) for reason in ("auth", "server", "connection")]


@pytest.mark.parametrize(("servers", "scheme"), [(standalone, "redis"), (cluster, "redis+cluster")])
async def test_the_documented_user_suffices(
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
