"""The prefix cache in Redis or Valkey, on `redis.asyncio`.

Blocks go in by their digests and come out again; whatever goes wrong is a miss. Read `cache` first.

    cache        `RedisPrefixCache`: look-ups, fetches, writes, deletions, and the bounds on each
    calls        one round trip to each node concerned, all at once; faults to misses
    nodes        one master: its connections, its breaker, how many calls it gets at a time
    topology     which master has which key: one server, a sentinels' master, or a cluster
    connect      from a URL to clients of redis-py
    write_queue  blocks on their way to the servers
    removals     refused records on their way out
    faults       names of faults for metrics; the state of a node, which is logged when it changes
"""

from baton.kv.prefix.redis.cache import RedisLimits, RedisPrefixCache, key_prefix

__all__ = ["RedisLimits", "RedisPrefixCache", "key_prefix"]
