"""Time that each call holds the lock of a page pool of 262,144 pages; writes bench/results/pool.json.

    python -m bench.pool [--rounds 3]

One thread and no engine: what is measured is the pool's own work, in milliseconds of the thread's CPU time, the longest
hold of each call. The pool is full of cached blocks: of prompts of a million tokens (`long`), or of 512, half of which
begin with the same 128 (`short`), in pages of 16 or of 128 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from baton.kv.hashing import block_digests
from baton.kv.pool import PageHandle, PagePool
from bench.common import save
from bench.holds import Longest, WatchedLock

PAGES, BLOCK = 1 << 18, 16
LONG, MORE, SHORT, COMMON = 1_000_000, 20_000, 512, 128
SLICE = 2048


class Measured:
    """A pool, and the longest hold of its lock by the name of a call."""

    def __init__(self, page_size: int) -> None:
        self.holds: dict[str, float] = {}
        self.pool = PagePool(PAGES, page_size, BLOCK)
        self.pool.watch_prefixes(lambda stored, dropped: None)
        self._longest = Longest()
        self.pool._lock = WatchedLock(self._longest)  # type: ignore[assignment]
        self.rng = random.Random(1)

    def ids(self, tokens: int) -> list[int]:
        """Random token ids."""
        return self.rng.choices(range(1 << 16), k=tokens)

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Make a call, and note its longest hold."""
        self._longest.take()
        found = function(*args)
        self.holds[name] = max(self.holds.get(name, 0.0), self._longest.take()["held_ms"])
        return found

    def reserve(self, what: str, tokens: int, digests: Sequence[bytes]) -> PageHandle:
        """Reserve pages as workers do: what is replaced is evicted in slices before."""
        while self.call(f"evict for {what}", self.pool.evict_for, tokens, digests, tokens):
            pass
        handle: PageHandle = self.call(f"reserve {what}", self.pool.reserve, "r", tokens, digests, tokens)
        return handle

    def serve(self, what: str, digests: Sequence[bytes]) -> None:
        """Reserve, publish a slice at a time, free."""
        handle = self.reserve(what, len(digests) * BLOCK, digests)
        for blocks in (*range(SLICE, len(digests), SLICE), len(digests)):
            self.call(f"publish {what}", self.pool.publish, handle, digests[:blocks])
        self.call(f"free {what}", self.pool.free, handle)


def fill(measured: Measured, page_size: int, kind: str) -> None:
    """Fill the pool with cached blocks, in pages of no order, as after long use."""
    pool, rng = measured.pool, measured.rng
    handles = [pool.reserve("", page_size) for _ in range(PAGES)]
    rng.shuffle(handles)
    while handles:
        pool.free(handles.pop())
    common, size = measured.ids(COMMON), LONG if kind == "long" else SHORT
    for number in range(PAGES * page_size // size):
        first = common if kind == "short" and number % 2 else []
        digests = block_digests(bytes(32), first + measured.ids(size - len(first)), BLOCK)
        handle = pool.reserve("", size, digests)
        pool.publish(handle, digests)
        pool.free(handle)


def measure(page_size: int, kind: str, rounds: int) -> dict[str, float]:
    """The longest hold of each call, in milliseconds."""
    measured = Measured(page_size)
    pool = measured.pool
    fill(measured, page_size, kind)
    for _ in range(rounds):
        ids = measured.ids(LONG)
        digests = block_digests(bytes(32), ids, BLOCK)
        measured.serve("a new long prompt", digests)
        measured.serve("a long prompt, mostly cached", block_digests(bytes(32), ids + measured.ids(MORE), BLOCK))
        measured.call("match_prefix", pool.match_prefix, digests)
        handle = measured.reserve("a long prompt, cached", LONG + BLOCK, digests)
        measured.call("audit", pool.audit)
        fork, _ = measured.call("fork", partial(pool.fork, handle, "f", LONG - 5, LONG + BLOCK))
        measured.call("extend by 20,000 tokens", pool.extend, fork, LONG + MORE)
        measured.call("free a fork", pool.free, fork)
        measured.call("free a long prompt, cached", pool.free, handle, digests)
        measured.serve("a short prompt", block_digests(bytes(32), measured.ids(SHORT), BLOCK))
    handle = measured.reserve("a long prompt, cached", LONG, digests)
    measured.call("uncache", pool.uncache, handle)
    measured.call("drop_cached", pool.drop_cached)
    return measured.holds


def main() -> None:
    """Measure the pools, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cases = [(kind, size) for kind in ("long", "short") for size in (16, 128)]
    save("pool", {f"{kind}, pages of {size}": measure(size, kind, rounds) for kind, size in cases})


if __name__ == "__main__":
    main()
