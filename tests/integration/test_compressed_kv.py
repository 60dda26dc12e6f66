"""Compressed KV over real sockets and in a real fleet: fewer bytes, answers all the same, and nothing of it cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.config.decode import DecodeConfig
from baton.engine.contract import KvHandle
from baton.engine.fake import decode
from baton.errors import BatonError, ConfigError, EncodingRefused
from baton.kv.format import KvCompression, KvFormat
from baton.pb import kv_pb2, kv_pb2_grpc
from baton.telemetry.metrics import REUSED_TOKENS, TRANSFER_BYTES, UNSHARED_TOKENS
from baton.transfer import servicer, source
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet
from tests.integration.transfer_pair import TOKENS, flip, running
from tests.metrics import count
from tests.redis_server import running as redis
from tests.unit.transfer.support import INCARNATION, LAYERS, Engine, contents, faults, handoff, prefilled, ready, whole

INT8, FP8 = KvCompression.INT8, KvCompression.FP8
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
LARGEST_DIGIT = 250


def numbers(engine: Engine, handle: KvHandle) -> list[float]:
    """All elements of a float32 engine's KV."""
    parts = [part for layer in contents(engine, handle, whole(TOKENS)) for part in layer]
    return [element for part in parts for element in decode(part, "float32")]


def share(kv_format: KvFormat) -> float:
    """Bytes of compressed KV over those of exact KV."""
    rows = len(kv_format.parts) * kv_format.heads * kv_format.layers
    width = kv_format.parts[0].shape[1]
    return rows * (width + 2) / kv_format.token_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compression", [INT8, FP8])
async def test_compressed_kv_arrives_about_as_it_was_even_if_a_frame_was_bad(
    compression: KvCompression, dtype: str
) -> None:
    async with running(dtype=dtype) as pair:
        pair.servicer.mangle = lambda stream, number, frame: [flip(frame)] if (stream, number) == (0, 1) else [frame]
        ready(pair.exports, pair.exporter, "t", TOKENS)
        received, sent = (TRANSFER_BYTES.labels(way) for way in ("received", "sent"))
        before = count(received), count(sent)
        assert await pair.fetch(compression=compression) == handoff(TOKENS)
        found = numbers(pair.engine, pair.handle)
        engine = Engine()
        exact = numbers(engine, prefilled(engine, TOKENS))
        largest = max(abs(a - b) for a, b in zip(exact, found, strict=True))
        assert 0 < largest <= LARGEST_DIGIT / (127 if compression is INT8 else 16)
        size = TOKENS * pair.exporter.spec.kv_format.token_bytes * share(pair.exporter.spec.kv_format)
        assert count(received) - before[0] == size
        assert len(pair.servicer.requests) == 2
        # The bad frame, of 8 tokens of a layer, was sent twice.
        assert count(sent) - before[1] == size + size * 8 / TOKENS / LAYERS


async def test_an_exporter_that_does_not_know_the_compression_refuses_it_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = {key: value for key, value in source.COMPRESSIONS.items() if key is not FP8}
    monkeypatch.setattr(servicer, "COMPRESSIONS", older)
    async with running() as pair:
        _, ends = ready(pair.exports, pair.exporter, "t", TOKENS)
        before = faults("encoding_refused")
        with pytest.raises(EncodingRefused, match="compression: must be one of none, int8, got number 2"):
            await pair.fetch(compression=FP8)
        assert (ends, faults("encoding_refused")) == (["t"], before + 1)


async def test_a_prefix_is_never_compressed() -> None:
    async with running() as pair:
        export = pair.exports.open("t", prefilled(pair.exporter, TOKENS), TOKENS, on_closed=lambda: None)
        export.commit_prefix(b"name")
        request = kv_pb2.FetchKvRequest(
            transfer_id="t", incarnation=INCARNATION, compression=kv_pb2.KV_COMPRESSION_INT8
        )
        with pytest.raises(Exception, match="compression: a prefix is never compressed, got int8"):
            await kv_pb2_grpc.KvStub(pair.channel).FetchKv(request).read()
        await pair.fetch_prefix(range(TOKENS))
        pair.assert_equal()


def test_an_unknown_compression_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="kv_compression: 'int4' is not one of 'none', 'int8', 'fp8'"):
        DecodeConfig(kv_compression="int4")


@pytest.mark.parametrize(("dtype", "compression"), [("bfloat16", "fp8"), ("float32", "none")])
async def test_a_fleet_answers_from_compressed_kv_and_caches_none_of_it(
    dtype: str, compression: str, tmp_path: Path
) -> None:
    exact = compression == "none"
    with redis("valkey", tmp_path) as server:
        async with Fleet(make_checkpoint("llama", tmp_path), dtype=dtype, fleet_secret=SECRET) as fleet:
            prefill = await fleet.prefill()
            worker = await fleet.decode(redis=server.url, kv_compression=compression)
            client = await fleet.router([prefill], [worker])
            kv_format, received = worker.engine.spec.kv_format, TRANSFER_BYTES.labels("received")
            ids, reused, unshared = prompt_ids(100), count(REUSED_TOKENS), count(UNSHARED_TOKENS)
            contexts = []
            for _ in range(2):
                before = count(received)
                completion = await client.complete(ids, **GREEDY)
                assert len(completion.token_ids) == 40
                moved = (count(received) - before) / kv_format.token_bytes
                if not exact:
                    assert moved == pytest.approx(len(ids) * share(kv_format))
                contexts.append(len(ids))
                ids = [*ids, *completion.token_ids, 7]
            await worker.service.drain(5)
            written, cached = server.client().dbsize(), worker.engine.stats().cached
        assert share(kv_format) < (0.32 if dtype == "float32" else 0.6)
        assert (written > 0, cached > 0, count(REUSED_TOKENS) > reused) == (exact, exact, exact)
        assert count(UNSHARED_TOKENS) - unshared == (0 if exact else sum(contexts))


async def test_what_a_converting_worker_decodes_is_left_to_nobody(tmp_path: Path) -> None:
    """Its blocks would have the names of KV that was computed from a context in its own element type."""
    with redis("valkey", tmp_path) as server:
        async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32", fleet_secret=SECRET) as fleet:
            prefill = await fleet.prefill(kv_dtype="bfloat16")
            worker = await fleet.decode(redis=server.url, convert_kv=True)
            client, unshared = await fleet.router([prefill], [worker]), count(UNSHARED_TOKENS)
            await client.complete(prompt_ids(100), **GREEDY)
            await worker.service.drain(5)
            await worker.cache.flush()
            assert (server.client().dbsize(), worker.engine.stats().cached) == (0, 0)
            assert count(UNSHARED_TOKENS) - unshared == 100


async def test_a_fleet_whose_prefill_cannot_compress_fails_the_request_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_compression", lambda request, export: KvCompression.NONE)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        client = await fleet.router([await fleet.prefill()], [await fleet.decode(kv_compression="int8")])
        with pytest.raises(BatonError, match="asked for with compression int8"):
            await client.complete(prompt_ids(40), timeout=60, **GREEDY)
