"""Payloads of prefix blocks: layer after layer, part after part, each `[block_size, heads, ...]`.

This is the canonical layout of the KV format, so a payload says nothing of page size or device.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.format import KvFormat, PartData
from baton.kv.prefix.contract import Payload


def payload_bytes(kv_format: KvFormat) -> int:
    """Bytes of one block's payload."""
    return kv_format.token_bytes * kv_format.block_size


def layer_parts(kv_format: KvFormat, payloads: Sequence[Payload], layer: int) -> list[PartData]:
    """One layer's parts over all blocks, copied once: `[len(payloads) * block_size, heads, ...]`."""
    tokens = len(payloads) * kv_format.block_size
    offset = layer * payload_bytes(kv_format) // kv_format.layers
    views, parts = [memoryview(payload) for payload in payloads], []
    for part in kv_format.parts:
        end = offset + part.token_bytes * kv_format.block_size
        data = b"".join([view[offset:end] for view in views])
        parts.append(PartData(part.name, part.dtype, (tokens, *part.shape), data))
        offset = end
    return parts


def block_payloads(kv_format: KvFormat, layers: Sequence[Sequence[PartData]]) -> list[bytes]:
    """Payloads of consecutive blocks, from each layer's parts over all of their tokens."""
    blocks = layers[0][0].shape[0] // kv_format.block_size
    pieces: list[list[memoryview]] = [[] for _ in range(blocks)]
    for parts in layers:
        for part in parts:
            data = memoryview(part.data)
            stride = len(data) // blocks
            for block, piece in enumerate(pieces):
                piece.append(data[block * stride : (block + 1) * stride])
    return [b"".join(piece) for piece in pieces]
