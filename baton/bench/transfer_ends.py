"""The two processes between which KV moves while transfer is measured: a paged pool each, and no model.

    python -m baton.bench.transfer_ends producer SHAPE TOKENS STREAMS       exports KV, and sends raw bytes over TCP
    python -m baton.bench.transfer_ends consumer SHAPE TOKENS STREAMS       fetches it, and receives those

Commands come as lines of JSON, `{"fetch": {...}}`, on standard input, and are answered in order on standard output; the
first line says `{"ready": {...}}`. The end of the input ends the process.
SHAPE is one of `SHAPES`; each of STREAMS sequences has TOKENS tokens, in pages scattered over the pool.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton import executors
from baton.engine.contract import EngineSpec
from baton.engine.core import EngineCore
from baton.engine.executor import OnLayer
from baton.engine.plan import ForwardPlan, PlanResult
from baton.engine.process import prepare
from baton.engine.torch_memory import TorchMemory
from baton.errors import EngineError
from baton.kv.format import KvFormat, attention_parts
from baton.kv.pool import PageHandle
from baton.model.attention import KvCache
from baton.request import FirstToken, Handoff, SamplingParams, TokenInfo
from baton.rpc.server import listen
from baton.transfer.channels import KvChannels
from baton.transfer.fetcher import fetch
from baton.transfer.registry import ExportRegistry
from baton.transfer.remote import RemoteExport
from baton.transfer.servicer import SERVICE, KvServicer
from baton.transfer.source import open_sources

PAGE = 64
RAW_BYTES = 1 << 20
"""Bytes that raw TCP sends, and receives into one buffer, at a time."""

INCARNATION = "bench"
_TIMEOUT_S = 60.0

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of a model, or of some of its layers: bfloat16 parts `[kv_heads, head_dim]`."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


SHAPES = {"qwen2.5-0.5b": Shape(24, 2, 64), "llama-3.1-8b, 8 of 32 layers": Shape(8, 8, 128)}


@dataclass(frozen=True, slots=True)
class _NoModel:
    """An executor without a model, which has only pages."""

    memory: TorchMemory

    def heartbeat(self) -> int:
        """Nothing to count."""
        return 0

    def launch(self, plan: ForwardPlan, on_layer: OnLayer | None = None) -> Callable[[], PlanResult]:
        """Nothing is computed here."""
        raise EngineError("this engine has no model")


class Pages(EngineCore):
    """A pool that KV is read from and written to; nothing is computed."""

    def __init__(self, shape: Shape, tokens: int, streams: int) -> None:
        parts = attention_parts("bfloat16", shape.kv_heads, shape.head_dim)
        pages = streams * -(-tokens // PAGE)
        cpu = torch.device("cpu")
        self.kv = KvCache.allocate(parts, num_layers=shape.layers, num_pages=pages, page_size=PAGE, device=cpu)
        kv_format = KvFormat(parts, shape.layers, PAGE)
        spec = EngineSpec("", kv_format, 1, tokens, frozenset(), PAGE, pages, 1)
        super().__init__(spec, _NoModel(TorchMemory(self.kv)), 0)

    def scattered(self, streams: int, tokens: int) -> list[PageHandle]:
        """A handle for each stream; their pages are scattered, as in a pool that has been used for long."""
        singles = [self.reserve(str(page), PAGE) for page in range(self.spec.pages)]
        random.Random(7).shuffle(singles)
        for single in singles:
            self.free(single)
        return [self.reserve(str(stream), tokens) for stream in range(streams)]


class _End:
    """What both have."""

    def __init__(self, shape: Shape, tokens: int, streams: int) -> None:
        self._engine = Pages(shape, tokens, streams)
        self._tokens = tokens
        self._handles = self._engine.scattered(streams, tokens)
        self._threads = ThreadPoolExecutor(streams)

    async def idle(self) -> Answer:
        """Does nothing; like every answer, this one has the CPU seconds of this process."""
        return {}

    async def digests(self) -> Answer:
        """SHA-256 of each sequence's KV, layer by layer."""
        kv_format = self._engine.spec.kv_format
        found = []
        for handle in self._handles:
            digest = hashlib.sha256()
            for layer in range(kv_format.layers):
                for part in self._engine.read_kv(handle, layer, range(self._tokens), range(kv_format.heads)):
                    digest.update(part.data)
            found.append(digest.hexdigest())
        return {"digests": found}


