"""Faults of a transfer, seen from the client: caught, counted, and the answer is what it would have been."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from baton.transfer.export import Export
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import Fleet

SETTINGS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
Frames = AsyncGenerator[bytes, None]


def faults() -> float:
    """Faults of all kinds that were caught."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "baton_transfer_faults_total")


async def flip_one_bit(frames: Frames) -> Frames:
    first = True
    async for frame in frames:
        data = bytearray(frame)
        if first:
            data[-1] ^= 1
        first = False
        yield bytes(data)


async def lose_one_frame(frames: Frames) -> Frames:
    index = 0
    async for frame in frames:
        if index != 1:
            yield frame
        index += 1


@pytest.mark.parametrize(("tamper", "streams"), [(flip_one_bit, 1), (flip_one_bit, 2), (lose_one_frame, 1)])
async def test_a_damaged_transfer_never_changes_the_answer(
    tamper: Callable[[Frames], Frames], streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(90)
    honest = Export.frames
    damaged = 0

    async def frames(self: Export, *box: Any) -> Frames:
        nonlocal damaged
        damaged += 1
        stream = honest(self, *box)
        async for frame in tamper(stream) if damaged <= streams else stream:
            yield frame

    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        client = await fleet.router([await fleet.prefill()], [await fleet.decode()])
        expected = await client.complete(prompt, **SETTINGS)
        before = faults()
        monkeypatch.setattr(Export, "frames", frames)
        found = await client.complete(prompt, **SETTINGS)
        after = faults()
    assert damaged >= streams
    assert found.token_ids == expected.token_ids
    assert after > before


async def refusal(app: Any) -> str:
    """Reason for the router's incomplete fleet, once it has refused a worker."""
    told = asyncio.Event()
    app.pool.subscribe(told.set)
    while "is refused" not in app.pool.describe_missing():
        await told.wait()
        told.clear()
    return str(app.pool.describe_missing())


async def test_kv_of_another_dtype_needs_to_be_asked_for(tmp_path: Path) -> None:
    prompt = prompt_ids(40)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        prefill = await fleet.prefill(kv_dtype="bfloat16")
        reason = await refusal(await fleet.start_router([prefill], [await fleet.decode()]))
        assert "k bfloat16" in reason
        assert "k float32" in reason
        same = await fleet.router([prefill], [await fleet.decode(kv_dtype="bfloat16")])
        converting = await fleet.router([prefill], [await fleet.decode(convert_kv=True)])
        short = {**SETTINGS, "max_tokens": 2}
        expected = await same.complete(prompt, **short)
        found = await converting.complete(prompt, **short)
    assert found.token_ids == expected.token_ids
