"""A worker's memory of blocks: seen once, seen again, stored in Redis, or refused on reading. Pure.

Keyed by the first 8 bytes of the digests, in two generations of a dictionary. When the young generation is full, it
becomes the old one, and the old one is dropped. An update moves a block to the young generation. At most about 18 MB
for 2 × 65,536 blocks. If two blocks have the same key, or a block was dropped, a write is skipped or repeated.

A block whose record was refused is written again when its chain is seen next. So are the blocks after it
that counted as stored: a look-up compares sizes only, and what damaged one record may have damaged many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

KEY_BYTES = 8


class BlockState(IntEnum):
    """The known facts about a block."""

    NEVER = 0
    ONCE = 1
    AGAIN = 2
    STORED = 3
    REFUSED = 4


_NEXT = (BlockState.ONCE, BlockState.AGAIN, BlockState.AGAIN, BlockState.STORED, BlockState.AGAIN)


class WriteFilter:
    """`BlockState` by digest, for the last `max_blocks` to 2 × `max_blocks` blocks that were set."""

    def __init__(self, max_blocks: int = 1 << 16) -> None:
        self._max_blocks = max_blocks
        self._young: dict[bytes, BlockState] = {}
        self._old: dict[bytes, BlockState] = {}

    def state(self, digest: bytes) -> BlockState:
        """The remembered state of a block."""
        name = digest[:KEY_BYTES]
        return self._young.get(name) or self._old.get(name) or BlockState.NEVER

    def set(self, digest: bytes, state: BlockState) -> None:
        """Set the state of a block."""
        if len(self._young) >= self._max_blocks:
            self._young, self._old = {}, self._young
        self._young[digest[:KEY_BYTES]] = state

    def states(self, digests: Iterable[bytes]) -> Iterator[BlockState]:
        """The state of each block of a chain; AGAIN for one that counts as stored, but is behind a refused one."""
        doubted = False
        for digest in digests:
            state = self.state(digest)
            doubted = doubted or state is BlockState.REFUSED
            yield BlockState.AGAIN if doubted and state is BlockState.STORED else state

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
        """Record that records of the right size exist; this does not change blocks whose record was refused."""
        self.mark_stored(digest for digest in digests if self.state(digest) is not BlockState.REFUSED)

    def mark_missed(self, digests: Iterable[bytes]) -> None:
        """Record that these blocks may not be stored any more."""
        for digest in digests:
            if self.state(digest) in (BlockState.STORED, BlockState.REFUSED):
                self.set(digest, BlockState.AGAIN)

    def mark_refused(self, digests: Iterable[bytes]) -> None:
        """Record that the records of these blocks were read and refused."""
        for digest in digests:
            self.set(digest, BlockState.REFUSED)

    def mark_checked(self, digests: Iterable[bytes]) -> None:
        """Record that the records were read and are valid; a refused one was replaced since."""
        self.mark_stored(digest for digest in digests if self.state(digest) is BlockState.REFUSED)

    def clear(self) -> None:
        """Forget all blocks."""
        self._young, self._old = {}, {}