class Producer(_End):
    """Exports its sequences, one for each stream, under the given ids."""

    def __init__(self, shape: Shape, tokens: int, streams: int) -> None:
        super().__init__(shape, tokens, streams)
        for part in self._engine.kv.parts.values():
            part.view(torch.int16).random_(0, 1 << 14)
        self._exports = ExportRegistry(self._engine, INCARNATION)
        self._raw = socket.create_server(("127.0.0.1", 0))
        self._payload = memoryview(os.urandom(RAW_BYTES))
        self.commands: dict[str, Callable[..., Awaitable[Answer]]] = {
            "open": self.open,
            "raw": self.raw,
            "digests": self.digests,
            "idle": self.idle,
        }

    async def start(self, stack: AsyncExitStack) -> Answer:
        """Where it listens."""
        add = KvServicer(self._exports).add_to_server
        kv = await stack.enter_async_context(listen("127.0.0.1:0", insecure=False, add=add, services=[SERVICE]))
        return {"kv": kv.address, "raw": self._raw.getsockname()[1]}

    async def open(self, ids: Sequence[str]) -> Answer:
        """Export the first sequences, all final."""
        params = SamplingParams(max_tokens=1)
        for transfer_id, handle in zip(ids, self._handles, strict=False):
            export = self._exports.open(transfer_id, handle, self._tokens, on_closed=lambda: None)
            for layer in range(self._engine.spec.kv_format.layers):
                export.advance(layer, self._tokens)
            first = (FirstToken(0, TokenInfo(0)),)
            export.commit(Handoff(transfer_id, 0, (0,) * self._tokens, (), params, first))
        return {}

    async def raw(self, streams: int, size: int) -> Answer:
        """Send `size` bytes to each of the next connections."""
        for _ in range(streams):
            self._threads.submit(self._send, size)
        return {}

    def _send(self, size: int) -> None:
        connection, _ = self._raw.accept()
        with connection:
            for begin in range(0, size, RAW_BYTES):
                connection.sendall(self._payload[: size - begin])


class Consumer(_End):
    """Fetches into its own pages."""

    def __init__(self, shape: Shape, tokens: int, streams: int) -> None:
        super().__init__(shape, tokens, streams)
        self.commands: dict[str, Callable[..., Awaitable[Answer]]] = {
            "fetch": self.fetch,
            "raw": self.raw,
            "digests": self.digests,
            "idle": self.idle,
        }
        self._buffers = [memoryview(bytearray(RAW_BYTES)) for _ in range(streams)]

    async def start(self, stack: AsyncExitStack) -> Answer:
        """Nothing to tell."""
        self._channels = KvChannels()
        stack.push_async_callback(self._channels.close)
        return {}

    async def fetch(self, kv: str, ids: Sequence[str]) -> Answer:
        """Seconds from the first request until all of the KV is in the pages, and committed."""
        shards = (replace(self._engine.spec.kv_format.whole, kv_address=kv),)
        exports = [RemoteExport(transfer_id, INCARNATION, shards) for transfer_id in ids]
        began = time.perf_counter()
        await asyncio.gather(*map(self._fetch, exports, self._handles))
        return {"seconds": time.perf_counter() - began}

    async def _fetch(self, export: RemoteExport, handle: PageHandle) -> None:
        async with open_sources(self._channels, export, timeout_s=_TIMEOUT_S, stall_timeout_s=_TIMEOUT_S) as sources:
            await fetch(sources, self._engine, handle, tokens=self._tokens, timeout_s=_TIMEOUT_S)

    async def raw(self, port: int, streams: int, size: int) -> Answer:
        """Seconds until `size` bytes of each of `streams` connections were received."""
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        buffers = self._buffers[:streams]
        await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._receive, port, size, each) for each in buffers)
        )
        return {"seconds": time.perf_counter() - began}

    def _receive(self, port: int, size: int, buffer: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while size > 0 and (count := connection.recv_into(buffer)):
                size -= count
        if size:
            raise ConnectionError(f"{size} bytes did not arrive")


async def _serve(end: Producer | Consumer) -> None:
    async with AsyncExitStack() as stack:
        print(json.dumps({"ready": await end.start(stack)}), flush=True)
        while line := await executors.run(executors.WORK, sys.stdin.readline):
            ((command, arguments),) = json.loads(line).items()
            answer = await end.commands[command](**arguments)
            print(json.dumps(answer | {"cpu": time.process_time()}), flush=True)


def main() -> None:
    """One end, as the arguments say."""
    role, shape, tokens, streams = sys.argv[1:]
    prepare()
    torch.set_num_threads(1)
    kind = Producer if role == "producer" else Consumer
    asyncio.run(_serve(kind(SHAPES[shape], int(tokens), int(streams))))


if __name__ == "__main__":
    main()
