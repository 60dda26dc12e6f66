"""A decode worker's side of a prefix fetch: pages that hold a prefix, exported for a prefill worker to pull."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc

from baton.engine.contract import Engine, KvHandle
from baton.pb import prefill_pb2
from baton.request import PrefixSource, RemoteExport
from baton.rpc.convert import prefix_source_to_proto
from baton.transfer.export import ExportRegistry
from baton.transfer.transport import KvServicer
from tests.decoding import digests
from tests.engine_calls import prefill_chunk
from tests.prefill import PROMPT, decoder

INCARNATION = "of the decode worker"

_ids = itertools.count()


class Peer:
    """Exports prefixes that `engine` holds."""

    def __init__(self, engine: Engine, address: str, exports: ExportRegistry) -> None:
        self._engine = engine
        self.address = address
        self.exports = exports
        self.released = 0

    def offer(self, handle: KvHandle, tokens: int, prompt: list[int] = PROMPT) -> prefill_pb2.PrefixSource:
        """Export the handle's first `tokens` tokens, once, as those of `prompt`."""
        transfer_id = f"prefix-{next(_ids)}"
        export = self.exports.open(transfer_id, handle, tokens, on_closed=self._closed)
        blocks = digests(self._engine, prompt[:tokens])
        export.commit_prefix(blocks[-1])
        return self.source(transfer_id, tokens)

    def source(self, transfer_id: str, tokens: int) -> prefill_pb2.PrefixSource:
        """Source of an export that is there, or would be."""
        shard = replace(self._engine.spec.kv_format.whole, kv_address=self.address)
        return prefix_source_to_proto(PrefixSource(RemoteExport(transfer_id, INCARNATION, (shard,)), tokens))

    def _closed(self) -> None:
        self.released += 1


@contextlib.asynccontextmanager
async def peer(engine: Engine) -> AsyncIterator[Peer]:
    """A kv listener over `engine`."""
    exports = ExportRegistry(engine, INCARNATION)
    server = grpc.aio.server()
    KvServicer(exports).add_to_server(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Peer(engine, f"127.0.0.1:{port}", exports)
    finally:
        exports.close()
        await exports.wait_closed()
        await server.stop(0)


@contextlib.asynccontextmanager
async def exporter(prompt: list[int] = PROMPT) -> AsyncIterator[tuple[Peer, Any]]:
    """A peer that holds all of a prompt's KV, and the handle."""
    with decoder() as engine:
        handle = engine.reserve("held", len(prompt))
        prefill_chunk(engine, handle, prompt, 0, len(prompt), on_layer=lambda _: None)
        async with peer(engine) as exporting:
            yield exporting, handle
        engine.free(handle)
