"""Quantization to one byte an element: int8 or float8_e4m3fn, with one scale for each row.

A row is one head of one token of a part. Its scale is its largest magnitude divided by that of the encoding (LARGEST),
rounded up to bfloat16 so that no element is clipped, and at least SMALLEST_FACTOR. An element `x` comes back as `y`,
before it is rounded to the consumer's element type:

    int8             |y - x| <= scale / 2                      about 1/254 of the row's largest magnitude
    float8_e4m3fn    |y - x| <= max(|x| / 16, scale / 1024)    3 bits of mantissa

Zeros stay zeros. If an element of a row is not finite, or larger than LARGEST_FINITE, the whole row comes back as NaN:
it was useless before, and the sampler must notice that.

All computations are in float32, with torch's operators, on the caller's thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.kv.format import PartData
from baton.model.dtypes import DTYPES, dtype_name

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
SMALLEST_FACTOR = 2.0**-126
LARGEST_FINITE = 2.0**127

_ENCODED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_LOW_HALF = 0xFFFF


def quantize(part: PartData, encoding: str, scale_name: str) -> tuple[PartData, PartData]:
    """The part in `encoding`, which is a key of LARGEST, and its scales: `[tokens, heads]` in bfloat16."""
    elements = _elements(part, DTYPES[part.dtype])
    factors = _factors(elements, LARGEST[encoding])
    scaled = elements.to(torch.float32) * factors.reciprocal().unsqueeze(-1)
    if encoding == "int8":
        scaled.round_()
    encoded = scaled.to(_ENCODED[encoding])
    return _part(part.name, part.shape, encoded), _part(scale_name, part.shape[:2], factors.to(torch.bfloat16))


def dequantize(part: PartData, scale: PartData, dtype: str) -> PartData:
    """Undo `quantize`; the result has elements of `dtype`."""
    kept = DTYPES[dtype]
    # Encoded elements and factors are exact in bfloat16, and their product is rounded once.
    wide = torch.bfloat16 if kept is torch.bfloat16 else torch.float32
    factors = torch.frombuffer(scale.data, dtype=torch.bfloat16).view(*scale.shape, 1)
    elements = _elements(part, _ENCODED[part.dtype]).to(wide) * factors.to(wide)
    return _part(part.name, part.shape, elements.to(kept))


def _factors(elements: Tensor, largest: float) -> Tensor:
    """Scales `[tokens, heads]` in float32 that bfloat16 represents exactly; NaN for a row that can't be encoded."""
    most = elements.abs().amax(-1).to(torch.float32)
    bits = (most / largest).clamp_(min=SMALLEST_FACTOR).view(torch.int32)
    up = ((bits + _LOW_HALF) & ~_LOW_HALF).view(torch.float32)
    return torch.where(most <= LARGEST_FINITE, up, math.nan)


def _elements(part: PartData, dtype: torch.dtype) -> Tensor:
    """The part as `[tokens, heads, elements]`, a view."""
    return torch.frombuffer(part.data, dtype=dtype).view(*part.shape[:2], -1)


def _part(name: str, shape: tuple[int, ...], elements: Tensor) -> PartData:
    return PartData(name, dtype_name(elements.dtype), shape, elements.reshape(-1).view(torch.uint8).numpy().data)
