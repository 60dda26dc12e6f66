"""Memory of KV pages: it reads and writes them as canonical bytes, and copies pages.

    TorchMemory                    pages in host memory
    CudaMemory                     pages on a CUDA device
    HostedMemory ──▶ CudaMemory    pages in both, for a sequence whose pages are all on the device
                 ──▶ SpanMemory    pages in both, for any sequence, one run of pages after the other
    ShardedMemory ─▶ TorchMemory   pages of several ranks, each with some of the layers and KV heads

Any thread may use these classes while a pass runs, because the pass writes to other pages, or to other tokens.

On a CUDA device, copies run beside the engine's kernels, on streams of their own.

    a chunk's layer ── `produced` ── event ──▶ reads of that layer
    write ── host waits ──▶ insert, and the steps after it

The pages of a pass are pinned until the device is done with it, so no kernel of an earlier owner of the pages runs
while they are copied. Frames go through pinned memory, which torch's caching allocator keeps for reuse; the result of
`read` is in pinned memory. Calls return when their copy is complete, and waiting takes no processor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kv.format import PartData
from baton.model.attention import KvCache, SegmentSource
from baton.model.tensors import DTYPES, dtype_name, upload

LAYERS_AHEAD = 2
"""Number of layers that may be queued behind the one that the device computes: enough to keep the device busy, and few
enough that an aborted chunk ends soon."""


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """KvMemory of pages in host memory."""

    kv: KvCache

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        # torch would use several threads even for so little. Called from the asyncio loop during a forward pass, that
        # took up to 20 ms.
        for view, width in self._part_views():
            old, new = (page * self.kv.page_size * width for page in (source, target))
            view[:, new : new + tokens * width] = view[:, old : old + tokens * width]

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        size = self.kv.page_size
        first, last = tokens.start // size, -(-tokens.stop // size)
        index, skipped = list(pages[first:last]), tokens.start - first * size
        found = []
        for name, part in self.kv.parts.items():
            kept = _bytes(part[layer])
            whole = len(heads) == kept.shape[2]
            taken = _pages(part[layer])[index] if whole else kept[index, :, heads.start : heads.stop]
            rows = taken.reshape(-1, len(heads), kept.shape[-1])[skipped : skipped + len(tokens)]
            shape = (len(tokens), len(heads), *part.shape[4:])
            found.append(PartData(name, dtype_name(part.dtype), shape, rows.reshape(-1).data))
        return found

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        count, heads = parts[0].shape[:2]
        size = self.kv.page_size
        first, offset = divmod(token_start, size)
        # First the rest of a page that has tokens before these, then full pages, then the beginning of the last page.
        lead = min(size - offset, count) if offset else 0
        full = (count - lead) // size
        begun = first + bool(offset)
        index, rest = list(pages[begun : begun + full]), lead + full * size
        for part in parts:
            kept = self.kv.parts[part.name][layer]
            view = _bytes(kept)[:, :, head_start : head_start + heads]
            rows = self._stored(part)
            if lead:
                view[pages[first], offset : offset + lead] = rows[:lead]
            if full and heads == kept.shape[2]:
                _pages(kept)[index] = rows[lead:rest].reshape(full, -1)
            elif full:
                view[index] = rows[lead:rest].reshape(full, size, heads, -1)
            if rest < count:
                view[pages[begun + full], : count - rest] = rows[rest:]

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        payloads, views = [], self._part_views()
        row_bytes = sum(width for _, width in views)
        block = np.empty((self.kv.num_layers, block_size * row_bytes), dtype=np.uint8)
        for start in range(token_start, token_start + count * block_size, block_size):
            for view, rows in self._runs(views, pages, range(start, start + block_size), block):
                rows[:] = view
            payloads.append(block.tobytes())
        return payloads

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        views = self._part_views()
        row_bytes = sum(width for _, width in views)
        for index, payload in enumerate(payloads):
            start = token_start + index * block_size
            block = np.frombuffer(payload, dtype=np.uint8).reshape(self.kv.num_layers, block_size * row_bytes)
            for view, rows in self._runs(views, pages, range(start, start + block_size), block):
                view[:] = rows

    def _part_views(self) -> list[tuple[NDArray[np.uint8], int]]:
        """For each part, all pages as bytes `[layers, bytes]`, and the number of bytes of one token in one layer."""
        slots = self.kv.num_pages * self.kv.page_size
        views = [_bytes(part.view(len(part), -1)) for part in self.kv.parts.values()]
        return [(view, view.shape[1] // slots) for view in views]

    def _runs(
        self,
        views: Sequence[tuple[NDArray[np.uint8], int]],
        pages: Sequence[int],
        tokens: range,
        block: NDArray[np.uint8],
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield pairs of views that are to be copied to each other: a piece of the pages, and its place in `block`
        `[layers, bytes]`.

        A piece has neighbouring tokens of one page and one part, in all layers, so that numpy copies it in one call.
        """
        size, begin = self.kv.page_size, 0
        for view, width in views:
            at = tokens.start
            while at < tokens.stop:
                page, offset = divmod(at, size)
                count = min(size - offset, tokens.stop - at)
                low, run = (pages[page] * size + offset) * width, count * width
                yield view[:, low : low + run], block[:, begin : begin + run]
                begin += run
                at += count

    def _stored(self, part: PartData) -> NDArray[np.uint8]:
        """Convert a part to the pages' element type; returns bytes `[tokens, heads, bytes]`."""
        kept, given = self.kv.parts[part.name].dtype, DTYPES[part.dtype]
        data = np.frombuffer(part.data, dtype=np.uint8)
        if given != kept:
            data = _bytes(torch.frombuffer(part.data, dtype=given).to(kept))
        return data.reshape(*part.shape[:2], -1)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A view of a tensor as bytes; the last dimension, which must be contiguous, has bytes instead of elements."""
    # Received bytes may begin at any address. numpy copies runs of bytes at the speed of memcpy; torch copies elements
    # of two bytes one by one, and takes ten times as long.
    view: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return view


def _pages(layer: Tensor) -> NDArray[np.uint8]:
    """A view of one layer of a part, `[pages, ...]`, as bytes `[pages, bytes]`: one run of bytes for each page."""
    # torch's `view` raises where numpy's `reshape` would make a copy, and writes to a copy would be lost.
    return _bytes(layer.view(len(layer), -1))


class CudaMemory:
    """KvMemory on a CUDA device; `produced` and `drain` are for the engine thread."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._device = next(iter(kv.parts.values())).device
        self._in, self._out = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._produced: dict[int, torch.cuda.Event] = {}

    def produced(self, layer: int) -> None:
        """Record that the kernels that write a chunk's KV of `layer` are queued.

        Waits until the device has computed all layers but the last LAYERS_AHEAD.
        """
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._produced[layer] = event
        if (earlier := self._produced.get(layer - LAYERS_AHEAD)) is not None:
            earlier.synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event after all work that is queued now on the engine's stream."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def drain(self) -> None:
        """Wait until all work that is queued on the engine's stream is done."""
        self.mark().synchronize()

    def copying(self) -> AbstractContextManager[None]:
        """Context in which the caller queues copies of KV that no chunk computes now, on a separate stream."""
        return self._copying(self._in)

    @contextmanager
    def copying_computed(self, layers: range) -> Iterator[None]:
        """Context for copies of KV of `layers`, on a separate stream, after the kernels that compute it."""
        with self._copying(self._out):
            for layer in layers:
                if (event := self._produced.get(layer)) is not None:
                    self._out.wait_event(event)
            yield

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        with self._copying(self._in):
            for part in self._kv.parts.values():
                part[:, target, :tokens] = part[:, source, :tokens]

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        found = []
        with self.copying_computed(range(layer, layer + 1)):
            slots = self._slots(pages, tokens)
            for name, part in self._kv.parts.items():
                rows = part[layer].flatten(0, 1)[:, heads.start : heads.stop].index_select(0, slots)
                data = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
                found.append((name, data))
        return [
            PartData(name, dtype_name(data.dtype), tuple(data.shape), data.view(torch.uint8).flatten().numpy().data)
            for name, data in found
        ]

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        count, heads = parts[0].shape[:2]
        with self._copying(self._in):
            slots = self._slots(pages, range(token_start, token_start + count))
            for part in parts:
                home = self._kv.parts[part.name][layer].flatten(0, 1)[:, head_start : head_start + heads]
                # As bytes, because received bytes may begin at any address.
                data = torch.frombuffer(part.data, dtype=torch.uint8)
                staged = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True).copy_(data)
                rows = staged.to(self._device, non_blocking=True).view(DTYPES[part.dtype]).view(part.shape)
                home.index_copy_(0, slots, rows.to(home.dtype))

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        with self.copying_computed(range(self._kv.num_layers)):
            slots = self._slots(pages, range(token_start, token_start + count * block_size))
            rows = [part.flatten(1, 2).index_select(1, slots).view(torch.uint8) for part in self._kv.parts.values()]
            blocks = torch.cat([part.view(len(part), count, -1) for part in rows], dim=2).transpose(0, 1).contiguous()
            staged = torch.empty(blocks.shape, dtype=torch.uint8, pin_memory=True).copy_(blocks, non_blocking=True)
        return [block.numpy().tobytes() for block in staged]

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        count, parts = len(payloads), self._kv.parts.values()
        with self._copying(self._in):
            slots = self._slots(pages, range(token_start, token_start + count * block_size))
            staged = torch.empty((count, len(memoryview(payloads[0]))), dtype=torch.uint8, pin_memory=True)
            for row, payload in zip(staged, payloads, strict=True):
                row.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            blocks = staged.to(self._device, non_blocking=True).view(count, self._kv.num_layers, -1)
            widths = [block_size * part[0, 0, 0].nbytes for part in parts]
            for part, data in zip(parts, blocks.split(widths, dim=2), strict=True):
                values = data.view(part.dtype).unflatten(2, (block_size, *part.shape[3:]))
                part.flatten(1, 2).index_copy_(1, slots, values.transpose(0, 1).flatten(1, 2))

    @contextmanager
    def _copying(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Queue copies on `stream`, and wait for them, also if one fails, because the pages may be unpinned then."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            try:
                yield
            finally:
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                event.synchronize()

    def _slots(self, pages: Sequence[int], tokens: range) -> Tensor:
        """The slot of each token, which is page * page_size + offset: int64 `[tokens]` on the device."""
        size = self._kv.page_size
        first, last = tokens.start // size, -(-tokens.stop // size)
        starts = upload(pages[first:last], torch.int64, self._device) * size
        slots = (starts[:, None] + torch.arange(size, device=self._device)).flatten()
        return slots[tokens.start - first * size : tokens.stop - first * size]


@dataclass(frozen=True, slots=True)
class SpanMemory:
    """KvMemory of pages in device and host memory. The caller must wait until the KV that it reads is computed."""

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
            found.append(
                PartData(name, dtype_name(rows.dtype), tuple(rows.shape), rows.view(torch.uint8).flatten().numpy().data)
            )
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
            pieces = [self._rows(name, layer, pages, tokens) for layer in layers for name in self.kv.parts]
            blocks.append(torch.cat([rows.view(torch.uint8).flatten() for rows in pieces]).numpy().tobytes())
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
        """Copy the KV of tokens to host memory: `[tokens, kv_heads, ...]`."""
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
    """KvMemory of a pool that has pages on a CUDA device and in host memory."""

    def __init__(self, device: CudaMemory, kv: KvCache, source: SegmentSource) -> None:
        """`source` stores the KV of chunks in pages in host memory."""
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
        """Yield the memory of these pages for writes, which need not wait for chunks: they compute other KV."""
        if self._is_on_device(pages):
            yield self._device
            return
        with self._device.copying():
            yield self._spans

    @contextmanager
    def _computed(self, pages: Sequence[int], layers: range) -> Iterator[CudaMemory | SpanMemory]:
        """Yield the memory of these pages for reads, when the KV that chunks have computed in these layers is there."""
        if self._is_on_device(pages):
            yield self._device
            return
        for layer in layers:
            self._source.wait_stored(layer)
        with self._device.copying_computed(layers):
            yield self._spans

    def _is_on_device(self, pages: Sequence[int]) -> bool:
        return max(pages, default=0) < self._kv.host_from


@dataclass(frozen=True, slots=True)
class KvShard:
    """Pages in host memory that have some layers, and in them some KV heads."""

    memory: TorchMemory
    layers: range
    heads: range


class ShardedMemory:
    """KvMemory over the shards of a worker's ranks: it joins and splits KV heads and layers.

    If several shards have a head of a layer, writes go to all of them, and reads come from the first.
    """

    def __init__(self, shards: Sequence[KvShard]) -> None:
        """`shards` have all layers, and in each all heads, in ascending order."""
        self._shards = shards
        places = [(shard.layers, shard.heads) for shard in shards]
        self._first = [shard for index, shard in enumerate(shards) if places.index(places[index]) == index]
        """The first shard of each pair of layers and heads; others with the same pair have copies."""
        self._layers = max(shard.layers.stop for shard in shards)
        self._heads = max(shard.heads.stop for shard in shards)
        parts = shards[0].memory.kv.parts.values()
        self._head_bytes = [part[0, 0, 0, 0].nbytes for part in parts]
        """Bytes of one head of a token in each part."""

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        for shard in self._shards:
            shard.memory.copy_page(source, target, tokens)

    def read(self, pages: Sequence[int], layer: int, tokens: range, heads: range) -> list[PartData]:
        pieces = [
            shard.memory.read(pages, layer - shard.layers.start, tokens, some)
            for shard, some, _ in _overlaps(self._first, layer, heads)
        ]
        return [_join_heads(parts) for parts in zip(*pieces, strict=True)]

    def write(
        self, pages: Sequence[int], layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        given = range(head_start, head_start + parts[0].shape[1])
        for shard, some, of_given in _overlaps(self._shards, layer, given):
            own = [_some_heads(part, of_given) for part in parts]
            shard.memory.write(pages, layer - shard.layers.start, token_start, some.start, own)

    def read_blocks(self, pages: Sequence[int], token_start: int, block_size: int, count: int) -> list[bytes]:
        found = [shard.memory.read_blocks(pages, token_start, block_size, count) for shard in self._first]
        return [self._join_blocks(payloads, block_size) for payloads in zip(*found, strict=True)]

    def write_blocks(
        self, pages: Sequence[int], token_start: int, block_size: int, payloads: Sequence[bytes | memoryview]
    ) -> None:
        views = [_block_parts(payload, self._layers, self._heads, block_size, self._head_bytes) for payload in payloads]
        for shard in self._shards:
            first, last, low, high = shard.layers.start, shard.layers.stop, shard.heads.start, shard.heads.stop
            own = [_block([part[first:last, :, low:high] for part in parts]) for parts in views]
            shard.memory.write_blocks(pages, token_start, block_size, own)

    def _join_blocks(self, payloads: Sequence[bytes], block_size: int) -> bytes:
        """Join the payloads of one block, one of each first shard."""
        block = np.empty((self._layers, block_size * self._heads * sum(self._head_bytes)), np.uint8)
        parts = _block_parts(block.data, self._layers, self._heads, block_size, self._head_bytes)
        for payload, shard in zip(payloads, self._first, strict=True):
            layers, heads = shard.layers, shard.heads
            own = _block_parts(payload, len(layers), len(heads), block_size, self._head_bytes)
            for part, rows in zip(parts, own, strict=True):
                part[layers.start : layers.stop, :, heads.start : heads.stop] = rows
        return block.tobytes()


def _block_parts(
    payload: bytes | memoryview, layers: int, heads: int, block_size: int, head_bytes: Sequence[int]
) -> list[NDArray[np.uint8]]:
    """Views of the parts of a block's payload, `[layers, block_size, heads, bytes]`."""
    rows, at, parts = np.frombuffer(payload, np.uint8).reshape(layers, -1), 0, []
    for width in head_bytes:
        end = at + block_size * heads * width
        parts.append(rows[:, at:end].reshape(layers, block_size, heads, width))
        at = end
    return parts


def _block(parts: Sequence[NDArray[np.uint8]]) -> memoryview:
    """The payload of a block with these parts, `[layers, block_size, heads, bytes]`."""
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).reshape(-1).data


def _overlaps(shards: Sequence[KvShard], layer: int, heads: range) -> Iterator[tuple[KvShard, range, range]]:
    """Each shard that has some of these heads of a layer, with their places in it, and their places in `heads`."""
    for shard in shards:
        low, high = max(shard.heads.start, heads.start), min(shard.heads.stop, heads.stop)
        if low < high and layer in shard.layers:
            own, given = shard.heads.start, heads.start
            yield shard, range(low - own, high - own), range(low - given, high - given)


def _join_heads(parts: Sequence[PartData]) -> PartData:
    first = parts[0]
    if len(parts) == 1:
        return first
    views = [np.frombuffer(part.data, np.uint8).reshape(*part.shape[:2], -1) for part in parts]
    joined = np.concatenate(views, axis=1)
    shape = (joined.shape[0], joined.shape[1], *first.shape[2:])
    return PartData(first.name, first.dtype, shape, joined.reshape(-1).data)


def _some_heads(part: PartData, heads: range) -> PartData:
    if len(heads) == part.shape[1]:
        return part
    rows = np.frombuffer(part.data, np.uint8).reshape(*part.shape[:2], -1)[:, heads.start : heads.stop]
    shape = (part.shape[0], len(heads), *part.shape[2:])
    return PartData(part.name, part.dtype, shape, np.ascontiguousarray(rows).reshape(-1).data)
