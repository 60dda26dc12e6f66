"""The mixed service: one worker that prefills and decodes, with one set of weights, one pool of pages, one engine.

It composes `prefill_svc` and `decode_svc`, which do not know each other, and is the only package that imports both.
Read `app` first. A prompt that is decoded here is computed in the pages of its reservation (`baton.worker.in_place`),
so nothing is transferred.

    prefill's jobs ── READY prompts, in order ──▶ MixedPasses ── chunks ──▶ DecodeLoop ──▶ engine
    decode's attempts ── sequences ───────────────────────────────────────────▲

passes   prompts for the passes of decode's loop, and results for prefill's jobs
budget   pure: the seconds of a pass that prompts may use
app      starts and stops everything
"""
