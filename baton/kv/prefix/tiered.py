"""Host memory before an ordered list of stores: one `PrefixCache` of all.

A look-up asks a store, once, for the blocks that are not found in the tiers before it; so the runs of a hit may
alternate between the tiers. A fetch reads each block from its tier, and keeps blocks from the stores in host memory.

`select_writes` counts that each block was seen; `put` hands a block to host memory at once, and to a store

    first   at once
    second  if it was seen by an earlier request as well; its KV may come from host memory then
    never   not at all

`save` hands the blocks of a long prompt to the shared stores at once, unless `writes` is never, and leaves host memory
to other prompts.

A `StoreTier` remembers which blocks are in its store (`WriteFilter`) until a look-up misses them, or the store reports
them as lost or refused. So no KV is copied out of the engine without need.

Blocks that are used do not expire in a store. Every fetch from a store renews the expiry of the blocks that it
delivers, but not of a block that was found and then refused. Of the fetches from host memory alone, and of the hits in
the engine's pages that `touch` reports, one in eight renews it, picked at random: a fixed rhythm might always skip the
same prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain, groupby, islice, repeat

from baton.kv.prefix.contract import BlocksChanged, FetchRate, Hits, Payload, PrefixCache
from baton.kv.prefix.host import HOST, HostPrefixCache, slices
from baton.ledger import CacheTier

TOUCH_FRACTION = 1 / 8
KEY_BYTES = 8


class BlockState(IntEnum):
    """Knowledge of a block: never seen, seen by one request, by several, in the store, or in the store but refused."""

    UNSEEN = 0
    SEEN_ONCE = 1
    SEEN_AGAIN = 2
    STORED = 3
    REFUSED = 4


_NEXT = (BlockState.SEEN_ONCE, BlockState.SEEN_AGAIN, BlockState.SEEN_AGAIN, BlockState.STORED, BlockState.SEEN_AGAIN)


class WriteFilter:
    """Remembers the state of the latest blocks by digest: at least `max_blocks` of them, and at most twice as many.

    Keyed by the first 8 bytes of the digests, in two generations of a dictionary. When the young generation is full, it
    becomes the old one, and the old one is dropped. An update moves a block to the young generation. At most about 18
    MB for 2 × 65,536 blocks. If two blocks have the same key, or a block was dropped, a write is skipped or repeated.

    A block whose record was refused is written again when its chain is seen next. So are the blocks after it that
    counted as stored: a look-up compares sizes only, and what damaged one record may have damaged many.
    """

    def __init__(self, max_blocks: int = 1 << 16) -> None:
        self._max_blocks = max_blocks
        self._young: dict[bytes, BlockState] = {}
        self._old: dict[bytes, BlockState] = {}

    def state(self, digest: bytes) -> BlockState:
        """The remembered state of a block."""
        name = digest[:KEY_BYTES]
        return self._young.get(name) or self._old.get(name) or BlockState.UNSEEN

    def set(self, digest: bytes, state: BlockState) -> None:
        """Set the state of a block."""
        if len(self._young) >= self._max_blocks:
            self._young, self._old = {}, self._young
        self._young[digest[:KEY_BYTES]] = state

    def states(self, digests: Iterable[bytes]) -> Iterator[BlockState]:
        """The state of each block of a chain. A stored block that follows a refused block is SEEN_AGAIN."""
        doubted = False
        for digest in digests:
            state = self.state(digest)
            doubted = doubted or state is BlockState.REFUSED
            yield BlockState.SEEN_AGAIN if doubted and state is BlockState.STORED else state

    def observe(self, digests: Sequence[bytes]) -> Iterator[BlockState]:
        """Record that the blocks of a chain were seen once more; yields the new state of each when it is recorded."""
        for digest, before in zip(digests, self.states(digests), strict=True):
            now = _NEXT[before]
            self.set(digest, now)
            yield now

    def mark_stored(self, digests: Iterable[bytes]) -> None:
        """Record that these blocks are stored."""
        for digest in digests:
            self.set(digest, BlockState.STORED)

    def mark_found(self, digests: Iterable[bytes]) -> None:
        """Note that the store has these blocks, judging from the size alone. Refused blocks stay refused."""
        self.mark_stored(digest for digest in digests if self.state(digest) is not BlockState.REFUSED)

    def mark_missed(self, digests: Iterable[bytes]) -> None:
        """Record that these blocks may not be stored any more."""
        for digest in digests:
            if self.state(digest) in (BlockState.STORED, BlockState.REFUSED):
                self.set(digest, BlockState.SEEN_AGAIN)

    def mark_refused(self, digests: Iterable[bytes]) -> None:
        """Record that the store has these blocks, but that their contents were refused."""
        for digest in digests:
            self.set(digest, BlockState.REFUSED)

    def mark_checked(self, digests: Iterable[bytes]) -> None:
        """Record that the records were read and are valid; a refused one was replaced since."""
        self.mark_stored(digest for digest in digests if self.state(digest) is BlockState.REFUSED)

    def clear(self) -> None:
        """Forget all blocks."""
        self._young, self._old = {}, {}


class StoreTier:
    """A store behind host memory: its cache, the known states of its blocks, and when blocks are written to it.

    `writes` is "first", "second" or "never". If the store may lose blocks that it had accepted, it calls
    `write_filter.mark_missed`. If it checks what it reads, it calls `write_filter.mark_refused` for records that fail.
    """

    def __init__(self, cache: PrefixCache, writes: str = "first", write_filter: WriteFilter | None = None) -> None:
        self.cache = cache
        self.write_filter = write_filter or WriteFilter()
        self._write_states = {
            "first": (BlockState.SEEN_ONCE, BlockState.SEEN_AGAIN, BlockState.REFUSED),
            "second": (BlockState.SEEN_AGAIN, BlockState.REFUSED),
            "never": (),
        }[writes]

    @property
    def takes_saves(self) -> bool:
        """Whether other workers find the blocks that are saved in it."""
        return bool(self._write_states) and not self.cache.local_tiers

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The leading hits."""
        found = await self.cache.lookup(digests) if digests else Hits()
        async for part in slices(digests[: found.blocks]):
            self.write_filter.mark_found(part)
        async for part in slices(digests[found.blocks :]):
            self.write_filter.mark_missed(part)
        return found

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss."""
        payloads = await self.cache.fetch(digests) if digests else []
        self.write_filter.mark_checked(digests[: len(payloads)])
        return payloads

    async def select_writes(self, digests: Sequence[bytes], host: HostPrefixCache) -> set[bytes]:
        """Put the blocks that the store needs and `host` has. Returns the others that it needs: pages have them."""
        seen, needed, refused = self.write_filter.observe(digests), set[bytes](), False
        async for part in slices(digests):
            states = zip(part, islice(seen, len(part)), strict=True)
            due = [digest for digest, state in states if state in self._write_states]
            wants = [] if refused else await self.cache.select_writes(due)
            absent = list[bytes]()
            for digest in (digest for digest, wanted in zip(due, wants, strict=False) if wanted):
                payload = host.get(digest)
                if payload is None:
                    absent.append(digest)
                elif not self._put(digest, payload):
                    # It would refuse the rest too, but only after a copy out of the engine.
                    refused = True
                    break
            needed.update(() if refused else absent)
        return needed

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Write the block if `writes` says so; True if the store takes it, or has it."""
        seen = self.write_filter.state(digest) or next(self.write_filter.observe([digest]))
        return seen is BlockState.STORED or (seen in self._write_states and self._put(digest, payload))

    async def select_saves(self, digests: Sequence[bytes], hits: int) -> list[bool]:
        """Blocks that are not known to be in the store."""
        used, wanted = list[bytes](), list[bool]()
        async for part in slices(digests[:hits]):
            used += [digest for digest in part if self.write_filter.state(digest) is BlockState.STORED]
        there = (await self.cache.lookup(used)).blocks if used else 0
        async for part in slices(used[there:]):
            self.write_filter.mark_missed(part)
        states = self.write_filter.states(digests)
        async for part in slices(digests):
            wanted += [state is not BlockState.STORED for state in islice(states, len(part))]
        return wanted

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Save the blocks; the number of leading ones that are stored."""
        saved = await self.cache.save(digests, payloads)
        self.write_filter.mark_stored(digests[:saved])
        return saved

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Remove the blocks."""
        self.write_filter.mark_missed(digests)
        await self.cache.remove(digests)

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks. Blocks in a shared store are dropped only if `shared`."""
        cleared = await self.cache.clear(shared=shared)
        if cleared:
            self.write_filter.clear()  # last, because blocks stored meanwhile may be gone too
        return cleared

    def _put(self, digest: bytes, payload: Payload) -> bool:
        taken = self.cache.put(digest, payload)
        if taken:
            self.write_filter.set(digest, BlockState.STORED)
        return taken


class TieredPrefixCache(PrefixCache):
    """`PrefixCache` over host memory and the `stores` behind it, nearest first."""

    def __init__(
        self, host: HostPrefixCache, stores: Sequence[StoreTier], *, touch_fraction: float = TOUCH_FRACTION
    ) -> None:
        self._host, self._stores = host, stores
        self._touch_fraction = touch_fraction

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def local_tiers(self) -> frozenset[str]:
        """Host memory, and the local tiers of the stores."""
        return self._host.local_tiers.union(*(store.cache.local_tiers for store in self._stores))

    async def check(self) -> None:
        """Try to reach each store."""
        for store in self._stores:
            await store.cache.check()

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading hits in any tier; at most one look-up in each store."""
        held, asked = list[bool](), list[bytes]()
        async for part in slices(digests):
            here = [digest in self._host for digest in part]
            held += here
            asked += [digest for digest, is_here in zip(part, here, strict=True) if not is_here]
        found = Hits()
        for store in self._stores:
            found = Hits(found.runs + (await store.lookup(asked[found.blocks :])).runs)
        end = digests.index(asked[found.blocks]) if found.blocks < len(asked) else len(digests)
        await self._host.mark_used(digests[:end])
        self._host.count_lookup(end - found.blocks, len(asked))
        farther = chain.from_iterable(repeat(tier, blocks) for tier, blocks in found.runs)
        runs: list[tuple[str, int]] = []
        async for places in slices(held[:end]):
            for tier, run in groupby(HOST if here else next(farther) for here in places):
                before = runs.pop()[1] if runs and runs[-1][0] == tier else 0
                runs.append((tier, before + sum(1 for _ in run)))
        return Hits(tuple(runs))

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss, each from the nearest tier that has it."""
        held = [self._host.get(digest) for digest in digests]
        missing = [digest for digest, payload in zip(digests, held, strict=True) if payload is None]
        fetched = list[Payload]()
        for store in self._stores:
            fetched += await store.fetch(missing[len(fetched) :])
        for digest, block in zip(missing, fetched, strict=False):
            self._host.put(digest, block)
        farther, payloads = iter(fetched), []
        for payload in held:
            payload = next(farther, None) if payload is None else payload
            if payload is None:
                break
            payloads.append(payload)
        self._host.count_fetched(len(payloads) - len(fetched))
        self._touch(digests[: len(payloads)], 1.0 if fetched else self._touch_fraction)
        return payloads

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Blocks that host memory or a store needs, and that must be read from pages."""
        needed, wanted = set[bytes](), list[bool]()
        for store in self._stores:
            needed |= await store.select_writes(digests, self._host)
        async for part in slices(digests):
            missing = self._host.select_missing(part, hits - len(wanted))
            wanted += [lacks or digest in needed for lacks, digest in zip(missing, part, strict=True)]
        await self._host.mark_used(digests, wanted)
        return wanted

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Keep the block in host memory, and write it to the stores; False if no tier has it then."""
        kept = [self._host.put(digest, payload), *(store.put(digest, payload) for store in self._stores)]
        return any(kept)

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Blocks that are not known to be in all shared stores; empty if no store takes saves."""
        wanted = [await store.select_saves(digests, hits) for store in self._stores if store.takes_saves]
        return [any(wants) for wants in zip(*wanted, strict=True)]

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Save the blocks in the shared stores."""
        return min([await store.save(digests, payloads) for store in self._stores if store.takes_saves], default=0)

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Remove the blocks from the stores."""
        for store in self._stores:
            await store.remove(digests)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Renew the expiry of the blocks in the stores; only a sample of the calls does it."""
        self._touch(digests, self._touch_fraction)

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """The fetch rates of the stores; a fetch from host memory takes no time."""
        return {tier: rate for store in self._stores for tier, rate in store.cache.fetch_rates().items()}

    def watch(self, changed: BlocksChanged | None) -> None:
        """Report the blocks in host memory."""
        self._host.watch(changed)

    async def stats(self) -> list[CacheTier]:
        """Host memory, if there is any, then the stores."""
        tiers = await self._host.stats() if self._host.enabled else []
        for store in self._stores:
            tiers += await store.cache.stats()
        return tiers

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks in host memory, and those in shared stores if asked to."""
        cleared = await self._host.clear(shared=False) if self._host.enabled else []
        for store in self._stores:
            cleared += await store.clear(shared=shared)
        return cleared

    async def flush(self) -> None:
        """Wait until the blocks that were put are stored or dropped."""
        for store in self._stores:
            await store.cache.flush()

    async def close(self) -> None:
        """Close all tiers."""
        await self._host.close()
        for store in self._stores:
            await store.cache.close()

    def _touch(self, digests: Sequence[bytes], fraction: float) -> None:
        if digests and random.random() < fraction:
            for store in self._stores:
                store.cache.touch(digests)
