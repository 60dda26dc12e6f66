"""A Redis prefix cache of tiny blocks for tests, and what its metrics say."""

import os
from functools import partial
from unittest import mock

from baton.breaker import Breaker
from baton.kv.format import KvFormat, KvPart
from baton.kv.hashing import block_digests, chain_root
from baton.kv.prefix.redis.cache import RedisLimits, RedisPrefixCache, key_prefix
from baton.kv.prefix.redis.record import RecordCodec
from tests.clock import Clock
from tests.metrics import sample

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=4)
CODEC = RecordCodec(FORMAT, "secret")
DIGESTS = block_digests(chain_root("model", FORMAT.digest), list(range(24)), 4)
BLOCKS = [os.urandom(CODEC.payload_bytes) for _ in DIGESTS]
KEYS = [key_prefix(FORMAT) + digest.hex() for digest in DIGESTS]
BUDGET_S = 0.25
"""For caches of which a test wants to see the budget end. All others have time enough."""

MAX_PAUSE_S = 10.0


class BreakerClock(Clock):
    def pause_over(self) -> None:
        self.now += 2 * MAX_PAUSE_S


CLOCK = BreakerClock()


def open_cache(url: str, **limits: float) -> RedisPrefixCache:
    """A cache whose breakers go by CLOCK."""
    values = {"budget_s": 60.0, "pause_s": 1.0, "max_pause_s": MAX_PAUSE_S} | limits
    with mock.patch("baton.kv.prefix.redis.cache.Breaker", partial(Breaker, clock=CLOCK)):
        return RedisPrefixCache(url, FORMAT, "secret", RedisLimits(**values))  # type: ignore[arg-type]


async def fill(cache: RedisPrefixCache) -> None:
    assert all(cache.put(digest, block) for digest, block in zip(DIGESTS, BLOCKS, strict=True))
    await cache.flush()


async def found(cache: RedisPrefixCache) -> int:
    return (await cache.lookup(DIGESTS)).blocks


async def hits(cache: RedisPrefixCache) -> tuple[int, int]:
    looked_up = await found(cache)
    payloads = await cache.fetch(DIGESTS)
    assert [bytes(payload) for payload in payloads] == BLOCKS[: len(payloads)]
    return looked_up, len(payloads)


def faults(reason: str) -> float:
    """Misses by this reason so far."""
    return sample("baton_prefix_faults_total", reason=reason)


def dropped() -> float:
    return sample("baton_prefix_blocks_total", tier="redis", outcome="dropped")
