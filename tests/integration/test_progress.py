"""Progress of a long prompt, from the worker's chunks to the client, through a real router."""

import asyncio
from contextlib import aclosing

import pytest

import prefill_svc.progress
from baton import bundled
from baton.engine.fake import FakeEngine, expected_tokens
from baton.request import PrefillProgress
from tests.fleet import Fleet
from tests.prefill import WAIT_S, Gate

PROMPT = [(7 * i) % 1000 for i in range(40)]
CHUNK, LAYERS = 10, 2


async def test_a_client_that_asks_is_told_after_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_svc.progress, "INTERVAL_S", 0.0)
    gate = Gate()
    engine = FakeEngine(chunk_time=1.0, delay=gate, layers=LAYERS)
    async with asyncio.timeout(WAIT_S), Fleet(bundled.path(), stall_s=WAIT_S) as fleet:
        prefill = await fleet.prefill(engine=engine, chunk_size=CHUNK)
        client = await fleet.router([prefill], [await fleet.decode(engine=FakeEngine(layers=LAYERS))])
        sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        async with aclosing(client.generate(PROMPT, report_progress=True, **sampling)) as stream:
            # Each chunk begins only after the report on the one before was read.
            assert (await anext(stream)).progress == PrefillProgress(0, len(PROMPT))
            for done in range(CHUNK, len(PROMPT) + 1, CHUNK):
                gate.pass_layers(LAYERS)
                progress = (await anext(stream)).progress
                assert (progress.tokens_done, progress.tokens_total) == (done, len(PROMPT))
                assert progress.tokens_per_second > 0
                assert progress.seconds_left is not None
                assert (progress.seconds_left > 0) == (done < len(PROMPT))
            rest = [delta async for delta in stream]
        assert not [delta for delta in rest if delta.progress is not None]
        assert [token.token_id for delta in rest for token in delta.tokens] == expected_tokens(PROMPT, 3)

        gate.open()
        plain = [delta async for delta in client.generate([9, *PROMPT], **sampling)]
        assert not [delta for delta in plain if delta.progress is not None]
        async with aclosing(client.generate(PROMPT, report_progress=True, **sampling)) as stream:
            progress = (await anext(stream)).progress
        assert progress.tokens_done >= 32, "cached tokens are done"
