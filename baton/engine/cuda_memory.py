"""KV pages on a CUDA device: in and out beside the engine's kernels, on streams of their own.

    a chunk's layer ── `produced` ── event ──▶ reads of that layer
    write ── host waits ──▶ insert, and the steps after it

The host counts a chunk and a step as over only when the device is done with them, and their pages are pinned until
then, so a copy never meets a kernel of an earlier owner of its pages. Frames go through pinned memory, which torch's
caching allocator keeps for reuse: the result of `read` lies in it until the last reference is gone. Calls return when
their copy is complete; callers are threads of the transfer, and waiting takes no processor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from baton.kv.format import PartData
from baton.model.attention import KvCache
from baton.model.dtypes import DTYPES, dtype_name
from baton.model.upload import upload

LAYERS_AHEAD = 2
"""Layers of a chunk that may be queued behind the one that the device computes: enough to keep it busy, and few enough
that a chunk that is called off ends soon."""


class CudaMemory:
    """KvMemory on a CUDA device; `produced` and `drain` are for the engine thread."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._device = next(iter(kv.parts.values())).device
        self._in, self._out = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._produced: dict[int, torch.cuda.Event] = {}

    def produced(self, layer: int) -> None:
        """The kernels that write a chunk's KV of `layer` are queued; waits until the device is not far behind."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._produced[layer] = event
        if (earlier := self._produced.get(layer - LAYERS_AHEAD)) is not None:
            earlier.synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event at the end of what the engine's stream has now."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def drain(self) -> None:
        """Wait until the engine's stream is empty."""
        self.mark().synchronize()

    def copying(self) -> AbstractContextManager[None]:
        """For copies that the caller queues, of nothing that a chunk computes now: on a stream of their own."""
        return self._copying(self._in)

    @contextmanager
    def copying_computed(self, layers: range) -> Iterator[None]:
        """For copies that the caller queues: on a stream of their own, after what a chunk has computed of `layers`."""
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
                # By bytes, since what is received begins at any address.
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
        """Queue copies on `stream`, and wait for them, also when one of several fails: the caller's pin ends then."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            try:
                yield
            finally:
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                event.synchronize()

    def _slots(self, pages: Sequence[int], tokens: range) -> Tensor:
        """page * page_size + offset of each token, int64 on the device."""
        size = self._kv.page_size
        first, last = tokens.start // size, -(-tokens.stop // size)
        starts = upload(pages[first:last], torch.int64, self._device) * size
        slots = (starts[:, None] + torch.arange(size, device=self._device)).flatten()
        return slots[tokens.start - first * size : tokens.stop - first * size]
