"""The prefill scheduler in simulated time."""

from collections.abc import Callable, Collection

import pytest

from baton.engine.contract import EngineSpec
from baton.errors import InvalidRequest, Overloaded
from baton.kv.format import KvFormat, KvPart
from prefill_svc.scheduler import BURST_S, PATIENCE_S, PREPARED_AHEAD, PrefillScheduler, Prompt, Stage, chunk_size

FORMAT = KvFormat((KvPart("k", "float32", (1, 2)),), layers=1, block_size=16)


def scheduler(
    pages: int = 1000, chunk: int = 100, max_waiting: int = 64, max_model_len: int = 100_000, **spec: int
) -> PrefillScheduler:
    made = EngineSpec("m", FORMAT, 1000, max_model_len, frozenset(), 16, pages, 0, **spec)
    return PrefillScheduler(made, chunk, max_waiting)


def allocate(
    s: PrefillScheduler,
    now: float,
    fits: Callable[[Prompt], bool] = lambda _: True,
    deferred: Collection[Prompt] = (),
) -> list[Prompt]:
    """One round: allocate to all whose turn it is, and whose pages are free; those that got theirs."""
    allocated, refused = [], set()
    while (prompt := s.next_allocation(now, deferred, refused)) is not None:
        if fits(prompt):
            s.allocate(prompt, prompt.done)
            allocated.append(prompt)
        else:
            s.mark_refused(prompt, now)
            refused.add(prompt)
    return allocated


def admit_ready(s: PrefillScheduler, tokens: int, done: int = 0, tenant: bytes = b"") -> Prompt:
    prompt = s.admit(tokens, tenant)
    s.await_pages(prompt, done)
    s.make_ready(prompt, done)
    return prompt


@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        (1, 1), (31_999, 31_999), (32_000, 16_384), (127_999, 16_384), (128_000, 8_192), (511_999, 8_192),
        (512_000, 4_096), (2_000_000, 4_096),
    ],
)  # fmt: skip
def test_automatic_chunk_sizes(tokens: int, size: int) -> None:
    assert chunk_size(tokens, 0, 1e9) == size
    assert chunk_size(tokens, 0, 0.0) == min(size, 500), "nothing is known of the machine yet"
    assert chunk_size(tokens, 7, 1.0) == 7, "a configured size is taken as it is"


def test_automatic_chunks_are_capped_by_the_rate() -> None:
    assert chunk_size(10_000, 0, 1_000.0) == 500
    assert chunk_size(600_000, 0, 10_000.0) == 4_096
    assert chunk_size(600_000, 0, 8_000.0) == 4_000
    assert chunk_size(10, 0, 0.001) == 10
    # Copies from host memory: never below the chunk that hides them.
    assert chunk_size(10**6, 0, 1_000.0, 4_498) == 4_498
    assert chunk_size(10**6, 0, 1e9, 1_652) == 16_384
    assert chunk_size(3_000, 0, 1_000.0, 4_498) == 3_000
    assert chunk_size(10**6, 0, 1e9, 18_000) == 18_000
    assert chunk_size(50_000, 0, 1_000.0, 18_000) == 18_000
    assert chunk_size(10**6, 7, 1_000.0, 4_498) == 7


def test_automatic_chunks_are_never_too_short_to_be_quick_or_to_tell_the_rate() -> None:
    assert chunk_size(10_000, 0, 60.0) == 256
    assert chunk_size(10_000, 0, 20.0) == 100, "256 tokens would take 13 s"
    assert chunk_size(10_000, 0, 0.001) == 64


def compute(s: PrefillScheduler, tokens: int, done: int = 0, overhead: float = 0.05) -> list[int]:
    """Chunk sizes of one prompt on a machine that computes 1,000 tokens/s beside an overhead for each chunk."""
    prompt, sizes = admit_ready(s, tokens, done=done), []
    while prompt.remaining:
        prompt, end = s.next_chunk() or (prompt, 0)
        sizes.append(end - prompt.done)
        s.finish_chunk(prompt, end, overhead + sizes[-1] / 1_000)
    s.remove(prompt)
    return sizes


