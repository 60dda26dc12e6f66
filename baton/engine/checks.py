"""Check that data from outside fits the KV format, before it touches memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.errors import CorruptFrame, InvalidRequest
from baton.kv.format import DTYPE_BYTES, KvFormat, PartData


def check_parts(kv_format: KvFormat, layer: int, head_start: int, parts: Sequence[PartData]) -> int:
    """The number of tokens in `parts`, each part of `kv_format` once, in any supported dtype.

    Raises CorruptFrame naming what does not fit.
    """
    if not 0 <= layer < kv_format.layers:
        raise CorruptFrame(f"layer {layer}, expected one of {kv_format.layers}")
    if sorted(part.name for part in parts) != sorted(part.name for part in kv_format.parts):
        raise CorruptFrame(f"parts {[part.name for part in parts]}, expected {[p.name for p in kv_format.parts]}")
    expected = {part.name: part for part in kv_format.parts}
    leading = parts[0].shape[:2]
    for part in parts:
        rest = expected[part.name].shape[1:]
        if len(part.shape) != 2 + len(rest) or part.shape[:2] != leading or part.shape[2:] != rest:
            raise CorruptFrame(f"part {part.name}: shape {part.shape}, expected (tokens, heads, {rest})")
        if part.dtype not in DTYPE_BYTES:
            raise CorruptFrame(f"part {part.name}: dtype {part.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        size = math.prod(part.shape) * DTYPE_BYTES[part.dtype]
        if memoryview(part.data).nbytes != size:
            raise CorruptFrame(f"part {part.name}: {memoryview(part.data).nbytes} bytes, expected {size}")
    tokens, heads = leading
    if tokens < 1 or heads < 1 or head_start < 0 or head_start + heads > kv_format.heads:
        raise CorruptFrame(f"{tokens} tokens of heads [{head_start}, {head_start + heads}), expected {kv_format.heads}")
    return tokens


def check_blocks(kv_format: KvFormat, payloads: Sequence[bytes | memoryview]) -> int:
    """The number of tokens in `payloads`, each a whole prefix block; raises CorruptFrame naming what does not fit."""
    if not payloads:
        raise CorruptFrame("no blocks, expected one or more")
    for index, payload in enumerate(payloads):
        if memoryview(payload).nbytes != kv_format.block_bytes:
            raise CorruptFrame(f"block {index}: {memoryview(payload).nbytes} bytes, expected {kv_format.block_bytes}")
    return len(payloads) * kv_format.block_size


def check_range(name: str, value: range, limit: int) -> None:
    """Raise InvalidRequest unless `value` is a range of consecutive numbers within `[0, limit)`."""
    if value.step != 1 or not 0 <= value.start < value.stop <= limit:
        raise InvalidRequest(name, f"must be a range within [0, {limit})", value)
