"""The prefill scheduler under arbitrary arrivals, hits, failures and cancels, in the time that its chunks take.

Hits grow and shrink between the look-up, the taking of pages and the load, and prompts wait for others that compute
their prefix.

No more pages are granted than are free, and none before those of a prompt that has lost patience; a prompt is overtaken
only by such as came before it had been overtaken for ten times its own computing time; every prompt that is admitted
ends, once, computed whole.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest, Overloaded
from baton.kv.format import KvFormat, KvPart
from prefill_svc.scheduler import AGEING, PATIENCE_S, PREPARED_AHEAD, PrefillScheduler, PromptStage, ScheduledJob
from tests.effort import machine_test

PAGE, PAGES, LONGEST, WAITING = 16, 64, 1200, 6
RATE = 1_000.0
SLACK_S = 0.01


@dataclass(eq=False)
class Known:
    work: ScheduledJob
    computed: int = 0
    pages: int = 0
    to_compute: int = 0
    leader: ScheduledJob | None = None
    overtaken_s: float = 0.0
    found: dict[ScheduledJob, float] = field(default_factory=dict)
    """Prompts that were there when it came, and for how long later ones had been computed before them."""


class PrefillSchedulerMachine(RuleBasedStateMachine):
    """Drives the scheduler of a worker that computes RATE tokens/s."""

    def __init__(self) -> None:
        super().__init__()
        kv_format = KvFormat((KvPart("k", "float32", (1, 2)),), layers=1, block_size=16)
        spec = EngineSpec("m", kv_format, 1000, LONGEST, frozenset(), PAGE, PAGES, 0)
        self.scheduler = PrefillScheduler(spec, 100, WAITING)
        self.now, self.free = 0.0, PAGES
        self.prompts: dict[ScheduledJob, Known] = {}

    def picked(self, index: int, stage: PromptStage) -> Known | None:
        found = [prompt for prompt in self.prompts.values() if prompt.work.stage is stage]
        return found[index % len(found)] if found else None

    @rule(tokens=st.one_of(st.integers(1, 100), st.integers(1, LONGEST + 100)))
    def admit(self, tokens: int) -> None:
        waiting = self.scheduler.waiting
        try:
            work = self.scheduler.admit(tokens)
        except InvalidRequest:
            assert tokens >= LONGEST or -(-tokens // PAGE) > PAGES
        except Overloaded:
            assert waiting >= WAITING
        else:
            assert waiting < WAITING
            assert work.pages * PAGE >= tokens
            found = {each: prompt.overtaken_s for each, prompt in self.prompts.items()}
            self.prompts[work] = Known(work, found=found)

    @rule(index=st.integers(0, 99), hit=st.floats(0, 0.99), loads=st.booleans())
    def look_up(self, index: int, hit: float, loads: bool = False) -> None:
        if prompt := self.picked(index, PromptStage.LOOKUP):
            self.scheduler.finish_lookup(prompt.work, int(prompt.work.tokens * hit), needs_load=loads)

    @rule(tokens=st.one_of(st.integers(1, 100), st.integers(400, LONGEST - 200)), hit=st.floats(0, 0.9))
    def arrive(self, tokens: int, hit: float) -> None:
        """Several rules in one, so that pages run short."""
        self.admit(tokens)
        self.look_up(0, hit)
        self.grant()
        self.load(0, 1.0)

    @rule(index=st.integers(0, 99), leader=st.integers(0, 99))
    def follow(self, index: int, leader: int) -> None:
        """A prompt begins like another that has its pages and is not begun."""
        if (prompt := self.picked(index, PromptStage.WAITING)) and (other := self.picked(leader, PromptStage.READY)):
            prompt.leader = other.work

    def later(self, work: ScheduledJob) -> bool:
        leader = self.prompts[work].leader
        return leader in self.prompts and not leader.started

    def prepared_before(self, work: ScheduledJob) -> list[ScheduledJob]:
        """Prompts that have pages, have not begun, and go before it; those that load only if it must load too."""
        priority = self.scheduler.priority
        prepared = [
            each
            for each in self.prompts
            if each.stage in (PromptStage.LOADING, PromptStage.READY)
            and not each.started
            and (work.needs_load or not (each.stage is PromptStage.LOADING and each.needs_load))
        ]
        return [each for each in prepared if (priority(each), each.order) < (priority(work), work.order)]

    @rule(found=st.floats(0, 0.99))
    def grant(self, found: float = 0.5) -> None:
        starved = [
            prompt.work
            for prompt in self.prompts.values()
            if prompt.work.stage is PromptStage.WAITING
            and prompt.work.refused_at is not None
            and self.now - prompt.work.refused_at >= PATIENCE_S
            and not self.later(prompt.work)
        ]
        offered, refused = list[ScheduledJob](), set[ScheduledJob]()
        while True:
            deferred = {prompt.work for prompt in self.prompts.values() if self.later(prompt.work)}
            work = self.scheduler.next_allocation(self.now, deferred, refused)
            if work is None:
                break
            offered.append(work)
            assert work.stage is PromptStage.WAITING
            assert work not in deferred, "it was to wait"
            if work.pages > self.free:
                self.scheduler.mark_refused(work, self.now)
                refused.add(work)
            else:
                self.free -= work.pages
                self.prompts[work].pages += work.pages
                assert work in starved or len(self.prepared_before(work)) < PREPARED_AHEAD
                self.scheduler.record_allocation(work, int(work.tokens * found), needs_load=work.needs_load)
        assert len(set(offered)) == len(offered)
        if starved:
            assert offered[0] is min(starved, key=lambda each: each.order), "another was offered pages before it"
            if offered[0] in refused:
                assert len(offered) == 1, "others were offered pages though it has none"

    @rule(index=st.integers(0, 99), worth=st.floats(0, 1))
    def load(self, index: int, worth: float) -> None:
        if prompt := self.picked(index, PromptStage.LOADING):
            done = int(prompt.work.covered_tokens * worth)
            prompt.computed, prompt.to_compute = done, prompt.work.tokens - done
            self.scheduler.make_ready(prompt.work, done)

    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def compute(self, fails: bool) -> None:
        ready = [prompt for prompt in self.prompts.values() if prompt.work.stage is PromptStage.READY]
        choice = self.scheduler.next_chunk()
        if choice is None:
            assert not ready, "work is ready and none is done"
            return
        work, end = choice
        prompt = self.prompts[work]
        assert work.stage is PromptStage.READY
        assert prompt.pages == work.pages
        assert prompt.computed == work.covered_tokens < end <= work.tokens
        for other in ready:
            if other.work in prompt.found:
                bound = other.to_compute / RATE / AGEING
                assert prompt.found[other.work] <= bound + SLACK_S, "later prompts were preferred too long"
        seconds = (end - work.covered_tokens) / RATE
        self.scheduler.charge(work, seconds)
        for each in prompt.found.keys() & self.prompts.keys():
            self.prompts[each].overtaken_s += seconds
        if fails:
            self.now += seconds
            self._end(prompt)
            return
        self.scheduler.start_chunk(work)
        self.scheduler.finish_chunk(work, end, seconds)
        prompt.computed = end
        self.now += seconds
        if end == work.tokens:
            self._end(prompt)
        else:
            self.scheduler.make_ready(work, end)

    @precondition(lambda self: self.prompts)
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        self._end(list(self.prompts.values())[index % len(self.prompts)])

    def _end(self, prompt: Known) -> None:
        self.free += prompt.pages
        del self.prompts[prompt.work]
        self.scheduler.remove(prompt.work)
        self.scheduler.remove(prompt.work)

    @rule(seconds=st.sampled_from([0.01, 0.5, PATIENCE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_those_of_what_is_there(self) -> None:
        works = self.prompts.keys()
        assert self.free >= 0
        assert self.free + sum(prompt.pages for prompt in self.prompts.values()) == PAGES
        assert self.scheduler.waiting == sum(not work.started for work in works) <= WAITING
        assert self.scheduler.pending_tokens == sum(work.tokens - work.covered_tokens for work in works)

    def teardown(self) -> None:
        for _ in range(10 * (len(self.prompts) + 1) + LONGEST * len(self.prompts) // 50):
            for index in range(len(self.prompts)):
                self.look_up(index, 0.0)
            self.grant()
            self.load(0, 1.0)
            self.load(0, 1.0)
            self.compute(False)
            self.now += 0.1
        assert not self.prompts, "a prompt never ends"
        assert self.free == PAGES


TestPrefillScheduler = machine_test(PrefillSchedulerMachine, 100, 50)
