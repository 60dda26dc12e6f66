"""Host memory before a store that workers share: one `PrefixCache` of both.

A look-up asks the store, once, for the blocks that are not in host memory; so the runs of a hit may alternate between
the tiers. A fetch reads each block from its tier, and keeps blocks from the store in host memory.

`select_writes` counts that each block was seen; `put` hands a block to host memory at once, and to the store

    first   at once
    second  if it was seen by an earlier request as well; its KV may come from host memory then
    never   not at all

`save` hands the blocks of a long prompt to the store at once, unless `writes` is never, and leaves host memory to other
prompts.

The cache remembers which blocks are in the store (`baton.kv.prefix.write_filter`) until a look-up misses them, or the
store reports them as lost or refused. So no KV is copied out of the engine without need.

Blocks that are used do not expire in the store. Every fetch from the store renews the expiry of the blocks that it
delivers, but not of a block that was found and then refused. Of the fetches from host memory alone, and of
the hits in the engine's pages that `touch` reports, one in eight renews it, picked at random: a fixed rhythm might
always skip the same prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain, groupby, islice, repeat

from baton.kv.prefix.contract import CacheTier, FetchRate, Hits, Payload, PrefixCache, PrefixesChanged
from baton.kv.prefix.host import TIER, HostPrefixCache, slices
from baton.kv.prefix.write_filter import BlockState, WriteFilter

TOUCH_FRACTION = 1 / 8


class TieredPrefixCache:
    """`PrefixCache` over host memory and a shared store, in this order; `writes` is "first", "second" or "never".

    If the store may lose blocks that it had accepted, it calls `write_filter.mark_missed`. If it checks what it reads,
    it calls `write_filter.mark_refused` for records that fail.
    """

    def __init__(
        self,
        host: HostPrefixCache,
        shared: PrefixCache,
        writes: str = "first",
        *,
        touch_fraction: float = TOUCH_FRACTION,
        write_filter: WriteFilter | None = None,
    ) -> None:
        self._host, self._shared = host, shared
        self._touch_fraction = touch_fraction
        self._write_filter = write_filter or WriteFilter()
        self._write_states = {
            "first": (BlockState.ONCE, BlockState.AGAIN, BlockState.REFUSED),
            "second": (BlockState.AGAIN, BlockState.REFUSED),
            "never": (),
        }[writes]

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    async def check(self) -> None:
        """Try to reach the store."""
        await self._shared.check()

    async def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest run of leading hits in either tier; one look-up in the store if some are not in host memory."""
        held, asked = list[bool](), list[bytes]()
        async for part in slices(digests):
            here = [digest in self._host for digest in part]
            held += here
            asked += [digest for digest, is_here in zip(part, here, strict=True) if not is_here]
        found = await self._shared.lookup(asked) if asked else Hits()
        async for part in slices(asked[: found.blocks]):
            self._write_filter.mark_found(part)
        async for part in slices(asked[found.blocks :]):
            self._write_filter.mark_missed(part)
        end = digests.index(asked[found.blocks]) if found.blocks < len(asked) else len(digests)
        await self._host.mark_used(digests[:end])
        self._host.count_lookup(end - found.blocks, len(asked))
        farther = chain.from_iterable(repeat(tier, blocks) for tier, blocks in found.runs)
        runs: list[tuple[str, int]] = []
        async for places in slices(held[:end]):
            for tier, run in groupby(TIER if here else next(farther) for here in places):
                before = runs.pop()[1] if runs and runs[-1][0] == tier else 0
                runs.append((tier, before + sum(1 for _ in run)))
        return Hits(tuple(runs))

    async def fetch(self, digests: Sequence[bytes]) -> list[Payload]:
        """Payloads up to the first miss, each from the nearest tier that has it."""
        held = [self._host.get(digest) for digest in digests]
        missing = [digest for digest, payload in zip(digests, held, strict=True) if payload is None]
        fetched = await self._shared.fetch(missing) if missing else []
        for digest, block in zip(missing, fetched, strict=False):
            self._host.put(digest, block)
        farther, payloads = iter(fetched), []
        for payload in held:
            payload = next(farther, None) if payload is None else payload
            if payload is None:
                break
            payloads.append(payload)
        self._host.count_fetched(len(payloads) - len(fetched))
        self._write_filter.mark_checked(missing[: len(fetched)])
        (self._shared.touch if fetched else self.touch)(digests[: len(payloads)])
        return payloads

    async def select_writes(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Computed blocks that are not in host memory, and blocks that the store needs and host memory can't supply."""
        seen, wanted, refused = self._write_filter.observe(digests), list[bool](), False
        async for part in slices(digests):
            states = zip(part, islice(seen, len(part)), strict=True)
            due = [digest for digest, state in states if state in self._write_states]
            absent = set[bytes]() if refused else await self._absent(due)
            for digest in due:
                payload = self._host.get(digest)
                if payload is not None and digest in absent:
                    absent.remove(digest)
                    if not self._store(digest, payload):
                        # It would refuse the rest too, but only after a copy out of the engine.
                        refused = True
                        absent.clear()
                        break
            missing = self._host.select_missing(part, hits - len(wanted))
            wanted += [lacks or digest in absent for lacks, digest in zip(missing, part, strict=True)]
        await self._host.mark_used(digests, wanted)
        return wanted

    def put(self, digest: bytes, payload: Payload) -> bool:
        """Keep the block in host memory, and write it to the store if `writes` says so; False if neither was done."""
        kept = self._host.put(digest, payload)
        seen = self._write_filter.state(digest) or next(self._write_filter.observe([digest]))
        return (seen in self._write_states and self._store(digest, payload)) or kept or seen is BlockState.STORED

    async def select_saves(self, digests: Sequence[bytes], hits: int = 0) -> list[bool]:
        """Blocks that are not known to be in the store; empty if `writes` is never."""
        if not self._write_states:
            return []
        used, wanted = list[bytes](), list[bool]()
        async for part in slices(digests[:hits]):
            used += [digest for digest in part if self._write_filter.state(digest) is BlockState.STORED]
        there = (await self._shared.lookup(used)).blocks if used else 0
        async for part in slices(used[there:]):
            self._write_filter.mark_missed(part)
        states = self._write_filter.states(digests)
        async for part in slices(digests):
            wanted += [state is not BlockState.STORED for state in islice(states, len(part))]
        return wanted

    async def save(self, digests: Sequence[bytes], payloads: Sequence[Payload]) -> int:
        """Save the blocks in the store."""
        saved = await self._shared.save(digests, payloads)
        self._write_filter.mark_stored(digests[:saved])
        return saved

    async def remove(self, digests: Sequence[bytes]) -> None:
        """Remove the blocks from the store."""
        self._write_filter.mark_missed(digests)
        await self._shared.remove(digests)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Renew the expiry of the blocks in the store, if the call is one of the sample."""
        if digests and random.random() < self._touch_fraction:
            self._shared.touch(digests)

    def fetch_rates(self) -> Mapping[str, FetchRate]:
        """The fetch rates of the store; a fetch from host memory takes no time."""
        return self._shared.fetch_rates()

    def watch(self, changed: PrefixesChanged | None) -> None:
        """Report the blocks in host memory."""
        self._host.watch(changed)

    async def stats(self) -> list[CacheTier]:
        """Host memory, if there is any, then the store."""
        return [*(await self._host.stats() if self._host.enabled else ()), *await self._shared.stats()]

    async def clear(self, *, shared: bool) -> list[CacheTier]:
        """Drop all blocks in host memory, and those in the store if asked to."""
        near = await self._host.clear(shared=False) if self._host.enabled else []
        cleared = [*near, *await self._shared.clear(shared=shared)]
        if shared:
            self._write_filter.clear()  # last, because blocks stored meanwhile may be gone too
        return cleared

    async def flush(self) -> None:
        """Wait until the blocks that were put are stored or dropped."""
        await self._shared.flush()

    async def close(self) -> None:
        """Close both."""
        await self._host.close()
        await self._shared.close()

    async def _absent(self, digests: Sequence[bytes]) -> set[bytes]:
        """The blocks that the store would take."""
        wanted = await self._shared.select_writes(digests)
        return {digest for digest, wants in zip(digests, wanted, strict=True) if wants}

    def _store(self, digest: bytes, payload: Payload) -> bool:
        taken = self._shared.put(digest, payload)
        if taken:
            self._write_filter.set(digest, BlockState.STORED)
        return taken
