"""Events that a job tells its caller, their order, and how long it may wait."""

import itertools
from collections.abc import Sequence

from baton.engine.fake import FakeEngine
from baton.request import Prefilled, PrefillProgress, PromptLogprobs, SamplingParams, TokenInfo
from prefill_svc.job import PREPARING_S, PrefillJob, PrefillRequest
from prefill_svc.scheduler import PrefillScheduler

DONE = Prefilled((), 0)


def create(ids: Sequence[int]) -> PrefillJob:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20)
    request = PrefillRequest("r", 0, "", ids, (), (0,), params, report_progress=True)
    return PrefillJob.create(request, PrefillScheduler(FakeEngine().spec, 0, 8).admit(100), 1000.0)


async def test_a_caller_that_reads_slowly_gets_the_last_progress_before_the_result() -> None:
    job = create(range(100))
    job.start(1000.0)
    events = job.events()
    assert await anext(events) == PrefillProgress(0, 100)
    for done in (30, 60):
        job.computed_tokens = done
        job.report_progress(1000.0 + done)
    assert (await anext(events)) == PrefillProgress(60, 100, 1.0, 40.0)
    # The caller does not ask for more until all is over.
    job.computed_tokens = 100
    job.report_progress(1100.0)
    job.finish(DONE)
    assert [event async for event in events] == [PrefillProgress(100, 100, 1.0, 0.0), DONE]


async def test_a_report_comes_in_parts_and_the_first_tokens_do_not_wait_for_it() -> None:
    job = create(range(3000))
    events = job.events()
    alternatives = tuple((each, -1.0) for each in range(20))
    job.add_prompt_logprobs([TokenInfo(each, -1.0, alternatives) for each in range(1, 1000)])
    first = await anext(events)
    assert isinstance(first, PromptLogprobs)
    job.add_prompt_logprobs([TokenInfo(each, -1.0, alternatives) for each in range(1000, 3100)])
    job.finish(DONE)
    assert await anext(events) == DONE
    parts = [first, *[event async for event in events if isinstance(event, PromptLogprobs)]]
    assert [token.token_id for part in parts for token in part.tokens] == list(range(3000))
    assert [part.start for part in parts] == list(itertools.accumulate([0, *(len(p.tokens) for p in parts[:-1])]))
    assert max(sum(1 + len(token.top) for token in part.tokens) for part in parts) <= 256 + 20


def test_a_long_prompt_may_be_loaded_for_longer() -> None:
    waits = [create(range(tokens)).lifecycle.deadline - 1000.0 for tokens in (1, 1_000_000)]
    assert PREPARING_S <= waits[0] < PREPARING_S + 1
    # 64 MB/s for 128 KiB of KV a token.
    assert waits[1] >= 2000
