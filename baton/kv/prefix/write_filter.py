"""What a worker remembers of blocks that it need not hold: seen once, seen again, stored or refused in Redis. Pure.

By the first 8 bytes of their digests, in two generations of a dictionary: when the young one is full, the old one is
forgotten. A block met in either is young again once it is noted. At most about 18 MB for 2 × 65,536 blocks. Two
blocks of the same name, or a forgotten one, cost a write that is not made, or made once more.

A block whose record was refused is written again with the next sighting of its chain, and so are the blocks behind it
that were taken for stored: a look-up compares sizes only, and what damaged one record may have damaged many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

NAME_BYTES = 8


class BlockState(IntEnum):
    """How far a block has come."""

    NEVER = 0
    ONCE = 1
    AGAIN = 2
    STORED = 3
    REFUSED = 4


_NEXT = (BlockState.ONCE, BlockState.AGAIN, BlockState.AGAIN, BlockState.STORED, BlockState.AGAIN)


class WriteFilter:
    """`BlockState` by digest, for the last `most` to 2 × `most` blocks that were set."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._young: dict[bytes, BlockState] = {}
        self._old: dict[bytes, BlockState] = {}

    def state(self, digest: bytes) -> BlockState:
        """What is remembered of a block."""
        name = digest[:NAME_BYTES]
        return self._young.get(name) or self._old.get(name) or BlockState.NEVER

    def set(self, digest: bytes, state: BlockState) -> None:
        """Remember it."""
        if len(self._young) >= self._most:
            self._young, self._old = {}, self._young
        self._young[digest[:NAME_BYTES]] = state

    def observe(self, digests: Sequence[bytes]) -> list[BlockState]:
        """Count one sighting of each block of a chain, in its order; returns what they have come to."""
        seen: list[BlockState] = []
        doubted = False
        for digest in digests:
            before = self.state(digest)
            doubted = doubted or before is BlockState.REFUSED
            now = BlockState.AGAIN if doubted and before is BlockState.STORED else _NEXT[before]
            self.set(digest, now)
            seen.append(now)
        return seen

    def mark_stored(self, digests: Iterable[bytes]) -> None:
        """They are known to be stored."""
        for digest in digests:
            self.set(digest, BlockState.STORED)

    def mark_found(self, digests: Iterable[bytes]) -> None:
        """Something of the right size is stored under their names, which is no news of one that was refused."""
        self.mark_stored(digest for digest in digests if self.state(digest) is not BlockState.REFUSED)

    def mark_missed(self, digests: Iterable[bytes]) -> None:
        """They are not known to be stored any more."""
        for digest in digests:
            if self.state(digest) in (BlockState.STORED, BlockState.REFUSED):
                self.set(digest, BlockState.AGAIN)

    def mark_refused(self, digests: Iterable[bytes]) -> None:
        """What is stored under their names was read, and is not these blocks."""
        for digest in digests:
            self.set(digest, BlockState.REFUSED)

    def mark_checked(self, digests: Iterable[bytes]) -> None:
        """They were read and are right: of those that were refused, somebody has written good records since."""
        self.mark_stored(digest for digest in digests if self.state(digest) is BlockState.REFUSED)

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = {}, {}
