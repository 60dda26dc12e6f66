"""The prefix cache in Redis or Valkey, on `redis.asyncio`.

Blocks are stored and found by their digests; every fault is a miss. Read `cache` first.

    cache        `RedisPrefixCache`: look-ups, fetches, writes, deletions, and the limits of each
    calls        one round trip to each node concerned, all at once; turns faults into misses
    nodes        one master: its connections, its breaker, how many calls it gets at a time
    topology     which master has which key: one server, a sentinels' master, or a cluster
    connect      from a URL to clients of redis-py
    write_queue  blocks that wait to be written
    clearing     deletes all blocks of a node, in batches
    faults       names of faults for metrics; the state of a node, which is logged when it changes
"""

from baton.kv.prefix.redis.cache import RedisLimits, RedisPrefixCache, key_prefix

__all__ = ["RedisLimits", "RedisPrefixCache", "key_prefix"]
