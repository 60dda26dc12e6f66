"""Records: what goes in comes out, and nothing else does."""

import hmac
import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix.redis.record import HEADER_BYTES, BadRecord, RecordCodec

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=3, block_size=4)
CODEC = RecordCodec(FORMAT, "secret", lambda n: bytes(range(n)))
DIGEST = bytes(range(32))
PAYLOAD = bytes(i % 251 for i in range(CODEC.payload_bytes))
RECORD = CODEC.encode(DIGEST, PAYLOAD)


def reason(record: bytes, digest: bytes = DIGEST, codec: RecordCodec = CODEC) -> str:
    with pytest.raises(BadRecord) as caught:
        codec.decode(digest, record)
    return caught.value.reason


def test_round_trip() -> None:
    assert len(RECORD) == CODEC.record_bytes == HEADER_BYTES + 2 * 2 * 4 * 4 * 3 * 4
    assert bytes(CODEC.decode(DIGEST, RECORD)) == PAYLOAD
    assert CODEC.encode(DIGEST, memoryview(PAYLOAD)) == RECORD


def test_golden_record() -> None:
    assert RECORD[:HEADER_BYTES].hex() == (
        "424b5652020000002562340af021d560e74f589805ffee01f11df1bcad2b5a79"
        "a6de3c831877271d000102030405060708090a0b0c0d0e0f1011121314151617"
        "18191a1b1c1d1e1f0003000000000000734140cd000102030405060708090a0b"
        "509281900cdeebfacab6fc336c6f6ffb"
    )


def test_the_mac_is_what_the_module_says() -> None:
    """GMAC as SP 800-38D has it, spelled out: GHASH over the payload and the lengths, masked by AES of the IV."""
    fleet_key = hmac.digest(b"secret", b"baton prefix record 2", "sha256")
    aes = Cipher(algorithms.AES(hmac.digest(fleet_key, RECORD[:96], "sha256")), modes.ECB()).encryptor()
    hash_key, mask = aes.update(bytes(16)), aes.update(bytes(12) + b"\0\0\0\1")
    padded = PAYLOAD + bytes(-len(PAYLOAD) % 16) + (8 * len(PAYLOAD)).to_bytes(8, "big") + bytes(8)
    state = 0
    for start in range(0, len(padded), 16):
        state = multiplied(state ^ int.from_bytes(padded[start : start + 16], "big"), int.from_bytes(hash_key, "big"))
    assert RECORD[96:112] == (state ^ int.from_bytes(mask, "big")).to_bytes(16, "big")


def multiplied(x: int, y: int) -> int:
    """The product in GF(2**128), algorithm 1 of SP 800-38D."""
    product = 0
    for bit in range(127, -1, -1):
        if x >> bit & 1:
            product ^= y
        y = y >> 1 ^ (0xE1 << 120 if y & 1 else 0)
    return product


def test_each_record_has_a_key_of_its_own() -> None:
    codec = RecordCodec(FORMAT, "secret")
    records = {codec.encode(DIGEST, PAYLOAD) for _ in range(20)}
    assert len(records) == 20
    for record in records:
        assert bytes(codec.decode(DIGEST, record)) == PAYLOAD
    one, other = list(records)[:2]
    assert reason(one[:96] + other[96:112] + PAYLOAD) == "forged"


def test_each_fault_has_its_reason() -> None:
    other = RecordCodec(replace(FORMAT, block_size=8), "secret")
    assert reason(b"") == "foreign"
    assert reason(b"x" * len(RECORD)) == "foreign"
    assert reason(RECORD[:100]) == "truncated"
    assert reason(RECORD[:-1]) == "truncated"
    assert reason(RECORD + b"\0") == "truncated"
    assert reason(RECORD[:4] + b"\1" + RECORD[5:]) == "version"
    assert reason(other.encode(DIGEST, PAYLOAD * 2)) == "kv_format"
    assert reason(RECORD, digest=os.urandom(32)) == "misplaced"
    assert reason(RECORD[:-1] + b"\0") == "corrupt"
    assert reason(RecordCodec(FORMAT, "wrong").encode(DIGEST, PAYLOAD)) == "forged"


def test_a_record_moved_to_another_key_is_forged_even_if_its_name_is_changed() -> None:
    name = os.urandom(32)
    assert reason(RECORD[:40] + name + RECORD[72:], digest=name) == "forged"


def test_a_payload_of_the_wrong_length_is_no_block() -> None:
    assert reason(CODEC.encode(DIGEST, PAYLOAD[:-4])) == "truncated"
