"""The stored record of one cached block: it describes itself, and proves that its writer has the fleet's secret.

    offset  size
         0     4  magic "BKVR"
         4     2  version, little-endian like all numbers here
         6     2  zero
         8    32  SHA-256 digest of the KV format
        40    32  digest of the block, the same as in its key
        72     8  payload length
        80     4  CRC-32C of the payload
        84    12  random nonce
        96    16  GMAC of the payload
       112     …  payload

The MAC is AES-256-GMAC (NIST SP 800-38D) with the payload as associated data, under a key that is used once:

    fleet key  = HMAC-SHA256(fleet secret, "baton prefix record 2")
    record key = HMAC-SHA256(fleet key, bytes 0..95)

So only a process with the fleet's secret can write a valid block, and a changed header, for example another digest,
gives another key. The nonce gives different keys to two writers of one block with different payloads, so a constant IV
is safe. A forger without the key succeeds with a probability of (payload bytes / 16) / 2**128 for each try.

The checksum distinguishes damage from forgery, so a reader computes it only if the MAC fails. A check costs about a
tenth of HMAC-SHA256 over the payload, and releases the GIL
(docs/decisions/0005-one-time-gmac-for-cached-blocks.md).
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable

from crc32c import crc32c
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import BatonError
from baton.kv.format import KvFormat
from baton.kv.prefix.contract import Payload

MAGIC = b"BKVR"
VERSION = 2
HEADER_BYTES = 112
NONCE_BYTES = 12

_FIELDS = struct.Struct("<4sH2x32s32sQI12s")
_KEY = b"baton prefix record 2"
_IV = bytes(12)


class BadRecord(BatonError):
    """A record that is not the requested block; `reason` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a usable prefix record: {reason}")
        self.reason = reason


class RecordCodec:
    """Packs and checks the records of one fleet and KV format; usable from any thread.

    `random_bytes(n)` gives the nonces; a nonce must not be used twice for a block.
    """

    def __init__(
        self, kv_format: KvFormat, fleet_secret: str, random_bytes: Callable[[int], bytes] = os.urandom
    ) -> None:
        self.payload_bytes = kv_format.block_bytes
        self.record_bytes = HEADER_BYTES + self.payload_bytes
        self._format = bytes.fromhex(kv_format.digest)
        self._key = hmac.digest(fleet_secret.encode(), _KEY, "sha256")
        self._random_bytes = random_bytes

    def header(self, digest: bytes, payload: Payload) -> bytes:
        """The record of a block without its payload, which follows unchanged."""
        nonce = self._random_bytes(NONCE_BYTES)
        fields = _FIELDS.pack(MAGIC, VERSION, self._format, digest, len(payload), crc32c(payload), nonce)
        return fields + self._gmac(fields).encrypt(_IV, b"", payload)

    def encode(self, digest: bytes, payload: Payload) -> bytes:
        """The record of a block."""
        return b"".join((self.header(digest, payload), payload))

    def decode(self, digest: bytes, record: Payload) -> memoryview:
        """The payload, a view of `record`; raises BadRecord if `encode` can't have made the record."""
        view = memoryview(record)
        if len(view) < HEADER_BYTES:
            raise BadRecord("truncated" if view[: len(MAGIC)] == MAGIC else "foreign")
        magic, version, kv_format, named, length, checksum, _ = _FIELDS.unpack_from(view)
        if magic != MAGIC:
            raise BadRecord("foreign")
        if version != VERSION:
            raise BadRecord("version")
        if kv_format != self._format:
            raise BadRecord("kv_format")
        if named != digest:
            raise BadRecord("misplaced")
        payload = view[HEADER_BYTES:]
        if len(payload) != length or length != self.payload_bytes:
            raise BadRecord("truncated")
        try:
            self._gmac(view[: _FIELDS.size]).decrypt(_IV, view[_FIELDS.size : HEADER_BYTES], payload)
        except InvalidTag:
            raise BadRecord("forged" if crc32c(payload) == checksum else "corrupt") from None
        return payload

    def _gmac(self, fields: Payload) -> AESGCM:
        """AES-GCM without a message, under the key of the record with these fields."""
        return AESGCM(hmac.digest(self._key, fields, "sha256"))
