"""Prompts in the passes of decode's loop, pass by pass: the test's own thread is engine thread and asyncio loop."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.engine.contract import ChunkResult
from baton.engine.fake import FakeEngine, expected_tokens
from baton.errors import BatonError, Cancelled, EngineError, NoToken
from baton.request import SamplingParams, SequenceState
from baton.worker.health import Watchdog
from decode_svc.loop import DecodeLoop, StepReport
from decode_svc.scheduler import DecodeSequence
from mixed_svc import passes
from mixed_svc.budget import PassBudget
from mixed_svc.passes import MixedPasses, PackedChunks
from prefill_svc.job import PrefillJob, PrefillRequest
from prefill_svc.scheduler import PrefillScheduler, ScheduledJob
from tests.engine_calls import prefill_chunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


class Engine(FakeEngine):
    """A fake engine that keeps the chunks and the sequences of each pass: owners, and ranges of tokens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"page_size": 4, "pages": 512, "slots": 4, **settings})
        self.passes: list[tuple[list[tuple[str, int, int]], list[str]]] = []
        self.fail_next = False
        self.followed: list[bool] = []
        """For each chunk, whether it is followed layer by layer."""

    def launch(self, chunks: Any = (), **more: Any) -> Any:
        if self.fail_next:
            self.fail_next = False
            raise EngineError("told so by the test")
        launched = super().launch(chunks, **more)
        self.followed += [chunk.on_layer is not None for chunk in chunks]
        cut = [(chunk.handle.owner, chunk.start, chunk.end) for chunk in chunks]
        self.passes.append((cut, [each.handle.owner for each in launched.batch]))
        return launched


class Bench:
    """A loop with prompts; chunks have at most `chunk_size` tokens of each prompt."""

    def __init__(self, *, chunk_size: int = 8, **settings: int) -> None:
        self.engine = Engine(**settings)
        self.scheduler = PrefillScheduler(self.engine.spec, 0, 8)
        self.jobs: dict[ScheduledJob, PrefillJob] = {}
        watchdog = Watchdog()
        self.passes = MixedPasses(self.engine.spec, watchdog, PassBudget(1000.0))
        self.reports: list[StepReport] = []
        self.loop = DecodeLoop(self.engine, watchdog, self.reports.append, prompts=self.passes)
        self.chunks = PackedChunks(self.passes, self.loop, chunk_size, self.scheduler, self.jobs)
        self.begun: list[str] = []

    def prompt(
        self, name: str, ids: Sequence[int], tenant: bytes = b"", *, computed: int = 0, **more: Any
    ) -> "asyncio.Task[ChunkResult]":
        """Begin to compute a prompt after its first `computed` tokens; the task has the result of its last chunk."""
        request = PrefillRequest(name, 0, name, ids, (), (0,), GREEDY, tenant, **more)
        scheduled = self.scheduler.admit(len(ids), tenant)
        job = self.jobs[scheduled] = PrefillJob.create(request, scheduled, time.monotonic())
        job.handle, job.computed_tokens = self.engine.reserve(name, len(ids) + 50), computed
        return asyncio.create_task(self._compute(job))

    async def _compute(self, job: PrefillJob) -> ChunkResult:
        try:
            while True:
                result = await self.chunks.compute(job, lambda: self.begun.append(job.request.request_id))
                if job.computed_tokens == len(job.token_ids):
                    return result
        finally:
            self.scheduler.remove(job.scheduled)
            del self.jobs[job.scheduled]

    def job(self, name: str) -> PrefillJob:
        (found,) = (job for job in self.jobs.values() if job.request.request_id == name)
        return found

    def sequence(self, prompt: Sequence[int], tokens: int = 40) -> None:
        """Add a sequence, whose prompt is computed at once."""
        name = f"s{prompt[0]}"
        handle = self.engine.reserve(name, len(prompt) + tokens)
        first = expected_tokens(prompt, 1)
        prefill_chunk(self.engine, handle, prompt, 0, len(prompt))
        state = SequenceState(replace(GREEDY, max_tokens=tokens), prompt, first)
        self.loop.add([DecodeSequence(prompt[0], handle, state)])

    async def run(self, passes: int = 1) -> None:
        """So many iterations of the loop; jobs go on after each."""
        for _ in range(passes):
            self.loop.drop([])
            assert self.loop.run_once()
            for _ in range(5):
                await asyncio.sleep(0)

    def tokens(self, number: int) -> list[int]:
        return [
            token.token_id
            for report in self.reports
            for output in report.outputs
            if output.id == number
            for token in output.tokens
        ]


