"""An exporter and a consumer on fake engines, whose KV tells token, position, layer, head and part apart."""

import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.kv.format import PartData, Shard
from baton.request import FirstToken, Handoff, SamplingParams, TokenInfo
from baton.telemetry.metrics import TRANSFER_FAULTS
from baton.transfer import wire
from baton.transfer.export import Export, ExportRegistry
from baton.transfer.wire import KvSlice
from tests.engine_calls import prefill_chunk
from tests.metrics import count

LAYERS, HEADS = 3, 2
INCARNATION = "first"
SEED = wire.seed_of("t")
"""Of the export "t"."""


class Engine(FakeEngine):
    """A fake engine whose reads and writes can be held back, and are counted while they run."""

    def __init__(self, *, page_size: int = 16, kv_dtype: str = "float32") -> None:
        super().__init__(layers=LAYERS, heads=HEADS, page_size=page_size, pages=4096 // page_size, kv_dtype=kv_dtype)
        self.before_read: Callable[[], object] = lambda: None
        self.before_write: Callable[[], object] = lambda: None
        self.copies = 0
        self.most_in_flight = 0
        self._counting = threading.Lock()

    def read_kv(self, handle: KvHandle, layer: int, tokens: range, heads: range) -> list[PartData]:
        self._count(1)
        try:
            self.before_read()
            return super().read_kv(handle, layer, tokens, heads)
        finally:
            self._count(-1)

    def write_kv(
        self, handle: KvHandle, layer: int, token_start: int, head_start: int, parts: Sequence[PartData]
    ) -> None:
        self._count(1)
        try:
            self.before_write()
            super().write_kv(handle, layer, token_start, head_start, parts)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._counting:
            self.copies += change
            self.most_in_flight = max(self.most_in_flight, self.copies)


class Gate:
    """Holds a thread until opened; tells a test that it has arrived."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self._opened.wait(60):
            raise TimeoutError("the gate was never opened")

    def open(self) -> None:
        self._opened.set()


def prompt(tokens: int) -> list[int]:
    """Token ids, all different as far as the vocabulary goes."""
    return [(37 * i + 5) % 1000 for i in range(tokens)]


def handoff(tokens: int) -> Handoff:
    """A handoff over `prompt(tokens)`, the last of which was an output already."""
    ids = prompt(tokens)
    params = SamplingParams(max_tokens=8, seed=3, temperature=0.5, logit_bias=((1, 2.0), (9, -1.0)))
    first = (FirstToken(0, TokenInfo(17, -1.0, ((17, -1.0), (4, -2.0)))), FirstToken(1, TokenInfo(18)))
    return Handoff("request", 2, array("I", ids[:-1] or ids), array("I", ids[:-1] and ids[-1:]), params, first)


def prefilled(engine: Engine, tokens: int, *, until: int | None = None) -> KvHandle:
    """A handle with the KV of `prompt(tokens)[:until]`."""
    handle = engine.reserve("prefill", tokens)
    if end := tokens if until is None else until:
        prefill_chunk(engine, handle, prompt(tokens), 0, end, on_layer=lambda layer: None)
    return handle


def mark_all_final(export: Export, token_end: int) -> None:
    """Every layer is final up to `token_end`."""
    for layer in range(LAYERS):
        export.mark_final(layer, token_end)


def ready(exports: ExportRegistry, engine: Engine, transfer_id: str, tokens: int) -> tuple[Export, list[str]]:
    """A committed export of `prompt(tokens)`, and a list which its end is written into."""
    ends: list[str] = []
    handle = prefilled(engine, tokens)

    def on_closed() -> None:
        ends.append(transfer_id)
        engine.free(handle)

    export = exports.open(transfer_id, handle, tokens, on_closed=on_closed)
    mark_all_final(export, tokens)
    export.commit(handoff(tokens))
    return export, ends


WHOLE = Shard("", range(LAYERS), range(HEADS))
"""A worker's only shard."""


def whole(tokens: int) -> KvSlice:
    return KvSlice(range(tokens), range(LAYERS), range(HEADS))


def contents(engine: Engine, handle: KvHandle, kv_slice: KvSlice) -> list[list[bytes]]:
    """Content of the pages: for each layer the parts' bytes."""
    return [
        [bytes(part.data) for part in engine.read_kv(handle, layer, kv_slice.tokens, kv_slice.heads)]
        for layer in kv_slice.layers
    ]


async def collect(export: Export, kv_slice: KvSlice) -> list[bytes]:
    async with aclosing(export.frames(kv_slice)) as frames:
        return [frame async for frame in frames]


def decoded(frame: bytes) -> wire.KvData | wire.Manifest | wire.Commit:
    """A frame of the export "t"."""
    return wire.decode(frame, SEED)


class MemorySource:
    """A KvSource without a network: each stream is what `mangle(number of the stream, frames)` makes of it."""

    def __init__(self, export: Export, mangle: Callable[[int, list[bytes]], list[bytes]]) -> None:
        self.shard = export.kv_format.whole
        self.checksum_seed = wire.seed_of(export.transfer_id)
        self.slices: list[KvSlice] = []
        self._export = export
        self._mangle = mangle

    async def frames(self, kv_slice: KvSlice) -> AsyncGenerator[bytes, None]:
        self.slices.append(kv_slice)
        for frame in self._mangle(len(self.slices) - 1, await collect(self._export, kv_slice)):
            yield frame

    async def release(self) -> None:
        self._export.end("was released")


def unchanged(stream: int, frames: list[bytes]) -> list[bytes]:
    return frames


def faults(kind: str) -> float:
    return count(TRANSFER_FAULTS, kind)
