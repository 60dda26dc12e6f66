"""KV of sequences that have pages in host memory beside a CUDA device, in and out.

HostedMemory ──▶ CudaMemory    if all pages are on the device
             ──▶ SpanMemory    otherwise: any pages, one run of them after the other
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.cuda_memory import CudaMemory
from baton.kv.format import PartData
from baton.model.attention import KvCache, SegmentSource
from baton.model.dtypes import DTYPES, dtype_name


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """KvMemory over pages in device and host memory; the caller has waited for the bytes that it reads."""

    kv: KvCache

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        for name in self.kv.parts:
            for layer in range(self.kv.num_layers):
                (new,) = self.kv.spans(name, layer, (target,), range(tokens))
                (old,) = self.kv.spans(name, layer, (source,), range(tokens))
                new.copy_(old)

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        found = []
        for name in self.kv.parts:
            rows = self._rows(name, layer, pages, tokens)[:, heads.start : heads.stop].contiguous()
            found.append(PartData(name, dtype_name(rows.dtype), tuple(rows.shape), _bytes(rows).numpy().data))
        return found

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        for part in parts:
            rows = torch.frombuffer(bytearray(part.data), dtype=DTYPES[part.dtype]).view(part.shape)
            self._store(part.name, layer, pages, token_start, rows, head_start)

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        blocks = []
        for start in range(token_start, token_start + count * block_size, block_size):
            tokens = range(start, start + block_size)
            layers = range(self.kv.num_layers)
            pieces = [_bytes(self._rows(name, layer, pages, tokens)) for layer in layers for name in self.kv.parts]
            blocks.append(torch.cat(pieces).numpy().tobytes())
        return blocks

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        for index, payload in enumerate(payloads):
            data, at = torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0
            for layer in range(self.kv.num_layers):
                for name, part in self.kv.parts.items():
                    shape = (block_size, *part.shape[3:])
                    size = part[0, 0, 0].nbytes * block_size
                    rows = data[at : at + size].view(part.dtype).view(shape)
                    self._store(name, layer, pages, token_start + index * block_size, rows)
                    at += size

    def _rows(self, name: str, layer: int, pages: Sequence[int], tokens: range) -> Tensor:
        """A copy in host memory, `[tokens, kv_heads, ...]`."""
        part = self.kv.parts[name]
        rows = torch.empty((len(tokens), *part.shape[3:]), dtype=part.dtype)
        at = 0
        for span in self.kv.spans(name, layer, pages, tokens):
            rows[at : at + len(span)] = span
            at += len(span)
        return rows

    def _store(
        self, name: str, layer: int, pages: Sequence[int], start: int, rows: Tensor, head_start: int = 0
    ) -> None:
        at = 0
        for span in self.kv.spans(name, layer, pages, range(start, start + len(rows))):
            span[:, head_start : head_start + rows.shape[1]] = rows[at : at + len(span)].to(span)
            at += len(span)


class HostedMemory:
    """KvMemory of a pool that has pages in host memory beside a CUDA device."""

    def __init__(self, device: CudaMemory, kv: KvCache, source: SegmentSource) -> None:
        """`source` stores what a chunk computes in host memory."""
        self._device = device
        self._kv = kv
        self._source = source
        self._spans = SpanMemory(kv)

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        with self._written((source, target)) as memory:
            memory.copy_page(source, target, tokens)

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        with self._computed(pages, range(layer, layer + 1)) as memory:
            return memory.read(pages, layer, tokens, heads)

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        with self._written(pages) as memory:
            memory.write(pages, layer, token_start, head_start, parts)

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        with self._computed(pages, range(self._kv.num_layers)) as memory:
            return memory.read_blocks(pages, token_start, block_size, count)

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        with self._written(pages) as memory:
            memory.write_blocks(pages, token_start, block_size, payloads)

    @contextmanager
    def _written(self, pages: Sequence[int]) -> Iterator[CudaMemory | SpanMemory]:
        """The memory of these pages, for writes: no chunk computes what is written, so none is waited for."""
        if self._is_on_device(pages):
            yield self._device
            return
        with self._device.copying():
            yield self._spans

    @contextmanager
    def _computed(self, pages: Sequence[int], layers: range) -> Iterator[CudaMemory | SpanMemory]:
        """The memory of these pages, for reads, once what a chunk has computed of these layers is there."""
        if self._is_on_device(pages):
            yield self._device
            return
        for layer in layers:
            self._source.wait_stored(layer)
        with self._device.copying_computed(layers):
            yield self._spans

    def _is_on_device(self, pages: Sequence[int]) -> bool:
        return max(pages, default=0) < self._kv.host_from


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8).flatten()