def test_short_chunks_do_not_make_the_worker_seem_slow() -> None:
    s = scheduler(chunk=0)
    assert compute(s, 3) == [3]
    assert s.rate.value == 0, "mostly overhead"
    assert compute(s, 2_000)[0] == 500
    rate = s.rate.value
    for _ in range(30):
        compute(s, 2_000, done=1_999)
    assert s.rate.value == rate
    assert compute(s, 2_000)[0] == int(rate * 0.5)


def test_chunks_do_not_dwindle_where_one_alone_takes_longer_than_its_share() -> None:
    s = scheduler(chunk=0)
    for _ in range(5):
        sizes = compute(s, 2_000, overhead=0.6)
    assert min(sizes[:-1]) >= 256


@pytest.mark.parametrize("overhead", [0.05, 0.4, 1.0])
def test_chunks_recover_from_a_slow_spell(overhead: float) -> None:
    """However slow it was, and also where a chunk takes longer than its share by its overhead alone."""
    fresh = scheduler(chunk=0)
    usual = [compute(fresh, 4_000, overhead=overhead) for _ in range(5)][-1][0]
    s = scheduler(chunk=0)
    for slow in (3.0, 30.0, 300.0):
        compute(s, 4_000, overhead=slow)
    assert s.rate.value < 1
    sizes = [size for _ in range(5) for size in compute(s, 4_000, overhead=overhead)[:-1]]
    assert sizes[0] == 64
    assert sizes[-1] >= 0.9 * usual >= 230


def test_a_chunk_that_was_slow_once_is_forgotten() -> None:
    s = scheduler(chunk=0)
    compute(s, 100, overhead=10.0)
    assert s.rate.value < 10
    for _ in range(5):
        sizes = compute(s, 2_000)
    assert sizes[0] > 300


def test_a_short_prompt_overtakes_at_the_chunk_boundary() -> None:
    s = scheduler()
    long = admit_ready(s, 1_000)
    assert s.next_chunk() == (long, 100)
    s.finish_chunk(long, 100, 0.1)
    short = admit_ready(s, 50)
    assert s.next_chunk() == (short, 50)
    s.finish_chunk(short, 50, 0.05)
    s.remove(short)
    assert s.next_chunk() == (long, 200)


def test_only_the_last_chunk_of_a_shorter_prompt_whose_turn_it_is_preempts_one() -> None:
    s = scheduler()
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


def test_remaining_counts_not_length() -> None:
    s = scheduler()
    cached = admit_ready(s, 1_000, done=960)
    admit_ready(s, 50)
    assert s.next_chunk() == (cached, 1_000)


def test_equals_go_in_order_of_arrival() -> None:
    s = scheduler()
    entries = [admit_ready(s, 50) for _ in range(3)]
    for prompt in entries:
        assert s.next_chunk() == (prompt, 50)
        s.remove(prompt)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_long_prompt_is_held_up_by_at_most_about_ten_times_its_time(aborted: bool) -> None:
    """Also by prompts that are cancelled in their first chunk."""
    s = scheduler()
    long, now, rate = admit_ready(s, 1_000), 0.0, 1_000.0
    while long.remaining:
        assert now < 13 * 1_000 / rate, "starved"
        fresh = admit_ready(s, 10)
        prompt, end = s.next_chunk() or (fresh, 0)
        seconds = (end - prompt.done) / rate
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


def run(s: PrefillScheduler) -> Prompt:
    """Compute the next chunk on a machine that computes 1,000 tokens/s; its prompt."""
    prompt, end = s.next_chunk() or pytest.fail("no prompt is ready")
    took = (end - prompt.done) / 1_000
    s.charge(prompt, took)
    s.finish_chunk(prompt, end, took)
    if not prompt.remaining:
        s.remove(prompt)
    return prompt


