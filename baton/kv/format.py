"""The layout of KV on the wire and in the prefix cache, the same for every worker of a fleet.

It knows nothing of pages, devices or tensor-parallel degree: a token's state in a layer is a list of named parts,
each `[kv_heads, ...]`, and a run of tokens is each part row-major as `[tokens, kv_heads, ...]`. A prefix block is layer
after layer, part after part, each `[block_size, kv_heads, ...]`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

KV_VERSION = 1
"""Version of the layout below. It is part of the name of every cached block, so a new version starts with an empty
prefix cache."""

KEYS, VALUES = "k", "v"
"""Names of the parts of plain attention. Nothing but this module spells them."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element types of pages, cached blocks and frames."""


@dataclass(frozen=True, slots=True)
class KvPart:
    """One part of a token's state in a layer: `shape` is `(kv_heads, ...)`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def attention_parts(dtype: str, kv_heads: int, head_dim: int) -> tuple[KvPart, ...]:
    """The parts of plain attention: keys and values, each `(kv_heads, head_dim)`."""
    return tuple(KvPart(name, dtype, (kv_heads, head_dim)) for name in (KEYS, VALUES))


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers and KV heads that one process of a worker holds, and the address ("host:port") where it serves them.

    An empty host (":7001") stands for the host to which routers connect. Manifests and commits have no address.
    """

    kv_address: str
    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The properties of KV that both ends of a transfer and every reader of a cached block must agree on."""

    parts: tuple[KvPart, ...]
    layers: int
    block_size: int
    version: int = KV_VERSION

    @property
    def heads(self) -> int:
        """Number of KV heads, the same in every part."""
        return self.parts[0].shape[0]

    @property
    def whole(self) -> Shard:
        """The shard of a worker that has only one."""
        return Shard("", range(self.layers), range(self.heads))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and parts."""
        return self.layers * sum(part.token_bytes for part in self.parts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one prefix block."""
        return self.block_size * self.token_bytes

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the canonical JSON of all fields."""
        return _digest(self)

    def is_covered_by(self, shards: Sequence[Shard]) -> bool:
        """Whether the shards hold every layer and head exactly once."""
        if any(shard.layers.stop > self.layers or shard.heads.stop > self.heads for shard in shards):
            return False
        covered = [at for shard in shards for at in itertools.product(shard.layers, shard.heads)]
        return sorted(covered) == list(itertools.product(range(self.layers), range(self.heads)))

    def can_convert_from(self, other: KvFormat) -> bool:
        """Whether KV of `other` differs from this format in element types only."""
        return self._shape() == other._shape()

    def _shape(self) -> tuple[object, ...]:
        return (tuple((p.name, p.shape) for p in self.parts), self.layers, self.block_size, self.version)


@lru_cache(maxsize=16)
def _digest(kv_format: KvFormat) -> str:
    # Cached, because every request needs it.
    return hashlib.sha256(json.dumps(asdict(kv_format), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class PartData:
    """One part's bytes for a run of tokens: row-major `[tokens, heads, ...]` in `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
