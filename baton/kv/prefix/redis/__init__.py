"""The prefix cache in Redis or Valkey, on `redis.asyncio`.

Blocks are stored and found by their digests; every fault is a miss. Read `cache` first.

    cache    `RedisPrefixCache`: look-ups, fetches, writes, deletions, and the limits of each
    nodes    the servers: their addresses, connections and faults, and the calls to them
    record   the bytes of one cached block
    address  URLs of the `--redis` setting; loads no Redis client
"""