def test_prompts_of_a_tenant_delay_those_of_another_by_a_chunk_only() -> None:
    s = scheduler()
    flood = [admit_ready(s, 100, tenant=b"a") for _ in range(4)]
    assert run(s) is flood[0]
    other = admit_ready(s, 100, tenant=b"b")
    assert [run(s) for _ in range(4)] == [other, *flood[1:]]
    flood = [admit_ready(s, 100, tenant=b"a") for _ in range(4)]
    other = admit_ready(s, 100, tenant=b"b")
    assert [run(s) for _ in range(5)] == [flood[0], other, *flood[1:]]


def test_what_a_tenant_overtook_earns_no_credit_against_it() -> None:
    """A long prompt of one tenant gets half of the engine at least, and none of it in advance of short ones."""
    s = scheduler()
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


def test_a_tenant_that_sends_one_prompt_after_another_takes_turns() -> None:
    s = scheduler()
    long = admit_ready(s, 4_000, tenant=b"a")
    shorts = 0
    while long.remaining:
        short = admit_ready(s, 100, tenant=b"b")
        while short.remaining and long.remaining:
            shorts += run(s) is short
    assert shorts <= 4_000 / 100 + BURST_S / 0.1, "the long prompt had less than its share"


def test_a_tenant_below_its_share_may_send_several_at_once() -> None:
    s = scheduler()
    flood = admit_ready(s, 10_000, tenant=b"a")
    for _ in range(40):
        run(s)
    assert flood.remaining
    burst = [admit_ready(s, 100, tenant=b"b") for _ in range(19)]
    assert [run(s) for _ in burst] == burst, "it had saved more than this"
    more = [admit_ready(s, 100, tenant=b"b") for _ in range(10)]
    assert [run(s) for _ in range(10)].count(flood) in (4, 5), "it must take turns now"
    assert any(prompt.remaining for prompt in more)


def test_a_tenant_that_uses_little_saves_no_share_for_newcomers() -> None:
    s = scheduler(pages=20_000)
    admit_ready(s, 90_000, tenant=b"heavy")
    for _ in range(100):
        admit_ready(s, 10, tenant=b"light")
        run(s), run(s)
    admit_ready(s, 90_000, tenant=b"new")
    turns = [run(s).tenant for _ in range(60)]
    assert turns.index(b"heavy") <= (BURST_S + 0.2) / 0.1
    assert turns[-20:].count(b"heavy") == 10, "they must take turns"


def test_all_begin_anew_when_no_prompt_is_left() -> None:
    s = scheduler()
    for tenant in range(100):
        admit_ready(s, 100, tenant=b"%d" % tenant)
        run(s)
    first, second = admit_ready(s, 200, tenant=b"0"), admit_ready(s, 200, tenant=b"new")
    assert [run(s) for _ in range(4)] == [first, second, first, second]


def test_only_a_few_are_prepared_ahead() -> None:
    s = scheduler()
    entries = [s.admit(tokens) for tokens in (400, 300, 200, 100)]
    assert allocate(s, 0.0) == [], "no hit is known yet"
    for prompt in entries:
        s.await_pages(prompt, 0)
    assert allocate(s, 0.0) == [entries[3], entries[2]]
    assert allocate(s, 0.0) == []
    s.make_ready(entries[3], 0)
    assert allocate(s, 0.0) == [], "READY but not begun is still ahead"
    s.finish_chunk(entries[3], 100, 0.1)
    assert allocate(s, 0.1) == [entries[1]]
    assert PREPARED_AHEAD == 2


def test_small_ones_pass_one_without_pages_until_its_patience_ends() -> None:
    s = scheduler()
    big = s.admit(50)
    s.await_pages(big, 0)
    assert allocate(s, 0.0, lambda prompt: prompt is not big) == []
    small = s.admit(60)
    s.await_pages(small, 0)
    assert allocate(s, 0.1, lambda prompt: prompt is not big) == [small]
    late = s.admit(10)
    s.await_pages(late, 0)
    assert allocate(s, PATIENCE_S, lambda prompt: prompt is not big) == [], "none before the starved one"
    assert allocate(s, PATIENCE_S) == [big, late]
    assert late.stage is Stage.LOADING


