"""Prefix-cache records: only the exact bytes that a holder of the fleet's secret wrote for this block are accepted."""

import random

from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix.redis.record import HEADER_BYTES, BadRecord, RecordCodec
from tests.effort import fuzz
from tests.fuzz.mutation import arbitrary, changed

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=4)
CODEC, OTHER_FLEET = RecordCodec(FORMAT, "secret"), RecordCodec(FORMAT, "another secret")


def accepted(digest: bytes, record: bytes) -> bool:
    try:
        CODEC.decode(digest, record)
    except BadRecord:
        return False
    return True


@fuzz("records: damaged, mixed or forged", 3000)
def test_only_exact_records_are_accepted(rng: random.Random) -> None:
    digest, other_digest = rng.randbytes(32), rng.randbytes(32)
    payload, other_payload = (rng.randbytes(CODEC.payload_bytes) for _ in range(2))
    record, other = CODEC.encode(digest, payload), CODEC.encode(other_digest, other_payload)
    assert bytes(CODEC.decode(digest, record)) == payload
    assert not accepted(digest, changed(rng, record))
    assert not accepted(digest, arbitrary(rng, 2 * CODEC.record_bytes))
    assert not accepted(other_digest, record)
    assert not accepted(digest, OTHER_FLEET.encode(digest, payload))
    cut = rng.choice((4, 6, 8, 40, 72, 80, 84, 96, HEADER_BYTES, rng.randrange(1, len(record))))
    for mixed in (record[:cut] + other[cut:], other[:cut] + record[cut:]):
        assert mixed == record or not accepted(digest, mixed)
