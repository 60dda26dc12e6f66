"""The prefill scheduler in simulated time: whose turn it is."""

from collections.abc import Callable, Collection

import pytest

from baton.errors import InvalidRequest, Overloaded
from prefill_svc.scheduler import BURST_S, PATIENCE_S, PREPARED_AHEAD, PrefillScheduler, PromptStage, ScheduledJob
from tests.unit.prefill_svc.scheduling import admit_ready, scheduler


def allocate(
    s: PrefillScheduler,
    now: float,
    fits: Callable[[ScheduledJob], bool] = lambda _: True,
    deferred: Collection[ScheduledJob] = (),
    loads: bool = False,
) -> list[ScheduledJob]:
    """One round: allocate to all whose turn it is, and whose pages are free; those that got theirs."""
    allocated, refused = [], set()
    while (prompt := s.next_allocation(now, deferred, refused)) is not None:
        if fits(prompt):
            s.record_allocation(prompt, prompt.covered_tokens, needs_load=loads)
            allocated.append(prompt)
        else:
            s.mark_refused(prompt, now)
            refused.add(prompt)
    return allocated


@pytest.fixture
def s() -> PrefillScheduler:
    return scheduler()


def test_a_short_prompt_overtakes_at_the_chunk_boundary(s: PrefillScheduler) -> None:
    long = admit_ready(s, 1_000)
    assert s.next_chunk() == (long, 100)
    s.finish_chunk(long, 100, 0.1)
    short = admit_ready(s, 50)
    assert s.next_chunk() == (short, 50)
    s.finish_chunk(short, 50, 0.05)
    s.remove(short)
    assert s.next_chunk() == (long, 200)


def test_only_the_last_chunk_of_a_shorter_prompt_whose_turn_it_is_preempts_one(s: PrefillScheduler) -> None:
    long = admit_ready(s, 1_000)
    s.start_chunk(long)
    assert s.next_chunk(long) is None
    several_chunks = admit_ready(s, 101)
    assert s.next_chunk(long) is None
    s.remove(several_chunks)
    short = admit_ready(s, 100)
    assert s.next_chunk(long) == (short, 100)
    s.start_chunk(short)
    assert s.next_chunk(long) is None, "it is computed already"
    s.remove(short)
    s.remove(long)

    brief = admit_ready(s, 50, tenant=b"a")
    s.charge(brief, 2 * BURST_S)
    s.start_chunk(brief)
    longer = admit_ready(s, 60, tenant=b"b")
    assert s.next_chunk(brief) is None, "it is b's turn, but it would gain less than a loses"
    s.remove(longer)
    shorter = admit_ready(s, 40, tenant=b"b")
    assert s.next_chunk(brief) == (shorter, 40)
    s.remove(shorter)

    mine = admit_ready(s, 1_000, tenant=b"a")
    s.remove(brief)
    s.start_chunk(mine)
    other = admit_ready(s, 1_000, tenant=b"c")
    s.charge(other, 3 * BURST_S)
    s.remove(other)
    greedy = admit_ready(s, 40, tenant=b"c")
    assert s.next_chunk(mine) is None, "c had more than its share"
    s.remove(greedy)


def test_remaining_counts_not_length(s: PrefillScheduler) -> None:
    cached = admit_ready(s, 1_000, done=960)
    admit_ready(s, 50)
    assert s.next_chunk() == (cached, 1_000)


def test_equals_go_in_order_of_arrival(s: PrefillScheduler) -> None:
    entries = [admit_ready(s, 50) for _ in range(3)]
    for prompt in entries:
        assert s.next_chunk() == (prompt, 50)
        s.remove(prompt)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_long_prompt_is_held_up_by_at_most_about_ten_times_its_time(s: PrefillScheduler, aborted: bool) -> None:
    """Also by prompts that are cancelled in their first chunk."""
    long, now, rate = admit_ready(s, 1_000), 0.0, 1_000.0
    while long.remaining:
        assert now < 13 * 1_000 / rate, "starved"
        fresh = admit_ready(s, 10)
        prompt, end = s.next_chunk() or (fresh, 0)
        seconds = (end - prompt.covered_tokens) / rate
        s.charge(prompt, seconds)
        if prompt is long or not aborted:
            s.finish_chunk(prompt, end, seconds)
        now += seconds
        for done in (fresh, prompt):
            if done is not long:
                s.remove(done)
    assert now > 5 * 1_000 / rate, "short ones did go first"