def test_chunks_hide_copies_for_a_prompt_that_has_pages_in_host_memory() -> None:
    s = scheduler(pages=300, host_pages=200, chunk=0, hiding_chunk=900)
    s.rate.add(1_000, 1.0)
    # A short one too: it may share a prefix that is there.
    for tokens, in_host, end in ((1_500, False, 500), (1_500, True, 900), (3_000, True, 900), (800, True, 800)):
        prompt = s.admit(tokens)
        s.await_pages(prompt, 0)
        s.allocate(prompt, 0, in_host=in_host)
        s.make_ready(prompt, 0)
        assert s.next_chunk() == (prompt, end)
        s.remove(prompt)


def test_what_the_pages_hold_counts_more_than_what_was_expected() -> None:
    s = scheduler()
    grown, shrunk = s.admit(1_000), s.admit(1_000)
    s.await_pages(grown, 100)
    s.await_pages(shrunk, 500)
    found = {grown: 800, shrunk: 0}

    for prompt in (shrunk, grown):
        assert s.next_allocation(0.0) is prompt
        s.allocate(prompt, found[prompt])
    assert s.pending_tokens == 1_200
    for prompt, cached in found.items():
        s.make_ready(prompt, cached)
    assert s.next_chunk() == (grown, 900)


def test_one_that_waits_for_another_is_passed_over_and_loses_no_pages_to_patience() -> None:
    s = scheduler()
    follower, other, third = s.admit(50), s.admit(60), s.admit(70)
    for prompt in (follower, other, third):
        s.await_pages(prompt, 0)
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
    with pytest.raises(Overloaded, match="2 prompts wait, at most 2 may") as caught:
        s.admit(1)
    assert caught.value.retry_after == 4.0
    s.finish_chunk(first, 500, 5.0)
    assert (s.waiting, s.pending_tokens) == (1, 3_500)
    admit_ready(s, 10)
    with pytest.raises(Overloaded) as caught:
        s.admit(1)
    assert caught.value.retry_after == pytest.approx(35.1)


def test_quick_short_prompts_do_not_lengthen_the_chunks_of_a_long_one() -> None:
    s = scheduler(pages=100_000, chunk=0, max_model_len=1_000_000)
    long = admit_ready(s, 900_000)
    chosen, end = s.next_chunk() or (None, 0)
    assert (chosen, end) == (long, 500), "nothing is known of the machine yet"
    s.start_chunk(long)
    s.finish_chunk(long, 500, 0.5)
    s.make_ready(long, 500)
    for _ in range(20):
        short = admit_ready(s, 200)
        assert s.next_chunk() == (short, 200)
        s.start_chunk(short)
        s.finish_chunk(short, 200, 0.01)
        s.remove(short)
    assert s.rate.value > 5_000
    assert s.next_chunk() == (long, 1_000)


def test_the_first_chunk_of_a_resumed_prompt_is_short() -> None:
    s = scheduler(pages=100_000, chunk=0, max_model_len=1_000_000)
    s.rate.add(100_000, 1.0)
    resumed = admit_ready(s, 900_000, done=800_000)
    assert s.next_chunk() == (resumed, 800_064)
    s.start_chunk(resumed)
    s.finish_chunk(resumed, 800_064, 0.0625)
    s.make_ready(resumed, 800_064)
    assert s.next_chunk() == (resumed, 800_064 + 512)
    fixed = scheduler(pages=100_000, chunk=1_000, max_model_len=1_000_000)
    resumed = admit_ready(fixed, 900_000, done=800_000)
    assert fixed.next_chunk() == (resumed, 801_000)
