"""Payloads: per-layer parts over many blocks, to blocks over all layers, and back."""

import os

import pytest

from baton.kv.format import KvFormat, KvPart, PartData
from baton.kv.prefix.block import block_payloads, layer_parts, payload_bytes

FORMAT = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("s", "bfloat16", (2,))), layers=3, block_size=4)


def random_layers(blocks: int) -> list[list[PartData]]:
    tokens = blocks * FORMAT.block_size
    return [
        [PartData(p.name, p.dtype, (tokens, *p.shape), os.urandom(tokens * p.token_bytes)) for p in FORMAT.parts]
        for _ in range(FORMAT.layers)
    ]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_there_and_back(blocks: int) -> None:
    layers = random_layers(blocks)
    payloads = block_payloads(FORMAT, layers)
    assert [len(payload) for payload in payloads] == [payload_bytes(FORMAT)] * blocks
    assert [layer_parts(FORMAT, payloads, layer) for layer in range(3)] == layers


def test_blocks_stand_alone() -> None:
    layers = random_layers(3)
    payloads = block_payloads(FORMAT, layers)
    for layer in range(3):
        for part, alone in zip(layers[layer], layer_parts(FORMAT, payloads[1:2], layer), strict=True):
            stride = len(part.data) // 3
            assert alone.data == part.data[stride : 2 * stride]
            assert alone.shape == (4, *part.shape[1:])


def test_payload_is_layer_after_layer_part_after_part() -> None:
    layers = random_layers(1)
    assert block_payloads(FORMAT, layers) == [b"".join(bytes(p.data) for parts in layers for p in parts)]
