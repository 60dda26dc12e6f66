"""What lies in Redis in the place of a prompt's end, and is none, is a miss: the last tokens are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.engine.fake import expected_tokens
from baton.kv.format import KvFormat
from baton.kv.prefix.record import HEADER_BYTES, RecordCodec
from baton.kv.prefix.redis import key_prefix
from tests.prefill import PROMPT, by_tier, fetch_all, serving
from tests.prompt_ends import ask, ends, ends_since, pulled
from tests.redis_server import Server


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)


Plant = Callable[[KvFormat, bytes, dict[bytes, bytes]], bytes]
"""From the format, the end's digest and all records to what is put in the end's place."""


def damaged(kv_format: KvFormat, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    record = records[digest]
    return record[:-1] + bytes([record[-1] ^ 1])


def cut_short(kv_format: KvFormat, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return records[digest][:-100]


def empty(kv_format: KvFormat, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return b""


def signed_with_another_secret(kv_format: KvFormat, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return RecordCodec(kv_format, "another secret").encode(digest, records[digest][HEADER_BYTES:])


def a_block_in_its_place(kv_format: KvFormat, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return next(record for other, record in records.items() if other != digest)


PLANTS = (
    damaged,
    cut_short,
    empty,
    signed_with_another_secret,
    a_block_in_its_place,
)


@pytest.mark.parametrize("pool", [0, 48])
@pytest.mark.parametrize("plant", PLANTS)
async def test_what_is_no_end_of_this_prompt_is_a_miss(valkey: Server, plant: Plant, pool: int) -> None:
    async with serving(redis=valkey.url) as first, serving(redis=valkey.url) as client:
        with valkey.client() as redis:
            prefix = key_prefix(client.app.engine.spec.kv_format)
            await ask(first)
            blocks = set(redis.scan_iter())
            await ask(first)
            records = {bytes.fromhex(key.decode().removeprefix(prefix)): redis.get(key) for key in redis.scan_iter()}
            (end,) = set(redis.scan_iter()) - blocks
            digest = bytes.fromhex(end.decode().removeprefix(prefix))
            redis.set(end, plant(client.app.engine.spec.kv_format, digest, records))
            if pool:
                await ask(client, PROMPT[:pool])
            used = ends()
            done, _, tokens = await pulled(client, PROMPT, "t")
            assert by_tier(done) == {**({"pool": pool} if pool else {}), "redis": 96 - pool}
            assert tokens == expected_tokens(PROMPT, 5)
            assert ends_since(used)[1] == 0
