"""Directory of cached prefixes: finds the workers that hold the KV of a request's leading tokens.

    tokens ── BlockHasher ──▶ digests of blocks ── PrefixDirectory, an index for each role ──▶ tokens at each worker

Fingerprint, KV format and salt are at the root of a chain (`baton.kv.hashing`), so the same tokens have different
digests in different formats. The router's digests only guide placement; workers compute their own.

An index has the blocks that workers report, and the blocks of prompts that this router has sent them. Routers need not
know of each other, because a worker reports its blocks to all of them. The states of a block in an index:

    prompt placed ── expected ── reported by the worker ── known ── dropped by the worker, or the worker is lost
                        └── not reported within EXPECTED_S seconds: forgotten

The name of a block is the first 8 bytes of its digest. A digest stands for all tokens before it too, and page pools
evict the end of a chain first, so a worker that holds a block is taken to hold all blocks before it. A binary search
therefore finds the workers that hold most of a chain; workers that hold nothing are not looked at.

Memory is bounded: above `most` blocks, an index keeps only every second name, then every fourth, and so on. Bits of the
name decide, so that the same names are left out for all workers, and all chains are known equally well, to within a few
blocks. The index does not become finer again when workers hold fewer blocks; a restarted router learns all names anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from baton.kv.hashing import NAME_BYTES, PackedDigests, block_digests, chain_root
from baton.ledger import CacheTier
from baton.telemetry.metrics import INDEX_BLOCKS

if TYPE_CHECKING:
    from baton.process.executors import RunOnThread
    from baton.worker.status import PrefixChange, WorkerIdentity, WorkerRole

_INLINE_TOKENS = 4096
"""Most tokens that are hashed on the event loop, which takes half a millisecond."""


@dataclass(frozen=True, slots=True)
class BlockNamespace:
    """The common properties of workers that have the same block names; `kv_format` is a digest, in hex."""

    fingerprint: str
    kv_format: str
    block_size: int

    @classmethod
    def of(cls, identity: WorkerIdentity) -> BlockNamespace:
        """The fingerprint, KV format and block size of a worker, which decide the names of its blocks."""
        return cls(identity.fingerprint, identity.kv_format.digest, identity.kv_format.block_size)


Digests: TypeAlias = Mapping[BlockNamespace, PackedDigests]
"""Digests of the full blocks of one context, by namespace; empty for a request that reads no cache.

