"""Digests of prefix blocks: a SHA-256 chain, the same in every process, on every machine and in every version.

    root = SHA-256(fields("baton prefix chain 1", model fingerprint, KV format digest, salt))
    d[0] = SHA-256(root ‖ ids of block 0)
    d[i] = SHA-256(d[i-1] ‖ ids of block i)

`fields` writes each field's length before it as a little-endian uint32, so that two different tuples of fields never
give the same bytes. Token ids are little-endian uint32. A digest identifies a block together with everything that its
KV depends on: the model, the layout, the tenant, and every token before it. Only full blocks have a digest. Root and
parent both have 32 bytes, and a block's length is part of the KV format, so a root can't be mistaken for a block.

The golden vectors in the tests fix this encoding: all versions in a fleet must agree on it during an upgrade.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

DIGEST_BYTES = 32

MAX_SALT_BYTES = 64
"""Limit of the salt of a chain in a message to a worker; `tenant_salt` and `request_salt` make 32 bytes."""

NAME_BYTES = 8
"""Leading bytes of a digest by which routers and workers name a block."""

_CHAIN = b"baton prefix chain 1"
_SALT = b"baton tenant salt 1"
_REQUEST_SALT = b"baton request salt 1"
_ID_BYTES = 4
_PIECE = 16_384
"""Number of token ids converted in one call, which keeps the interpreter's lock."""


def chain_root(fingerprint: str, kv_format: str, salt: bytes = b"") -> bytes:
    """Root of the chains of one (model fingerprint, KV format digest, tenant salt): 32 bytes."""
    return hashlib.sha256(_fields(_CHAIN, fingerprint.encode(), kv_format.encode(), salt)).digest()


def block_digests(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One 32-byte digest for each full block of `block_size` tokens; ids must be in [0, 2**32).

    Other threads can run between pieces of a long list.
    """
    full, piece = len(token_ids) // block_size, max(1, _PIECE // block_size) * block_size
    digests, parent, sha256, stride = [], root, hashlib.sha256, block_size * _ID_BYTES
    for begin in range(0, full * block_size, piece):
        ids = array("I", token_ids[begin : min(begin + piece, full * block_size)])
        if sys.byteorder == "big":
            ids.byteswap()
        data = ids.tobytes()
        for start in range(0, len(data), stride):
            parent = sha256(parent + data[start : start + stride]).digest()
            digests.append(parent)
    return digests


class RollingBlockHasher:
    """Hashes the blocks of a growing sequence. Any thread may read `digests` meanwhile; it only gets longer."""

    def __init__(self, root: bytes, block_size: int, digests: Sequence[bytes], rest: Sequence[int]) -> None:
        """`root` is that of the chain. `digests` are those of the full blocks, `rest` the tokens with KV after them."""
        self.digests = list(digests)
        self._size = block_size
        self._parent = self.digests[-1] if digests else root
        self._rest = list(rest)

    def fork(self, token_id: int) -> RollingBlockHasher:
        """A copy of the hasher for a choice that continues with this token."""
        hasher = RollingBlockHasher(self._parent, self._size, self.digests, self._rest)
        hasher.extend([token_id])
        return hasher

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. The KV of the last one is not written yet: the next step writes it."""
        for token_id in token_ids:
            self._rest.append(token_id)
            if len(self._rest) > self._size:
                (self._parent,) = block_digests(self._parent, self._rest[: self._size], self._size)
                del self._rest[: self._size]
                self.digests.append(self._parent)


class PackedDigests(Sequence[bytes]):
    """A sequence of digests, kept as one `bytes`: an object for each would be too many for a long prompt."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data) // DIGEST_BYTES

    def __eq__(self, other: object) -> bool:
        return self._data == other._data if isinstance(other, PackedDigests) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._data)

    def __add__(self, other: PackedDigests) -> PackedDigests:
        return PackedDigests(self._data + other._data)

    def data(self, most: int) -> bytes:
        """The first `most` digests, joined."""
        return self._data[: most * DIGEST_BYTES]

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return self._data[chosen * DIGEST_BYTES : (chosen + 1) * DIGEST_BYTES]
        return [self._data[each * DIGEST_BYTES : (each + 1) * DIGEST_BYTES] for each in chosen]


def tenant_salt(fleet_secret: str, tenant: str) -> bytes:
    """Salt of a tenant's chains: the same on every router, not guessable without the fleet's secret."""
    return hmac.digest(fleet_secret.encode(), _fields(_SALT, tenant.encode()), "sha256")


def request_salt(fleet_secret: str, tenant: str, cache_salt: str = "") -> bytes:
    """Salt of a request's chain; requests with different `cache_salt` share no blocks.

    Without a `cache_salt` it is the tenant's salt. Without a fleet secret there is at most one tenant, whose salt is
    empty; then only the `cache_salt` counts.
    """
    if not cache_salt:
        return tenant_salt(fleet_secret, tenant) if fleet_secret else b""
    if not fleet_secret:
        return hashlib.sha256(_fields(_REQUEST_SALT, cache_salt.encode())).digest()
    return hmac.digest(fleet_secret.encode(), _fields(_REQUEST_SALT, tenant.encode(), cache_salt.encode()), "sha256")


def _fields(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)