async def started() -> None:
    """Let new tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [0, 1])
async def test_prompts_and_steps_share_passes_and_prompts_go_on_without_the_asyncio_loop(ahead: int) -> None:
    bench = Bench(steps_ahead=ahead)
    bench.sequence([5, 7])
    await bench.run(4)
    del bench.engine.passes[:]
    ids = list(range(30, 50))
    computing = bench.prompt("p", ids)
    await started()
    for _ in range(3 + ahead):
        # No job runs in between.
        bench.loop.drop([])
        assert bench.loop.run_once()
    assert bench.engine.passes[:3] == [
        ([("p", 0, 8)], ["s5"]),
        ([("p", 8, 16)], ["s5"]),
        ([("p", 16, 20)], ["s5"]),
    ]
    result = await asyncio.wait_for(computing, 60)
    assert [token.token_id for token in result.tokens] == expected_tokens(ids, 1)
    assert bench.begun == ["p"]
    assert bench.tokens(5) == expected_tokens([5, 7], 1 + len(bench.tokens(5)))[1:]


async def test_waiting_prompts_share_a_pass_without_steps_the_shortest_first() -> None:
    bench = Bench(chunk_size=0)
    lengths = {"long": 100, "short": 10, "middle": 30}
    computing = {name: bench.prompt(name, range(length)) for name, length in lengths.items()}
    await started()
    await bench.run()
    assert bench.engine.passes == [([("short", 0, 10), ("middle", 0, 30), ("long", 0, 100)], [])]
    for name, each in computing.items():
        result = await asyncio.wait_for(each, 60)
        assert [token.token_id for token in result.tokens] == expected_tokens(range(lengths[name]), 1)


async def test_a_shorter_prompt_is_first_in_the_next_pass_and_a_tenant_that_had_less() -> None:
    bench = Bench(chunk_size=0)
    bench.prompt("long", range(600), b"a")
    await started()
    await bench.run()
    # Without a rate, a pass has the tokens of a quarter of a second at 1,000 a second.
    assert bench.engine.passes[-1] == ([("long", 0, 250)], [])
    bench.scheduler.charge(bench.job("long").scheduled, 100.0)
    bench.prompt("short", range(20), b"a")
    bench.prompt("longer", range(900), b"b")
    await started()
    await bench.run()
    assert [owner for owner, *_ in bench.engine.passes[-1][0]] == ["longer", "short", "long"]


async def test_tenants_pay_for_seconds_not_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a prompt that is far takes longer; here one of the other prompt takes a millisecond."""
    monkeypatch.setattr(passes, "FAR_TOKENS", 100)
    charged: dict[bytes, float] = {}
    monkeypatch.setattr(PrefillScheduler, "charge", lambda _, job, seconds: charged.update({job.tenant: seconds}))
    bench = Bench()
    bench.passes._budget.record(100, 0, 0, 0.1)
    near = bench.prompt("near", range(30), b"near")
    far = bench.prompt("far", range(130), b"far", computed=100)
    await started()
    chunks = bench.passes.next_chunks(0)
    assert [chunk.start for chunk in chunks] == [0, 100]
    results = [ChunkResult() for _ in chunks]
    bench.passes.record(chunks, results, 0.1, 0)
    await started()
    assert charged == {b"near": pytest.approx(0.008), b"far": pytest.approx(0.092)}
    for each in (near, far):
        each.cancel()
    await started()
    await bench.run()


async def test_a_prompt_that_is_aborted_fails_alone_before_its_next_chunk() -> None:
    bench = Bench()
    bench.sequence([5, 7])
    await bench.run(4)
    stopped, other = bench.prompt("stopped", range(30)), bench.prompt("other", range(40))
    await started()
    await bench.run()
    bench.job("stopped").error = Cancelled("told so by the test")
    await bench.run(5)
    assert [cut for cut, _ in bench.engine.passes if any(owner == "stopped" for owner, *_ in cut)] == [
        [("stopped", 0, 8), ("other", 0, 8)]
    ]
    with pytest.raises(Cancelled):
        await asyncio.wait_for(stopped, 60)
    result = await asyncio.wait_for(other, 60)
    assert [token.token_id for token in result.tokens] == expected_tokens(range(40), 1)