They are packed into one bytes object, because many small objects take milliseconds of the event loop to free."""


class BlockHasher:
    """Hashes the blocks of one request; `run` hashes long contexts on a thread.

    The digests of the prompt are kept for later attempts.
    """

    def __init__(self, prompt_ids: Sequence[int], salt: bytes, run: RunOnThread) -> None:
        self._prompt_ids = prompt_ids
        self._salt = salt
        self._run = run
        self._prompt: dict[BlockNamespace, PackedDigests] = {}

    async def hash(self, namespaces: Iterable[BlockNamespace], output_ids: Sequence[int] = ()) -> Digests:
        """Digests of the full blocks of prompt and output, for each namespace."""
        return {namespace: await self._hash(namespace, output_ids) for namespace in list(namespaces)}

    async def _hash(self, namespace: BlockNamespace, output_ids: Sequence[int]) -> PackedDigests:
        root = chain_root(namespace.fingerprint, namespace.kv_format, self._salt)
        if namespace not in self._prompt:
            self._prompt[namespace] = await self._digests(root, self._prompt_ids, namespace.block_size)
        prompt = self._prompt[namespace]
        if not output_ids:
            return prompt
        # The last digest is the parent of the next block, as the root is the parent of the first.
        rest = [*self._prompt_ids[len(prompt) * namespace.block_size :], *output_ids]
        return prompt + await self._digests(prompt[-1] if prompt else root, rest, namespace.block_size)

    async def _digests(self, parent: bytes, token_ids: Sequence[int], block_size: int) -> PackedDigests:
        if len(token_ids) <= _INLINE_TOKENS:
            return _pack(parent, token_ids, block_size)
        return await self._run(partial(_pack, parent, token_ids, block_size))


def _pack(parent: bytes, token_ids: Sequence[int], block_size: int) -> PackedDigests:
    return PackedDigests(b"".join(block_digests(parent, token_ids, block_size)))


EXPECTED_S = 30.0
"""Seconds for which a block counts as held by a worker that was sent its prompt, without a report."""

MAX_BLOCKS = 2**20
"""Most blocks in an index, counted once for each holder; each takes about 200 bytes."""

MAX_EXPECTED = 2048
"""Most blocks of one prompt that become expected in one call, which bounds the time of the call. The worker's reports
have the other blocks, in messages of no more names."""

MAX_FORGOTTEN = 4096
"""Number of blocks after which a call forgets no more, about a millisecond's: blocks of a lost worker, those that are
expected no longer, or those that are left out. The next calls forget the others."""

V = TypeVar("V")

_Buckets: TypeAlias = list[dict[bytes, V]]
"""256 dicts, indexed by the last byte of a name, because a single dict of 200,000 names takes 7 ms to grow."""

_MAX_MASK_BITS = 8
_MAX_LEVELS = 8
"""Most lengths of prefixes in a match; workers that hold less than the shortest of them are left out."""

HolderLevel = tuple[int, Collection[str]]
"""A number of leading tokens, and the workers that hold at least as many."""


@dataclass(frozen=True)
class PrefixMatch:
    """The workers that hold leading tokens of a prompt; valid until the index changes."""

    levels: Sequence[HolderLevel]
    """Levels with the most tokens first; a worker in one level is in all later levels too.

    So each later level has fewer tokens and at least as many workers.
    """

    @cached_property
    def by_worker(self) -> dict[str, int]:
        """Least number of leading tokens that each worker holds, by address; workers in no level are left out."""
        tokens: dict[str, int] = {}
        for count, holders in reversed(self.levels):
            tokens.update(dict.fromkeys(holders, count))
        return tokens

    def tokens(self, worker: str) -> int:
        """Number of leading tokens that the worker holds."""
        return next((count for count, holders in self.levels if worker in holders), 0)


NO_MATCH = PrefixMatch(())


def _buckets() -> _Buckets[Any]:
    return [{} for _ in range(256)]


class PrefixIndex:
    """The blocks that each worker holds, with workers given by address; times are seconds on the caller's clock."""

    def __init__(self, most: int = MAX_BLOCKS) -> None:
        self._most = most
        self._blocks: _Buckets[tuple[str, ...] | set[str]] = _buckets()
        self._alone: dict[str, tuple[str, ...]] = {}
        """A tuple of one worker for each worker, shared by all blocks that only it holds."""
        self._by_worker: dict[str, _Buckets[float | None]] = {}
        """By worker and name: the time until which a block is expected; None if the worker has reported it."""
        self._expected: deque[tuple[float, str, list[bytes]]] = deque()
        self._size = 0
        self._mask = 0
        self._coarser: list[tuple[str, int]] = []
        """Workers and buckets whose left-out names have not been dropped yet."""

    def __len__(self) -> int:
        """Number of blocks, counted once for each worker that holds them."""
        return self._size

    def sizes(self) -> dict[str, int]:
        """Number of blocks of each worker."""
        return {worker: sum(map(len, blocks)) for worker, blocks in self._by_worker.items()}

    @property
    def granularity(self) -> int:
        """The number of blocks of which one is kept: 1 if all are."""
        return self._mask + 1

    def update(self, worker: str, *, reset: bool, stored: Collection[bytes], dropped: Collection[bytes]) -> None:
        """Apply a report of names (NAME_BYTES bytes each); a name in both lists was dropped after it was stored."""
        blocks = self._of(worker)
        if reset:
            self._drop(worker, [name for bucket in blocks for name, until in bucket.items() if until is None])
        for name in stored:
            if not name[0] & self._mask:
                self._store(worker, blocks, name, None)
        self._drop(worker, dropped)
        self._bound()

    def expect(self, worker: str, digests: Sequence[bytes], now: float, first: int = 0) -> None:
        """Expect blocks of a prompt at the worker that it was sent to, from index `first` on, MAX_EXPECTED at most."""
        self._expire(now)
        blocks, until, mask = self._of(worker), now + EXPECTED_S, self._mask
        names = [digest[:NAME_BYTES] for digest in digests[first : first + MAX_EXPECTED] if not digest[0] & mask]
        expected = [name for name in names if blocks[name[-1]].get(name, now) is not None]
        for name in expected:
            self._store(worker, blocks, name, until)
        if expected:
            self._expected.append((until, worker, expected))
        self._bound()

    def forget(self, worker: str) -> bool:
        """Forget up to MAX_FORGOTTEN blocks of a lost worker; returns whether there may be more."""
        names = list(islice(chain.from_iterable(self._by_worker.get(worker, ())), MAX_FORGOTTEN))
        self._drop(worker, names)
        if len(names) == MAX_FORGOTTEN:
            return True
        self._by_worker.pop(worker, None)
        self._alone.pop(worker, None)
        return False

    def match(self, digests: Sequence[bytes], block_size: int, now: float) -> PrefixMatch:
        """The workers that hold leading blocks of a chain, with the number of tokens of each."""
        self._expire(now)
        positions: Sequence[int] = range(len(digests))
        if self._mask:
            positions = [at for at in positions if not digests[at][0] & self._mask]
            digests = [digests[at] for at in positions]
        levels: list[HolderLevel] = []
        reach, known = self._reach(digests, len(digests), 0), 0
        while reach and len(levels) < _MAX_LEVELS:
            name = digests[reach - 1][:NAME_BYTES]
            holders = self._blocks[name[-1]][name]
            levels.append(((positions[reach - 1] + 1) * block_size, holders))
            known = len(holders)
            reach = self._reach(digests, reach - 1, known)
        return PrefixMatch(levels)

    def _reach(self, digests: Sequence[bytes], end: int, more_than: int) -> int:
        """The number of leading blocks, `end` at most, with more than `more_than` holders; by galloping search."""
        low, high, step = 0, end, 1
        while low < end:
            at = low + step - 1 if low + step < end else end - 1
            if self._count_holders(digests[at]) <= more_than:
                high = at
                break
            low, step = at + 1, 2 * step
        while low < high:
            middle = (low + high) // 2
            if self._count_holders(digests[middle]) > more_than:
                low = middle + 1
            else:
                high = middle
        return low

    def _of(self, worker: str) -> _Buckets[float | None]:
        if (blocks := self._by_worker.get(worker)) is None:
            blocks = self._by_worker[worker] = _buckets()
        return blocks

    def _count_holders(self, digest: bytes) -> int:
        name = digest[:NAME_BYTES]
        return len(self._blocks[name[-1]].get(name, ()))

    def _store(self, worker: str, blocks: _Buckets[float | None], name: bytes, until: float | None) -> None:
        own = blocks[name[-1]]
        if name not in own:
            self._size += 1
            known = self._blocks[name[-1]]
            holders = known.get(name)
            if holders is None:
                known[name] = self._alone.setdefault(worker, (worker,))
            elif isinstance(holders, set):
                holders.add(worker)
            else:
                known[name] = {worker, *holders}
        own[name] = until

    def _drop(self, worker: str, names: Collection[bytes]) -> None:
        if (blocks := self._by_worker.get(worker)) is None:
            return
        for name in names:
            own, known = blocks[name[-1]], self._blocks[name[-1]]
            if name not in own:
                continue
            del own[name]
            self._size -= 1
            holders = known[name]
            if isinstance(holders, set):
                holders.discard(worker)
                if len(holders) == 1:
                    (other,) = holders
                    known[name] = self._alone.setdefault(other, (other,))
            else:
                del known[name]

    def _expire(self, now: float) -> None:
        left = MAX_FORGOTTEN
        while left > 0 and self._expected and self._expected[0][0] <= now:
            until, worker, names = self._expected.popleft()
            left -= len(names)
            if (blocks := self._by_worker.get(worker)) is not None:
                self._drop(worker, [name for name in names if blocks[name[-1]].get(name) == until])

    def _bound(self) -> None:
        """Leave out half of the names if there are too many; each call drops those of some buckets, to be short."""
        if self._size > self._most and not self._coarser and self._mask.bit_length() < _MAX_MASK_BITS:
            self._mask = 2 * self._mask + 1
            self._coarser = [(worker, at) for worker, blocks in self._by_worker.items() for at in range(len(blocks))]
        left = MAX_FORGOTTEN
        while left > 0 and self._coarser:
            worker, at = self._coarser.pop()
            if (blocks := self._by_worker.get(worker)) is not None:
                left -= len(blocks[at])
                self._drop(worker, [name for name in blocks[at] if name[0] & self._mask])


