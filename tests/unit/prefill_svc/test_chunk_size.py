"""Number of tokens that the prefill scheduler computes at a time."""

import pytest

from prefill_svc.scheduler import PrefillScheduler, chunk_size
from tests.unit.prefill_svc.scheduling import admit_ready, scheduler


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
        sizes.append(end - prompt.covered_tokens)
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


def test_chunks_hide_copies_for_a_prompt_that_has_pages_in_host_memory() -> None:
    s = scheduler(pages=300, host_pages=200, chunk=0, min_overlap_chunk=900)
    s.rate.add(1_000, 1.0)
    # A short one too: it may share a prefix that is there.
    for tokens, in_host, end in ((1_500, False, 500), (1_500, True, 900), (3_000, True, 900), (800, True, 800)):
        prompt = s.admit(tokens)
        s.finish_lookup(prompt, 0)
        s.record_allocation(prompt, 0, in_host=in_host)
        s.make_ready(prompt, 0)
        assert s.next_chunk() == (prompt, end)
        s.remove(prompt)


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