async def test_a_cancelled_job_waits_for_the_end_of_the_pass_and_its_tokens_count() -> None:
    bench = Bench()
    computing = bench.prompt("p", range(30))
    await started()
    bench.loop.drop([])
    # The pass is read, but the asyncio loop has not learnt it.
    assert bench.loop.run_once()
    job = bench.job("p")
    computing.cancel()
    await started()
    assert not computing.done(), "the engine thread has not looked yet"
    await bench.run()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(computing, 60)
    assert job.computed_tokens == 8
    assert not bench.passes.waiting


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_job_learns_that_its_kv_may_be_wrong(ahead: int, cancels: int) -> None:
    bench = Bench(steps_ahead=ahead)
    bench.sequence([5, 7])
    await bench.run(4)
    computing = bench.prompt("p", range(16))
    await started()
    await bench.run()
    pages = cast(Any, bench.job("p").allocated_handle).pages
    bench.engine.memory.put(pages, 0, b"\xff" * bench.engine.spec.kv_format.token_bytes)
    bench.loop.drop([])
    assert bench.loop.run_once()
    for _ in range(cancels):
        computing.cancel()
        await started()
    await bench.run(1 + ahead)
    with pytest.raises(NoToken, match="logits are not finite"):
        await asyncio.wait_for(computing, 60)


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_pass_that_fails_fails_its_chunks_and_its_batch(ahead: int) -> None:
    bench = Bench(steps_ahead=ahead)
    bench.sequence([5, 7])
    await bench.run(4)
    failing = bench.prompt("p", range(30))
    await started()
    await bench.run()
    bench.engine.fail_next = True
    await bench.run()
    with pytest.raises(EngineError, match="told so by the test"):
        await asyncio.wait_for(failing, 60)
    assert [lost.id for report in bench.reports for lost in report.failures] == [5]
    again = bench.prompt("again", range(10))
    await started()
    await bench.run(2)
    assert [token.token_id for token in (await asyncio.wait_for(again, 60)).tokens] == expected_tokens(range(10), 1)


async def test_a_prompt_whose_pages_are_gone_fails_alone() -> None:
    bench = Bench()
    gone, other = bench.prompt("gone", range(30)), bench.prompt("other", range(30))
    await started()
    await bench.run()
    bench.engine.free(bench.job("gone").allocated_handle)
    await bench.run(3)
    with pytest.raises(BatonError):
        await asyncio.wait_for(gone, 60)
    await asyncio.wait_for(other, 60)


async def test_the_loop_waits_a_little_for_the_sequences_of_prompts_that_ended_in_place() -> None:
    bench = Bench(chunk_size=0)
    bench.sequence([5, 7])
    await bench.run(4)
    computing = bench.prompt("p", range(10), in_place=True)
    await started()
    thread = asyncio.get_running_loop().run_in_executor(None, lambda: (bench.loop.run_once(), bench.loop.run_once()))
    await asyncio.wait_for(computing, 60)
    handle = bench.engine.reserve("q", 20)
    bench.loop.add([DecodeSequence(9, handle, SequenceState(GREEDY, [1, 2], [3]))])
    await asyncio.wait_for(thread, 60)
    assert bench.engine.passes[-1][1] == ["s5", "q"]


async def test_short_passes_are_followed_only_for_exports() -> None:
    bench = Bench()
    alone = bench.prompt("alone", range(8))
    await started()
    await bench.run()
    await alone
    bench.sequence([5, 7])
    await bench.run(4)
    del bench.engine.followed[:]
    prompts = [bench.prompt(name, range(8)) for name in ("here", "elsewhere")]
    await started()
    bench.job("elsewhere").export = cast(Any, SimpleNamespace(mark_final=lambda layer, end: None))
    await bench.run()
    assert sorted(bench.engine.followed) == [False, True]
    await asyncio.gather(*prompts)
    bench.passes._budget.record(8, 0, 1, 100.0)
    slow = bench.prompt("slow", range(8))
    await started()
    await bench.run()
    assert bench.engine.followed[-1]
    await slow


async def test_calls_run_between_passes_and_are_cancelled_after_the_end() -> None:
    bench = Bench()
    call = bench.chunks.run(lambda: 7)
    failing = bench.chunks.run(lambda: 1 // 0)
    await bench.run()
    assert await call == 7
    with pytest.raises(ZeroDivisionError):
        await failing
    waiting = bench.chunks.run(lambda: 8)
    bench.loop.stop()
    bench.loop.run()
    late = bench.chunks.run(lambda: 9)
    for each in (waiting, late):
        with contextlib.suppress(asyncio.CancelledError):
            assert await each == 8
    assert late.cancelled()
