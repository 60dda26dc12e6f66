"""Records: what goes in comes out, and nothing else does."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix.record import HEADER_BYTES, BadRecord, RecordCodec

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=3, block_size=4)
CODEC = RecordCodec(FORMAT, "secret")
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
        "424b5652010000002562340af021d560e74f589805ffee01f11df1bcad2b5a79"
        "a6de3c831877271d000102030405060708090a0b0c0d0e0f1011121314151617"
        "18191a1b1c1d1e1f0003000000000000734140cd000000000000000000000000"
        "27eabee1fda5ecb04615af8121a98b3b0dc284d6ff50a554b5b90c280acc9598"
    )


def test_each_fault_has_its_reason() -> None:
    other = RecordCodec(replace(FORMAT, block_size=8), "secret")
    assert reason(b"") == "foreign"
    assert reason(b"x" * len(RECORD)) == "foreign"
    assert reason(RECORD[:100]) == "truncated"
    assert reason(RECORD[:-1]) == "truncated"
    assert reason(RECORD + b"\0") == "truncated"
    assert reason(RECORD[:4] + b"\2" + RECORD[5:]) == "version"
    assert reason(other.encode(DIGEST, PAYLOAD * 2)) == "kv_format"
    assert reason(RECORD, digest=os.urandom(32)) == "misplaced"
    assert reason(RECORD[:-1] + b"\0") == "corrupt"
    assert reason(RecordCodec(FORMAT, "wrong").encode(DIGEST, PAYLOAD)) == "forged"


def test_a_record_moved_to_another_key_is_forged_even_if_its_name_is_changed() -> None:
    name = os.urandom(32)
    assert reason(RECORD[:40] + name + RECORD[72:], digest=name) == "forged"


def test_a_payload_of_the_wrong_length_is_no_block() -> None:
    assert reason(CODEC.encode(DIGEST, PAYLOAD[:-4])) == "truncated"


def test_every_flipped_bit_is_caught() -> None:
    for at in range(len(RECORD)):
        reason(RECORD[:at] + bytes([RECORD[at] ^ 0x40]) + RECORD[at + 1 :])


@given(st.binary(max_size=2 * CODEC.record_bytes))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    reason(data)
    reason(RECORD[:HEADER_BYTES] + data[: CODEC.payload_bytes].ljust(CODEC.payload_bytes, b"\xff"))
