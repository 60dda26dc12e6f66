"""KV of sequences that have pages in host memory: stored there, and brought to the compute device in segments.

    store(…)            new tokens' K and V go to their pages
    prefetch(segment)   its copy begins, if a buffer is free
    open(segment)       its K and V, `[tokens, kv_heads, head_dim]` each; later kernels wait for the copy
    close(segment)      later copies into its buffer wait for the kernels queued so far
    end()               the forward pass is over

`SegmentRing` copies past KV into a few device buffers of a fixed size in turn, so the device holds that much however
long the context is. On a CPU host memory is the device's own: `SegmentViews` gives views where the pages of a segment
follow each other, and one new tensor where they don't.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from baton.kv.format import KEYS, VALUES
from baton.model.attention.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Segment:
    """The positions `tokens` of the sequence in `row`, in one layer; `pages` are all of the sequence's."""

    layer: int
    row: int
    tokens: range
    pages: Sequence[int] = field(compare=False, repr=False)


def split(layer: int, row: int, pages: Sequence[int], tokens: range, size: int) -> list[Segment]:
    """Segments of at most `size` positions that cover `tokens`; borders between them are multiples of `size`."""
    borders = range(tokens.start // size * size, tokens.stop, size)
    pieces = (range(max(first, tokens.start), min(first + size, tokens.stop)) for first in borders)
    return [Segment(layer, row, piece, pages) for piece in pieces]


class SegmentSource(Protocol):
    """Brings segments of KV from host memory to the compute device. Only one forward pass may use it at a time."""

    size: int
    """Tokens of a segment."""

    def store(self, layer: int, pages: Sequence[int], tokens: range, k: Tensor, v: Tensor) -> None:
        """Write `k` and `v`, `[tokens, kv_heads, head_dim]` each, into the sequence's pages."""
        ...

    def wait_stored(self, layer: int) -> None:
        """Wait until what was stored of that layer is in its pages; from any thread."""
        ...

    def prefetch(self, segment: Segment) -> None:
        """Begin to copy it, unless all buffers are in use."""
        ...

    def open(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Its keys and values; the caller ends with `close`."""
        ...

    def close(self, segment: Segment) -> None:
        """All kernels that read it are queued."""
        ...

    def end(self) -> None:
        """A forward pass is over: what was fetched ahead is forgotten, and later kernels wait for all copies."""
        ...


class SegmentViews:
    """A SegmentSource on a CPU."""

    def __init__(self, kv: KvCache, size: int) -> None:
        self.size = size
        self._kv = kv

    def store(self, layer: int, pages: Sequence[int], tokens: range, k: Tensor, v: Tensor) -> None:
        _store(self._kv, layer, pages, tokens, k, v)

    def wait_stored(self, layer: int) -> None: ...

    def prefetch(self, segment: Segment) -> None: ...

    def open(self, segment: Segment) -> tuple[Tensor, Tensor]:
        return self._view(KEYS, segment), self._view(VALUES, segment)

    def close(self, segment: Segment) -> None: ...

    def end(self) -> None: ...

    def _view(self, part: str, segment: Segment) -> Tensor:
        spans = list(self._kv.spans(part, segment.layer, segment.pages, segment.tokens))
        return spans[0] if len(spans) == 1 else torch.cat(spans)


@dataclass(eq=False, slots=True)
class _Buffer:
    """Room for a segment on the device. Events: its copy is there; kernels have read it."""

    parts: tuple[Tensor, Tensor]
    ready: torch.cuda.Event
    read: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The last copy of a layer's new K and V, which must stay as they are until it is done."""

    done: torch.cuda.Event
    source: tuple[Tensor, Tensor]


class SegmentRing:
    """A SegmentSource on a CUDA device; copies in and out run on streams of their own, beside the kernels."""

    def __init__(self, kv: KvCache, device: torch.device, buffers: int, size: int) -> None:
        self.size = size
        self._kv = kv
        self._device = device
        shape = (size, kv.kv_heads, kv.head_dim)
        self._idle = [
            _Buffer(
                (
                    torch.empty(shape, dtype=kv.dtype, device=device),
                    torch.empty(shape, dtype=kv.dtype, device=device),
                ),
                torch.cuda.Event(),
            )
            for _ in range(buffers)
        ]
        self._loaded: OrderedDict[Segment, _Buffer] = OrderedDict()
        self._open: set[Segment] = set()
        self._stored: dict[int, torch.cuda.Event] = {}
        self._last: _Stored | None = None
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def store(self, layer: int, pages: Sequence[int], tokens: range, k: Tensor, v: Tensor) -> None:
        main = torch.cuda.current_stream(self._device)
        if self._last is not None:
            # Its memory goes to other tensors of this stream.
            main.wait_event(self._last.done)
        self._out.wait_stream(main)
        with torch.cuda.stream(self._out):
            _store(self._kv, layer, pages, tokens, k, v)
            event = torch.cuda.Event(blocking=True)
            event.record(self._out)
        self._stored[layer] = event
        self._last = _Stored(event, (k, v))

    def wait_stored(self, layer: int) -> None:
        if (event := self._stored.get(layer)) is not None:
            event.synchronize()

    def prefetch(self, segment: Segment) -> None:
        if segment not in self._loaded and self._idle:
            self._load(segment)

    def open(self, segment: Segment) -> tuple[Tensor, Tensor]:
        if segment not in self._loaded:
            if not self._idle:
                # The segment that was fetched ahead was not the next one.
                stale = next(each for each in self._loaded if each not in self._open)
                self._idle.append(self._loaded.pop(stale))
            self._load(segment)
        self._open.add(segment)
        buffer, count = self._loaded[segment], len(segment.tokens)
        torch.cuda.current_stream(self._device).wait_event(buffer.ready)
        return buffer.parts[0][:count], buffer.parts[1][:count]

    def close(self, segment: Segment) -> None:
        self._open.discard(segment)
        buffer = self._loaded.pop(segment)
        buffer.read = torch.cuda.Event()
        buffer.read.record(torch.cuda.current_stream(self._device))
        self._idle.append(buffer)

    def end(self) -> None:
        main = torch.cuda.current_stream(self._device)
        main.wait_stream(self._in)
        main.wait_stream(self._out)
        self._idle += self._loaded.values()
        self._loaded.clear()
        self._open.clear()
        self._last = None

    def _load(self, segment: Segment) -> None:
        self._loaded[segment] = buffer = self._idle.pop(0)
        for event in (buffer.read, self._stored.get(segment.layer)):
            if event is not None:
                self._in.wait_event(event)
        with torch.cuda.stream(self._in):
            for part, target in zip((KEYS, VALUES), buffer.parts, strict=True):
                _copy(target, self._kv.spans(part, segment.layer, segment.pages, segment.tokens))
            buffer.ready.record(self._in)


def _copy(target: Tensor, spans: Iterable[Tensor]) -> None:
    at = 0
    for span in spans:
        target[at : at + len(span)].copy_(span, non_blocking=True)
        at += len(span)


def _store(kv: KvCache, layer: int, pages: Sequence[int], tokens: range, k: Tensor, v: Tensor) -> None:
    for part, values in ((KEYS, k), (VALUES, v)):
        at = 0
        for span in kv.spans(part, layer, pages, tokens):
            span.copy_(values[at : at + len(span)], non_blocking=True)
            at += len(span)