def test_waiting_for_earlier_prompts_earns_nothing() -> None:
    """Or a queue of long prompts would soon go before every short one."""
    s = scheduler(chunk=1_000)
    queue = [admit_ready(s, 1_000) for _ in range(12)]
    for prompt in queue[:11]:
        assert s.next_chunk() == (prompt, 1_000)
        s.charge(prompt, 1.0)
        s.finish_chunk(prompt, 1_000, 1.0)
        s.remove(prompt)
    short = admit_ready(s, 50)
    assert s.next_chunk() == (short, 50)


def run(s: PrefillScheduler) -> ScheduledJob:
    """Compute the next chunk on a machine that computes 1,000 tokens/s; its prompt."""
    prompt, end = s.next_chunk() or pytest.fail("no prompt is ready")
    took = (end - prompt.covered_tokens) / 1_000
    s.charge(prompt, took)
    s.finish_chunk(prompt, end, took)
    if not prompt.remaining:
        s.remove(prompt)
    return prompt


def test_prompts_of_a_tenant_delay_those_of_another_by_a_chunk_only(s: PrefillScheduler) -> None:
    flood = [admit_ready(s, 100, tenant=b"a") for _ in range(4)]
    assert run(s) is flood[0]
    other = admit_ready(s, 100, tenant=b"b")
    assert [run(s) for _ in range(4)] == [other, *flood[1:]]
    flood = [admit_ready(s, 100, tenant=b"a") for _ in range(4)]
    other = admit_ready(s, 100, tenant=b"b")
    assert [run(s) for _ in range(5)] == [flood[0], other, *flood[1:]]


def test_a_prompt_that_a_tenant_overtook_earns_no_credit_against_it(s: PrefillScheduler) -> None:
    """A long prompt of one tenant gets half of the engine at least, and none of it in advance of short ones."""
    long = admit_ready(s, 4_000, tenant=b"a")
    run(s)
    order = []
    while long.remaining > 100:
        short = admit_ready(s, 50, tenant=b"b")
        assert run(s) is short, "it waited for more than the chunk before it"
        order.append(run(s))
    assert set(order) == {long}


def test_a_tenant_with_long_prompts_gets_its_share() -> None:
    """Others ask for all of the engine and more."""
    s, served = scheduler(), {b"a": 0.0, b"b": 0.0}
    long = admit_ready(s, 4_000, tenant=b"a")
    for _ in range(8):
        admit_ready(s, 50, tenant=b"b")
    while long.remaining:
        prompt = run(s)
        served[prompt.tenant] += 0.05 if prompt is not long else 0.1
        if prompt is not long:
            admit_ready(s, 50, tenant=b"b")
    assert served[b"b"] < 2 * 4.0 + 0.2, "it was held up for longer than twice its own time"


def test_a_tenant_that_sends_one_prompt_after_another_takes_turns(s: PrefillScheduler) -> None:
    long = admit_ready(s, 4_000, tenant=b"a")
    shorts = 0
    while long.remaining:
        short = admit_ready(s, 100, tenant=b"b")
        while short.remaining and long.remaining:
            shorts += run(s) is short
    assert shorts <= 4_000 / 100 + BURST_S / 0.1, "the long prompt had less than its share"


def test_a_tenant_below_its_share_may_send_several_at_once(s: PrefillScheduler) -> None:
    flood = admit_ready(s, 10_000, tenant=b"a")
    for _ in range(40):
        run(s)
    assert flood.remaining
    burst = [admit_ready(s, 100, tenant=b"b") for _ in range(19)]
    assert [run(s) for _ in burst] == burst, "it had saved more than this"
    more = [admit_ready(s, 100, tenant=b"b") for _ in range(10)]
    assert [run(s) for _ in range(10)].count(flood) in (4, 5), "it must take turns now"
    assert any(prompt.remaining for prompt in more)


def test_a_tenant_that_uses_little_saves_no_share_for_new_tenants() -> None:
    s = scheduler(pages=20_000)
    admit_ready(s, 90_000, tenant=b"heavy")
    for _ in range(100):
        admit_ready(s, 10, tenant=b"light")
        run(s), run(s)
    admit_ready(s, 90_000, tenant=b"new")
    turns = [run(s).tenant for _ in range(60)]
    assert turns.index(b"heavy") <= (BURST_S + 0.2) / 0.1
    assert turns[-20:].count(b"heavy") == 10, "they must take turns"


def test_all_begin_anew_when_no_prompt_is_left(s: PrefillScheduler) -> None:
    for tenant in range(100):
        admit_ready(s, 100, tenant=b"%d" % tenant)
        run(s)
    first, second = admit_ready(s, 200, tenant=b"0"), admit_ready(s, 200, tenant=b"new")
    assert [run(s) for _ in range(4)] == [first, second, first, second]


