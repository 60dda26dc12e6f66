"""Moves KV between workers; any worker may export KV (`export`) and fetch it (`fetcher`).

    exporter                                              consumer
    ExportRegistry.open ── mark_final × n ── commit ──┐          ExportFetcher: fetch, fetch_prefix
         Export.frames(kv_slice) ── wire ── KvServicer ══════▶ KvSource ── Receiver ── engine.write_kv
                                            └─ released, lease over or failed ── on_closed

Read `fetcher` first. A transport for KV implements `transport.KvSource`; gRPC is the only one so far.
"""
