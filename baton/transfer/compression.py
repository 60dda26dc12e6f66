"""Compressed KV on the wire, if the consumer asks for it: the parts of a frame.

    k   [tokens, heads, ...] float32, bfloat16 or float16
      ──▶ k        [tokens, heads, ...]  int8 or float8_e4m3fn
          k.scale  [tokens, heads]       bfloat16

Expanded KV is close to the KV that was sent, but not equal to it (`baton.transfer.quantized`). It serves the sequence
that it was sent for, and must never be cached under the digest of the exact KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import CorruptFrame, EncodingRefused
from baton.kv.format import DTYPE_BYTES, KvCompression, KvFormat, PartData

SCALE = ".scale"
"""Suffix of the name of a part that holds the scales of another part."""

SCALE_DTYPE = "bfloat16"
DTYPES = {KvCompression.INT8: "int8", KvCompression.FP8: "float8_e4m3fn"}


def compress(parts: Sequence[PartData], compression: KvCompression) -> Sequence[PartData]:
    """The parts of a frame, each encoded and followed by its scales; unchanged for NONE."""
    if compression is KvCompression.NONE:
        return parts
    # Imports torch, which a worker with the fake engine does not need.
    from baton.transfer.quantized import quantize

    return [each for part in parts for each in quantize(part, DTYPES[compression], part.name + SCALE)]


def expand(parts: Sequence[PartData], kv_format: KvFormat, compression: KvCompression) -> Sequence[PartData]:
    """Undo `compress`, in the element types of `kv_format`; parts that are not compressed stay as they are.

    Raises EncodingRefused for parts in an encoding other than `compression`, CorruptFrame for a wrong shape.
    """
    sent = {part.name: part for part in parts}
    if compression is KvCompression.NONE:
        fits = all(part.dtype in DTYPE_BYTES for part in parts)
    else:
        fits = len(sent) == len(parts) and _dtypes(parts) == _wanted(kv_format, compression)
    if not fits:
        came = ", ".join(f"{part.name} {part.dtype}" for part in parts)
        raise EncodingRefused(f"KV was asked for with compression {compression}, and came as {came}")
    if compression is KvCompression.NONE:
        return parts
    from baton.transfer.quantized import dequantize

    found = []
    for own in kv_format.parts:
        part, scale = sent[own.name], sent[own.name + SCALE]
        if part.shape[2:] != own.shape[1:] or scale.shape != part.shape[:2]:
            raise CorruptFrame(
                f"part {own.name}: shape {part.shape}, factors {scale.shape}, expected (tokens, heads, {own.shape[1:]})"
            )
        found.append(dequantize(part, scale, own.dtype))
    return found


def _dtypes(parts: Sequence[PartData]) -> dict[str, str]:
    return {part.name: part.dtype for part in parts}


def _wanted(kv_format: KvFormat, compression: KvCompression) -> dict[str, str]:
    """The element type of each part of a frame, by its name."""
    names = [part.name for part in kv_format.parts]
    return dict.fromkeys(names, DTYPES[compression]) | {name + SCALE: SCALE_DTYPE for name in names}
