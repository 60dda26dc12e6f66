"""Payloads of prefix blocks to and from Redis: Baton's client against a plain one, on the same server.

Both move the same number of values of the same size over the same unix socket, in turns. The plain client is redis-py
with hiredis, used in every way that its manual offers, of which the best counts: it checks nothing. Baton's own moves
real records, each named, checked and authenticated. How fast one core does nothing but that is told beside.

    python -m bench.prefix_redis [--blocks 256] [--rounds 9]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from redis import Redis

from baton.kv.embedded import embedded_valkey
from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix import PrefixCache, open_prefix_cache
from baton.kv.prefix.record import RecordCodec
from bench.checkpoint import HEAD_DIM, KV_HEADS, LAYERS
from bench.common import save
from bench.services import SECRET

BATCH_BYTES = 8 << 20
TTL_S = 3600
LMCACHE_GB_PER_S = 1.4
"""What LMCache publishes for Redis."""


def kv_format(block_size: int = 16) -> KvFormat:
    """That of the 0.5B checkpoint in bfloat16: 12,288 bytes a token."""
    parts = tuple(KvPart(name, "bfloat16", (KV_HEADS, HEAD_DIM)) for name in ("k", "v"))
    return KvFormat(parts, LAYERS, block_size)


class Throughput:
    """One comparison; each `round` adds a sample of every way. `server` is a unix:// URL."""

    def __init__(self, server: str, blocks: int) -> None:
        self._plain = Redis.from_url(server, protocol=2)
        self._cache: PrefixCache = open_prefix_cache(server, kv_format(), SECRET)
        form = kv_format()
        size = form.token_bytes * form.block_size
        self._payloads = [os.urandom(size) for _ in range(blocks)]
        self._keys = [f"bench:{index}" for index in range(blocks)]
        self._digests = [hashlib.sha256(key.encode()).digest() for key in self._keys]
        self._codec = RecordCodec(form, SECRET)
        self._records = [self._codec.encode(*each) for each in zip(self._digests, self._payloads, strict=True)]
        self.payload_bytes = size * blocks
        self.took: dict[str, list[float]] = {}

    async def round(self) -> None:
        """Write all and read all, in every way."""
        self._timed("put plain set", self._set)
        self._timed("put plain pipeline", self._set_pipelined)
        began = time.perf_counter()
        taken = [self._cache.put(*each) for each in zip(self._digests, self._payloads, strict=True)]
        await self._cache.flush()
        self._add("put baton", began)
        self._timed("get plain get", self._get)
        self._timed("get plain mget", self._mget)
        self._timed("get plain pipeline", self._get_pipelined)
        found = (await self._cache.lookup(self._digests)).blocks
        began = time.perf_counter()
        payloads = await self._cache.fetch(self._digests)
        self._add("get baton", began)
        if not (all(taken) and found == len(payloads) == len(self._payloads)):
            raise RuntimeError(
                f"of {len(taken)} blocks {sum(taken)} were taken, {found} found, {len(payloads)} fetched"
            )
        if [bytes(each) for each in payloads[:: len(payloads) - 1]] != self._payloads[:: len(payloads) - 1]:
            raise RuntimeError("other bytes came back")
        self._timed("check records, one core", self._check)
        del payloads
        await self._cache.clear(shared=True)
        self._plain.delete(*self._keys)

    async def close(self) -> None:
        """Disconnect."""
        await self._cache.close()
        self._plain.close()

    def best_seconds(self, what: str) -> float:
        """Median time of the best plain way to `what` ("get" or "put") all blocks."""
        return min(statistics.median(took) for way, took in self.took.items() if way.startswith(f"{what} plain"))

    def results(self) -> dict[str, Any]:
        """Rates in GB/s of payload, and ours against the best."""
        rates = {way: self.payload_bytes / statistics.median(took) / 1e9 for way, took in self.took.items()}
        found: dict[str, Any] = {
            "payload_mb": round(self.payload_bytes / 1e6, 1),
            "rounds": len(self.took["get baton"]),
        }
        found["gb_per_s"] = {way: round(rate, 3) for way, rate in rates.items()}
        for what in ("get", "put"):
            best = self.payload_bytes / self.best_seconds(what) / 1e9
            found[f"{what}_baton_over_best_plain"] = round(rates[f"{what} baton"] / best, 3)
        found["get_baton_over_lmcache_published"] = round(rates["get baton"] / LMCACHE_GB_PER_S, 3)
        return found

    def _timed(self, way: str, do: Callable[[], object]) -> None:
        began = time.perf_counter()
        do()
        self._add(way, began)

    def _add(self, way: str, began: float) -> None:
        self.took.setdefault(way, []).append(time.perf_counter() - began)

    def _set(self) -> None:
        for key, record in zip(self._keys, self._records, strict=True):
            self._plain.set(key, record, ex=TTL_S)

    def _set_pipelined(self) -> None:
        for batch in self._batches():
            pipeline = self._plain.pipeline(transaction=False)
            for index in batch:
                pipeline.set(self._keys[index], self._records[index], ex=TTL_S)
            pipeline.execute()

    def _get(self) -> None:
        for key in self._keys:
            _whole([self._plain.get(key)])

    def _mget(self) -> None:
        for batch in self._batches():
            _whole(self._plain.mget([self._keys[index] for index in batch]))

    def _get_pipelined(self) -> None:
        for batch in self._batches():
            pipeline = self._plain.pipeline(transaction=False)
            for index in batch:
                pipeline.get(self._keys[index])
            _whole(pipeline.execute())

    def _check(self) -> None:
        for digest, record in zip(self._digests, self._records, strict=True):
            self._codec.decode(digest, record)

    def _batches(self) -> Iterator[range]:
        size = max(1, BATCH_BYTES // len(self._records[0]))
        for start in range(0, len(self._keys), size):
            yield range(start, min(start + size, len(self._keys)))


def _whole(values: Sequence[Any]) -> None:
    if None in values:
        raise RuntimeError("the server lost a value")


async def measure(blocks: int, rounds: int) -> dict[str, Any]:
    with embedded_valkey(2 << 30) as server:
        throughput = Throughput(server, blocks)
        try:
            for _ in range(rounds):
                await throughput.round()
        finally:
            await throughput.close()
        return throughput.results()


def table(results: dict[str, Any]) -> str:
    """The rates, one a line."""
    lines = [f"{way:28} {rate:7.3f} GB/s" for way, rate in results["gb_per_s"].items()]
    lines += [f"{name:36} {value:.2f}" for name, value in results.items() if "_over_" in name]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.blocks, arguments.rounds))
    save("prefix-redis", results)
    print(table(results))


if __name__ == "__main__":
    main()
