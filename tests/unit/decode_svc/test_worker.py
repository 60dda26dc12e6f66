"""Deadlines of attempts: a result that reaches the loop in time counts, however late the loop handles it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.config.decode import DecodeConfig
from baton.config.worker import WorkerConfig
from baton.engine.contract import KvHandle
from baton.engine.fake import FakeEngine
from baton.request import Handoff, SamplingParams
from baton.transfer.registry import ExportRegistry
from baton.transfer.remote import RemoteExport
from baton.worker.status import WorkerRole, new_identity
from decode_svc.messages import AttemptKey, FailureKind, Reserve, Start
from decode_svc.service import DecodeService
from tests.decoding import prefill
from tests.prefix_cache import MemoryPrefixCache
from tests.property.virtual import VirtualLoop

PROMPT, FETCH_S = (3, 4, 5), 20.3


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close()


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_fetch_that_ends_at_the_deadline_is_in_time(loop: VirtualLoop, late_s: float) -> None:
    engine, ready = FakeEngine(), prefill(PROMPT, SamplingParams(max_tokens=8, seed=1), request_id="r")
    fetched: asyncio.Future[None] = loop.create_future()

    async def fetch(source: RemoteExport, handle: KvHandle, *, tokens: int, first: int) -> Handoff:
        await fetched
        ready.write(engine, handle, first)
        return ready.handoff

    def made() -> DecodeService:
        identity = new_identity(WorkerConfig(), WorkerRole.DECODE, engine.spec, "")
        # And a tenth of a second for each token.
        config = DecodeConfig(fetch_timeout_s=FETCH_S - 0.3)
        return DecodeService(config, engine, identity, fetch, ExportRegistry(engine, "ours"), MemoryPrefixCache())

    worker = loop.call(made).worker
    session, key = loop.call(worker.open_session, "router"), AttemptKey("r", 0)
    loop.call(worker.handle, session, Reserve(key, len(PROMPT), 8, 1))
    # Before the worker's own timer, at the same instant.
    loop.call_at(loop.now + FETCH_S + late_s, fetched.set_result, None)
    loop.call(worker.handle, session, Start(key, RemoteExport("t", "theirs", ())))
    loop.advance(FETCH_S + late_s)
    failures = [(failure.kind, failure.message) for _, failure in session._down.failures]
    late = [(FailureKind.TRANSFER, "r/0 was still transferring after 20.3 s, prefill included (--fetch-timeout-s)")]
    assert failures == (late if late_s else [])
    assert len(worker.attempts) == (not late_s)
    loop.call(worker.close_session, session)
    assert engine.audit() == {}
