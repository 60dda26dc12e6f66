"""Moving KV between workers; either kind may export it (`exports`, `servicer`) and fetch it (`fetcher`).

    exporter                                              consumer
    Exports.open ── advance × n ── commit ──┐             fetch, fetch_prefix
         Export.frames(box) ── wire ── KvServicer ══════▶ KvSource ── Receiver ── engine.write_kv
                                            └─ released, lease over or failed ── on_closed

`source.KvSource` is the seam behind which the bulk path stands; gRPC is its one implementation.
"""
