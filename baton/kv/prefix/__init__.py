"""Prefix caching beyond the pages of one engine. Read `contract` first.

contract    `PrefixCache`, the base class of all caches, which stores nothing
host        blocks in this process's memory
redis/      blocks in Redis, which workers share
tiered      host memory before an ordered list of stores
fetch_cost  measured speeds of tiers, and whether a fetch beats computing
"""
