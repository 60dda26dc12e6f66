"""Nobody learns from the prefix cache what others asked, and none without the fleet's secret puts words into it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crc32c import crc32c
from prometheus_client import REGISTRY
from redis import Redis

from baton import AsyncClient, bundled, keys
from baton.completion import Completion
from baton.kv.prefix.record import HEADER_BYTES, RecordCodec
from baton.kv.prefix.redis import key_prefix
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet, serving
from tests.redis_server import Server

TRIALS = 20
PROMPT_TOKENS = 512
SHUFFLES = 4000
ALPHA = 0.001
CHECKSUM = slice(80, 84)
"""Of the payload, in a record."""
SETTINGS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


async def test_an_attacker_can_not_tell_from_timing_what_others_have_cached(valkey: Server, tmp_path: Path) -> None:
    """The victim's prompt, asked by another tenant or with another salt, takes as long as one that nobody ever asked;
    the victim itself is served from the cache. A permutation test over interleaved samples decides."""
    file, chosen = tmp_path / "keys.json", random.Random(1)
    secrets = {tenant: keys.add(file, tenant=tenant) for tenant in ("victim", "attacker")}
    took: dict[str, list[tuple[float, float]]] = {}
    async with Fleet(bundled.path(), redis=valkey.url, fleet_secret=SECRET) as fleet:
        router = await fleet.start_router(
            [await fleet.prefill()], [await fleet.decode()], api_keys=str(file), fleet_secret=SECRET
        )
        await serving(router.address)
        async with (
            AsyncClient(router.address, api_key=secrets["victim"]) as victim,
            AsyncClient(router.address, api_key=secrets["attacker"]) as attacker,
        ):
            for trial in range(-2, TRIALS):
                asked, never_asked = some_prompt(chosen), some_prompt(chosen)
                ways: dict[str, tuple[AsyncClient, list[int], str]] = {
                    "victim again": (victim, asked, ""),
                    "another tenant": (attacker, asked, ""),
                    "another salt": (victim, asked, "a salt"),
                    "never asked": (attacker, never_asked, ""),
                }
                first = await timed(victim, asked, "")
                order = list(ways)
                chosen.shuffle(order)
                times = {"victim first": first, **{name: await timed(*ways[name]) for name in order}}
                if trial >= 0:  # until then rates are learnt
                    for name, pair in times.items():
                        took.setdefault(name, []).append(pair)
    for moment in (0, 1):  # the first token, and the end, which a hit in decode would hasten
        samples = {name: [pair[moment] for pair in pairs] for name, pairs in took.items()}
        assert chance(samples["victim again"], samples["victim first"]) <= ALPHA
        assert statistics.median(samples["victim again"]) < statistics.median(samples["victim first"])
        for name in ("another tenant", "another salt"):
            assert chance(samples[name], samples["never asked"]) > ALPHA, f"{name}: {samples}"


def some_prompt(chosen: random.Random) -> list[int]:
    """Ordinary tokens of the bundled model."""
    return [chosen.randrange(4, 4096) for _ in range(PROMPT_TOKENS)]


async def timed(client: AsyncClient, prompt: list[int], salt: str) -> tuple[float, float]:
    """Seconds to the first token and to the end."""
    began, first = time.perf_counter(), 0.0
    sampling: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    async for delta in client.generate(prompt, cache_salt=salt, **sampling):
        if delta.tokens and not first:
            first = time.perf_counter() - began
    return first, time.perf_counter() - began


def chance(one: Sequence[float], other: Sequence[float]) -> float:
    """How likely samples of one kind would differ as much by the sum of their ranks: a two-sided permutation test."""
    chosen, together = random.Random(0), sorted([*one, *other])
    ranks = [together.index(value) for value in (*one, *other)]
    middle = len(one) * sum(ranks) / len(ranks)
    seen = abs(sum(ranks[: len(one)]) - middle)
    as_far = 0
    for _ in range(SHUFFLES):
        chosen.shuffle(ranks)
        as_far += abs(sum(ranks[: len(one)]) - middle) >= seen
    return (as_far + 1) / (SHUFFLES + 1)


def test_the_statistic_tells_what_differs_from_what_does_not() -> None:
    chosen = random.Random(3)
    slow, same = ([chosen.lognormvariate(0.0, 0.3) for _ in range(TRIALS)] for _ in range(2))
    assert chance([value / 3 for value in slow], same) <= ALPHA
    assert chance(slow, same) > ALPHA


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
    """What is put in place of cached blocks is refused and counted, and the answer is that of a fleet without a cache.
    With the secret the same plant does change it, so that the secret is what keeps it out."""
    prompt = prompt_ids(128)
    async with Fleet(make_checkpoint("llama", tmp_path / "model"), dtype="float32") as fleet:
        decode = await fleet.decode(cache_memory=0)
        first = await fleet.prefill(redis=valkey.url, cache_memory=0)
        writer = await fleet.router([first], [decode])
        expected = (await writer.complete(prompt, **SETTINGS, cache="write")).token_ids
        await first.worker.finished()
        await first.cache.flush()

        async def asked_anew() -> Completion:
            # A worker without pages and rates, so that Redis is asked for certain.
            reader = await fleet.router([await fleet.prefill(redis=valkey.url, cache_memory=0)], [decode])
            return await reader.complete(prompt, **SETTINGS, cache="read")

        genuine = await asked_anew()
        assert genuine.usage is not None
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
                assert found.usage is not None
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


def faults(reason: str) -> float:
    """Prefix-cache faults with that reason so far, in this process."""
    return REGISTRY.get_sample_value("baton_prefix_faults_total", {"reason": reason}) or 0.0


def _other_words(record: bytes) -> bytes:
    """A payload of the same size whose numbers are others."""
    payload = bytearray(record[HEADER_BYTES:])
    payload[2::4] = bytes(byte ^ 0x55 for byte in payload[2::4])
    return bytes(payload)