_MAX_SHARED_BLOCKS = 16
"""Number of digests sent beyond the blocks that a decode worker is thought to hold, because reports come late."""


class PrefixDirectory:
    """The indexes of a router, one for each role; workers are given by address, `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill, self._decode = PrefixIndex(), PrefixIndex()
        self._hits = self._misses = 0

    def update(self, role: WorkerRole, worker: str, change: PrefixChange) -> None:
        """Apply a worker's report; that of a mixed worker counts for both roles."""
        for name, index in self._indexes(role):
            index.update(worker, reset=change.reset, stored=change.stored, dropped=change.dropped)
            INDEX_BLOCKS.labels(name).set(len(index))

    def forget(self, role: WorkerRole, worker: str) -> bool:
        """Forget up to MAX_FORGOTTEN blocks of a lost worker for each role; returns whether there may be more."""
        more = False
        for name, index in self._indexes(role):
            more |= index.forget(worker)
            INDEX_BLOCKS.labels(name).set(len(index))
        return more

    def match_prefill(self, digests: Digests) -> PrefixMatch:
        """The prefill workers that hold leading blocks of a context; valid until the next report."""
        return self._match(self._prefill, digests)

    def match_decode(self, digests: Digests) -> PrefixMatch:
        """The decode workers that hold leading blocks of a context; valid until the next report."""
        return self._match(self._decode, digests)

    def _match(self, index: PrefixIndex, digests: Digests) -> PrefixMatch:
        now = self._clock()
        matches = [index.match(blocks, namespace.block_size, now) for namespace, blocks in digests.items()]
        if len(matches) <= 1:
            return matches[0] if matches else NO_MATCH
        return PrefixMatch(sorted((level for each in matches for level in each.levels), key=lambda level: -level[0]))

    def expect(
        self, worker: str, namespace: BlockNamespace | None, digests: Digests, cached_tokens: int, *, writes: bool
    ) -> None:
        """Record that a prompt goes to a prefill worker, which is thought to hold its first `cached_tokens` tokens.

        If it `writes` to the cache, its other blocks are expected at the worker.
        """
        if namespace is None or (blocks := digests.get(namespace)) is None:
            return
        found = min(cached_tokens // namespace.block_size, len(blocks))
        self._hits += found
        self._misses += len(blocks) - found
        if writes:
            self._prefill.expect(worker, blocks, self._clock(), found)

    def digests_to_pin(self, worker: str, namespace: BlockNamespace | None, digests: Digests) -> bytes:
        """Digests to send to a decode worker, concatenated: of the blocks that it is thought to hold, and some more."""
        if namespace is None or not (blocks := digests.get(namespace)):
            return b""
        match = self._decode.match(blocks, namespace.block_size, self._clock())
        tokens = match.tokens(worker)
        return blocks.data(tokens // namespace.block_size + _MAX_SHARED_BLOCKS) if tokens else b""

    async def tiers(self) -> list[CacheTier]:
        """The indexes as one tier, with each block of a mixed worker once.

        Its hits are blocks of placed prompts that their worker was thought to hold.
        """
        prefill, decode = self._prefill.sizes(), self._decode.sizes()
        blocks = sum(max(prefill.get(each, 0), decode.get(each, 0)) for each in prefill | decode)
        coarsest = max(self._prefill.granularity, self._decode.granularity)
        state = "" if coarsest == 1 else f"knows one block in {coarsest}"
        return [CacheTier("index", blocks=blocks, hits=self._hits, misses=self._misses, state=state)]

    def _indexes(self, role: WorkerRole) -> list[tuple[str, PrefixIndex]]:
        """The indexes that have the blocks of a worker of `role`, with their names in metrics."""
        done = (("prefill", self._prefill, role.prefills), ("decode", self._decode, role.decodes))
        return [(name, index) for name, index, does in done if does]
