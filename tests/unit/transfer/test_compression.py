"""KV in a byte an element: what comes back is as close as the module says, whatever the rows hold."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.errors import CorruptFrame, EncodingRefused
from baton.kv.format import KvCompression, KvFormat, KvPart, PartData
from baton.model.dtypes import DTYPES, dtype_name
from baton.transfer.compression import compress, expand
from baton.transfer.quantized import LARGEST_FINITE, SMALLEST_FACTOR

NONE, INT8, FP8 = KvCompression
ENCODINGS = (INT8, FP8)
LAST_BITS = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def part_of(rows: Tensor, name: str = "k") -> PartData:
    data = rows.contiguous().view(-1).view(torch.uint8).numpy().data
    return PartData(name, dtype_name(rows.dtype), tuple(rows.shape), data)


def rows_of(part: PartData) -> Tensor:
    return torch.frombuffer(part.data, dtype=DTYPES[part.dtype]).view(*part.shape).double()


def format_of(shape: Sequence[int], dtype: str, names: Sequence[str] = ("k",)) -> KvFormat:
    return KvFormat(tuple(KvPart(name, dtype, tuple(shape)) for name in names), 1, 16)


def back(rows: Tensor, compression: KvCompression, dtype: str = "") -> Tensor:
    """What a consumer of that element type, the producer's by default, gets of the rows."""
    part = part_of(rows)
    (found,) = expand(compress([part], compression), format_of(rows.shape[1:], dtype or part.dtype), compression)
    return rows_of(found)


def bound(rows: Tensor, compression: KvCompression, dtype: str) -> Tensor:
    """The largest error of each element that the module's text allows, and the rounding to `dtype`."""
    rows = rows.double()
    # Rounded up to bfloat16, a factor grows by a 128th at most.
    largest = rows.abs().amax(-1, keepdim=True) * (1 + 2.0**-7)
    if compression is INT8:
        allowed = torch.clamp(largest / 127, min=SMALLEST_FACTOR).expand_as(rows) / 2
    else:
        allowed = torch.maximum(rows.abs() / 16, torch.clamp(largest / 448, min=SMALLEST_FACTOR) / 1024)
    return allowed + (rows.abs() + allowed) * LAST_BITS[dtype]


@pytest.mark.parametrize("consumer", DTYPES)
@pytest.mark.parametrize("producer", DTYPES)
@pytest.mark.parametrize("compression", ENCODINGS)
def test_elements_come_back_within_their_bound(compression: KvCompression, producer: str, consumer: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for tokens, heads, width in ((1, 1, 1), (7, 3, 5), (33, 2, 64), (3, 5, 127)):
        sizes = torch.exp(2 * torch.randn(tokens, heads, 1, generator=generator))
        rows = (torch.randn(tokens, heads, width, generator=generator) * sizes).to(DTYPES[producer])
        found = back(rows, compression, consumer)
        assert ((found - rows.double()).abs() <= bound(rows, compression, consumer)).all()


@pytest.mark.parametrize("producer", ["float32", "bfloat16"])
@pytest.mark.parametrize("compression", ENCODINGS)
def test_rows_of_any_size_keep_their_bound(compression: KvCompression, producer: str) -> None:
    sizes = torch.tensor([0.0, 2.0**-149, 2.0**-133, 2.0**-126, 1e-30, 1.0, 65504.0, 1e30, LARGEST_FINITE])
    pattern = torch.tensor([1.0, -0.75, 0.5, -0.1, 0.0, 1e-3])
    rows = (sizes[:, None, None] * pattern).to(DTYPES[producer])
    found = back(rows, compression)
    assert found.isfinite().all()
    assert (found[0] == 0).all()
    assert ((found - rows.double()).abs() <= bound(rows, compression, producer) + 2.0**-133).all()


@pytest.mark.parametrize("compression", ENCODINGS)
def test_a_constant_row_stays_constant(compression: KvCompression) -> None:
    found = back(torch.full((2, 2, 9), -0.3), compression)
    assert (found == found[0, 0, 0]).all()
    assert float(found[0, 0, 0]) == pytest.approx(-0.3, rel=0.01 if compression is INT8 else 1 / 16)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf, 1.01 * LARGEST_FINITE])
@pytest.mark.parametrize("producer", ["float32", "bfloat16"])
@pytest.mark.parametrize("compression", ENCODINGS)
def test_what_cannot_be_encoded_makes_its_row_nan_and_no_other(
    compression: KvCompression, producer: str, worst: float
) -> None:
    rows = torch.ones(4, 3, 8, dtype=DTYPES[producer])
    rows[2, 1, 5] = worst
    found = back(rows, compression)
    assert found[2, 1].isnan().all()
    found[2, 1] = 1
    assert torch.allclose(found, torch.ones_like(found), rtol=0.01)


@pytest.mark.parametrize(("producer", "share"), [("float32", 66 / 256), ("bfloat16", 66 / 128)])
def test_a_frame_holds_a_byte_an_element_and_two_a_row(producer: str, share: float) -> None:
    parts = [part_of(torch.randn(5, 2, 64).to(DTYPES[producer]), name) for name in ("k", "v")]
    sent = compress(parts, INT8)
    assert [(part.name, part.dtype, part.shape) for part in sent] == [
        ("k", "int8", (5, 2, 64)),
        ("k.scale", "bfloat16", (5, 2)),
        ("v", "int8", (5, 2, 64)),
        ("v.scale", "bfloat16", (5, 2)),
    ]
    assert sum(len(part.data) for part in sent) == share * sum(len(part.data) for part in parts)
    assert compress(parts, NONE) is parts


@pytest.mark.parametrize(("asked", "sent"), [(NONE, INT8), (NONE, FP8), (INT8, NONE), (INT8, FP8), (FP8, INT8)])
def test_another_encoding_than_was_asked_for_is_refused_by_name(asked: KvCompression, sent: KvCompression) -> None:
    parts = compress([part_of(torch.randn(2, 2, 4))], sent)
    with pytest.raises(EncodingRefused, match=f"with compression {asked}, and came as k {parts[0].dtype}"):
        expand(parts, format_of((2, 4), "float32"), asked)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    own = format_of((2, 4), "float32")
    part, scale = compress([part_of(torch.randn(3, 2, 4))], INT8)
    for wrong in ([part], [part, part, scale], [part, scale, PartData("x", "int8", (3, 2, 4), part.data)]):
        with pytest.raises(EncodingRefused):
            expand(wrong, own, INT8)
    with pytest.raises(CorruptFrame, match=r"shape \(3, 2, 4\), factors \(3, 2\), expected \(tokens, heads, \(5,\)\)"):
        expand([part, scale], format_of((2, 5), "float32"), INT8)
    with pytest.raises(CorruptFrame, match=r"factors \(2, 3\)"):
        expand([part, PartData(scale.name, scale.dtype, (2, 3), scale.data)], own, INT8)


def test_what_must_not_be_written_to_is_read_without_a_warning() -> None:
    """In a process of its own: torch warns once."""
    code = """
from baton.kv.format import PartData
from baton.transfer.quantized import quantize
quantize(PartData("k", "float32", (2, 1, 4), memoryview(bytes(32))), "int8", "scale")
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=60)
