"""Nobody learns from the prefix cache what others asked, and none without the fleet's secret puts words into it."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from prometheus_client import REGISTRY
from redis import Redis

from baton import AsyncClient, keys
from baton.completion import Completion
from baton.kv.prefix.redis.cache import key_prefix
from baton.kv.prefix.redis.record import HEADER_BYTES, RecordCodec
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet, serving
from tests.prefill import fetch_all
from tests.prefix_redis import faults
from tests.redis_server import Server

PROMPT_TOKENS = 96
COUNTERS = (
    "baton_prefill_tokens",
    "baton_prefix_blocks",
    "baton_prefix_faults",
    "baton_transfer_bytes",
    "baton_placed_prefix_tokens",
    "baton_decode_reused_tokens",
)
COMMANDS = ("strlen", "get", "getex", "set", "expire", "mget", "exists")
CHECKSUM = slice(80, 84)
"""Of the payload, in a record."""
SETTINGS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


async def test_others_prompts_are_not_found(valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim's prompt, asked by another tenant or with another salt, is neither found nor looked for in any other
    way than one that nobody ever asked, so that not even its time can tell them apart."""
    fetch_all(monkeypatch)
    file, chosen = tmp_path / "keys.json", random.Random(1)
    secrets = {tenant: keys.add(file, tenant=tenant) for tenant in ("victim", "attacker")}
    async with Fleet(make_checkpoint("llama", tmp_path / "model"), redis=valkey.url, fleet_secret=SECRET) as fleet:
        prefill, decode = await fleet.prefill(), await fleet.decode()
        router = await fleet.start_router([prefill], [decode], api_keys=str(file), fleet_secret=SECRET)
        await serving(router.address)
        async with (
            AsyncClient(router.address, api_key=secrets["victim"]) as victim,
            AsyncClient(router.address, api_key=secrets["attacker"]) as attacker,
        ):

            async def work(client: AsyncClient, prompt: list[int], salt: str = "") -> dict[str, int]:
                """Work of fleet and store for one request."""
                before = works(valkey)
                await client.complete(prompt, cache_salt=salt, max_tokens=2, temperature=0, ignore_eos=True)
                await prefill.worker.wait_finished()
                await decode.worker.write_backs.wait_finished()
                await decode.cache.flush()
                return {name: count - before[name] for name, count in works(valkey).items() if count > before[name]}

            asked = [chosen.randrange(4, 256) for _ in range(PROMPT_TOKENS)]
            first = await work(victim, asked)
            assert await work(victim, asked) != first
            prefill.engine.drop_cached()
            assert "prefill_tokens redis" in await work(victim, asked), "else this shows nothing"
            never_asked = await work(attacker, [chosen.randrange(4, 256) for _ in range(PROMPT_TOKENS)])
            assert never_asked == first
            assert await work(attacker, asked) == never_asked
            assert await work(victim, asked, "a salt") == never_asked


def works(server: Server) -> Counter[str]:
    """Work done so far: tokens prefilled by source, blocks by tier, bytes moved, what the store was asked."""
    found = Counter[str]()
    for metric in REGISTRY.collect():
        if metric.name in COUNTERS:
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    name = f"{metric.name.removeprefix('baton_')} {' '.join(sample.labels.values())}"
                    found[name] = int(sample.value)
    with server.client() as client:
        stats = client.info("stats")
        found |= {name: stats[name] for name in ("keyspace_hits", "keyspace_misses")}
        for name, told in client.info("commandstats").items():
            if name.removeprefix("cmdstat_") in COMMANDS:
                found[name] = told["calls"]
    return found


Plant = Callable[[RecordCodec, bytes, dict[bytes, bytes]], bytes]
"""From the fleet's format, a block's digest and all genuine records to what is put in the block's place."""


def signed_with_another_secret(own: RecordCodec, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return own.encode(digest, _other_words(records[digest]))


def other_words_with_the_old_mac(own: RecordCodec, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    """The checksum is right, so that nothing but the MAC tells."""
    payload = _other_words(records[digest])
    checksum = crc32c(payload).to_bytes(CHECKSUM.stop - CHECKSUM.start, "little")
    return records[digest][: CHECKSUM.start] + checksum + records[digest][CHECKSUM.stop : HEADER_BYTES] + payload


def a_genuine_record_of_another_place(own: RecordCodec, digest: bytes, records: dict[bytes, bytes]) -> bytes:
    return next(record for other, record in records.items() if other != digest)


PLANTS: dict[Plant, str] = {
    signed_with_another_secret: "forged",
    other_words_with_the_old_mac: "forged",
    a_genuine_record_of_another_place: "misplaced",
}


async def test_a_writer_to_redis_without_the_secret_can_not_plant_an_answer(valkey: Server, tmp_path: Path) -> None:
    """Data put in place of cached blocks is refused and counted, and the answer is that of a fleet without a cache.
    With the secret the same plant does change it, so that the secret is what keeps it out."""
    prompt = prompt_ids(128)
    async with Fleet(make_checkpoint("llama", tmp_path / "model"), dtype="float32") as fleet:
        decode = await fleet.decode()
        first = await fleet.prefill(redis=valkey.url)
        writer = await fleet.router([first], [decode])
        expected = (await writer.complete(prompt, **SETTINGS, cache="write")).token_ids
        await first.worker.wait_finished()
        await first.cache.flush()

        async def asked_anew() -> Completion:
            # A worker without pages and rates, so that Redis is asked for certain.
            reader = await fleet.router([await fleet.prefill(redis=valkey.url)], [decode])
            return await reader.complete(prompt, **SETTINGS, cache="read")

        genuine = await asked_anew()
        assert genuine.usage.cached.redis > 0
        assert genuine.token_ids == expected
        kv_format = first.engine.spec.kv_format
        with valkey.client() as redis:
            blocks = Blocks(redis, key_prefix(kv_format))
            for plant, reason in PLANTS.items():
                before = faults(reason)
                blocks.replace(plant, RecordCodec(kv_format, "another secret"))
                found = await asked_anew()
                assert found.token_ids == expected, plant.__name__
                assert found.usage.cached_tokens == 0, plant.__name__
                assert faults(reason) > before, plant.__name__
            blocks.replace(signed_with_another_secret, RecordCodec(kv_format, SECRET))
            found = await asked_anew()
            assert found.token_ids != expected


class Blocks:
    """The records that a fleet has written, by digest, and the places where they lie."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        names = [name.decode() for name in redis.scan_iter(f"{prefix}*")]
        self._records = {bytes.fromhex(name.removeprefix(prefix)): redis.get(name) for name in names}
        assert len(self._records) > 1

    def replace(self, plant: Plant, own: RecordCodec) -> None:
        """Put something else in the place of every record."""
        for digest in self._records:
            self._redis.set(f"{self._prefix}{digest.hex()}", plant(own, digest, self._records))


def _other_words(record: bytes) -> bytes:
    """A payload of the same size whose numbers are others."""
    payload = bytearray(record[HEADER_BYTES:])
    payload[2::4] = bytes(byte ^ 0x55 for byte in payload[2::4])
    return bytes(payload)