def test_only_a_few_are_prepared_ahead(s: PrefillScheduler) -> None:
    entries = [s.admit(tokens) for tokens in (400, 300, 200, 100)]
    assert allocate(s, 0.0) == [], "no hit is known yet"
    for prompt in entries:
        s.finish_lookup(prompt, 0)
    assert allocate(s, 0.0) == [entries[3], entries[2]]
    assert allocate(s, 0.0) == []
    s.make_ready(entries[3], 0)
    assert allocate(s, 0.0) == [], "READY but not begun is still ahead"
    s.finish_chunk(entries[3], 100, 0.1)
    assert allocate(s, 0.1) == [entries[1]]
    assert PREPARED_AHEAD == 2


def test_prompts_that_load_hold_up_only_others_that_load(s: PrefillScheduler) -> None:
    slow = [s.admit(tokens, b"a") for tokens in (900, 910, 920)]
    for prompt in slow:
        s.finish_lookup(prompt, 890, needs_load=True)
    assert allocate(s, 0.0, loads=True) == slow[:2]
    others = [s.admit(tokens, b"b") for tokens in (500, 510, 520)]
    for prompt in others:
        s.finish_lookup(prompt, 0)
    assert allocate(s, 0.0) == others[:2]
    s.make_ready(slow[0], 890)
    assert allocate(s, 0.0) == [], "it is prepared now as the others are"


def test_small_prompts_overtake_one_without_pages_until_its_patience_ends(s: PrefillScheduler) -> None:
    big = s.admit(50)
    s.finish_lookup(big, 0)
    assert allocate(s, 0.0, lambda prompt: prompt is not big) == []
    small = s.admit(60)
    s.finish_lookup(small, 0)
    assert allocate(s, 0.1, lambda prompt: prompt is not big) == [small]
    late = s.admit(10)
    s.finish_lookup(late, 0)
    assert allocate(s, PATIENCE_S, lambda prompt: prompt is not big) == [], "none before the starved one"
    assert allocate(s, PATIENCE_S) == [big, late]
    assert late.stage is PromptStage.LOADING


def test_blocks_in_pages_count_more_than_expected_ones(s: PrefillScheduler) -> None:
    grown, shrunk = s.admit(1_000), s.admit(1_000)
    s.finish_lookup(grown, 100)
    s.finish_lookup(shrunk, 500)
    found = {grown: 800, shrunk: 0}

    for prompt in (shrunk, grown):
        assert s.next_allocation(0.0) is prompt
        s.record_allocation(prompt, found[prompt])
    assert s.pending_tokens == 1_200
    for prompt, cached in found.items():
        s.make_ready(prompt, cached)
    assert s.next_chunk() == (grown, 900)


def test_one_that_waits_for_another_is_passed_over_and_loses_no_pages_to_patience(s: PrefillScheduler) -> None:
    follower, other, third = s.admit(50), s.admit(60), s.admit(70)
    for prompt in (follower, other, third):
        s.finish_lookup(prompt, 0)
    assert allocate(s, 0.0, lambda prompt: False) == []
    assert allocate(s, PATIENCE_S, deferred={follower}) == [other, third], "in the order of arrival"
    s.make_ready(other, 0)
    s.finish_chunk(other, 60, 0.1)
    s.remove(other)
    assert allocate(s, PATIENCE_S) == [follower]


def test_refusals_name_both_numbers() -> None:
    s = scheduler(pages=4, max_model_len=1_000)
    with pytest.raises(InvalidRequest, match=r"need 5 pages, .* has 4, .* got 65"):
        s.admit(65)
    with pytest.raises(InvalidRequest, match=r"1000, got 1000"):
        s.admit(1_000)
    assert s.admit(64).pages == 4


def test_waiting_is_bounded_and_tells_when_to_retry() -> None:
    s = scheduler(max_waiting=2)
    first, _ = admit_ready(s, 1_000), admit_ready(s, 3_000)
    with pytest.raises(Overloaded, match="2 prompts are waiting, the limit is 2") as caught:
        s.admit(1)
    assert caught.value.retry_after == 4.0
    s.finish_chunk(first, 500, 5.0)
    assert (s.waiting, s.pending_tokens) == (1, 3_500)
    admit_ready(s, 10)
    with pytest.raises(Overloaded) as caught:
        s.admit(1)
    assert caught.value.retry_after == pytest.approx(35.1)
