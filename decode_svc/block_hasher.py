"""The names of a sequence's prefix blocks, each from the moment that its KV is final. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.contract import EngineSpec
from baton.kv.hashing import block_digests, chain_root


class RollingBlockHasher:
    """Grows with a sequence; `digests` may be read from any thread meanwhile, and only ever gets longer."""

    def __init__(self, spec: EngineSpec, salt: bytes, digests: Sequence[bytes], rest: Sequence[int]) -> None:
        """`digests` name full blocks (`baton.kv.hashing`), `rest` are the tokens behind them; their KV is there."""
        self.digests = list(digests)
        self._size = spec.kv_format.block_size
        self._parent = self.digests[-1] if digests else chain_root(spec.fingerprint, spec.kv_format.digest, salt)
        self._rest = list(rest)

    def fork(self, token_id: int) -> RollingBlockHasher:
        """The hasher of a choice that goes on with this token."""
        hasher = RollingBlockHasher.__new__(RollingBlockHasher)
        hasher.digests, hasher._size, hasher._parent = list(self.digests), self._size, self._parent
        hasher._rest = list(self._rest)
        hasher.extend([token_id])
        return hasher

    def extend(self, token_ids: Iterable[int]) -> None:
        """The sequence has got these tokens. The KV of the last of them is not there: the next step writes it."""
        for token_id in token_ids:
            self._rest.append(token_id)
            if len(self._rest) > self._size:
                (self._parent,) = block_digests(self._parent, self._rest[: self._size], self._size)
                del self._rest[: self._size]
                self.digests.append(self._parent)
