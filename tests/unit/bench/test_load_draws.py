"""What a run sends, and when: arrivals, lengths, prompts; all of it decided by the seed."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from baton.bench.load.lengths import lengths
from baton.bench.load.traces import MOONCAKE_BLOCK, Arrival
from baton.bench.load.workload import Prompts, Shared, poisson, random_jobs, replay, trace_jobs


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = list(itertools.islice(poisson(50.0, random.Random("a")), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0
    # The standard error of the mean of n exponential gaps is its mean / sqrt(n): 0.7%. Mean and deviation are equal.
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.04)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.012)


def test_a_trace_begins_at_once_in_order_and_at_the_speed_asked_for() -> None:
    trace = [Arrival(30.0, 5, 1, ()), Arrival(10.0, 7, 2, ()), Arrival(20.0, 9, 3, ())]
    assert [(each.at_s, each.input_tokens) for each in replay(trace, 4.0)] == [(0.0, 7), (2.5, 9), (5.0, 5)]
    assert replay([], 1.0) == []


def draws(text: str, count: int = 4000) -> list[int]:
    source, distribution = random.Random(7), lengths(text)
    return [distribution.draw(source) for _ in range(count)]


def test_lengths_of_each_distribution(tmp_path: Path) -> None:
    assert set(draws("256")) == {256}
    uniform = draws("uniform:3:6")
    assert [uniform.count(value) / len(uniform) for value in (3, 4, 5, 6)] == pytest.approx([0.25] * 4, abs=0.03)
    assert set(uniform) == {3, 4, 5, 6}
    long = draws("lognormal:200:0.5", 20_000)
    assert statistics.fmean(long) == pytest.approx(200, rel=0.02)
    # The median of a log-normal variable is its mean / exp(sigma² / 2).
    assert statistics.median(long) == pytest.approx(200 / 1.1331, rel=0.02)
    assert max(draws("lognormal:200:0.5:300")) == 300
    assert min(draws("lognormal:1:2")) == 1
    (tmp_path / "some").write_text("5\n9\n")
    assert set(draws(f"file:{tmp_path / 'some'}")) == {5, 9}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1, got '0'"),
        ("-1", "at least 1, got '-1'"),
        ("many", "at least 1, got 'many'"),
        ("uniform:5", "must be N, uniform"),
        ("uniform:5:4", "the lower bound 5 is greater than the upper bound 4"),
        ("lognormal:100", "must be N, uniform"),
        ("lognormal:100:nan", "sigma must be a number from 0 to 5, got 'nan'"),
        ("lognormal:100:-1", "sigma must be a number"),
        ("poisson:3", "must be N, uniform"),
        ("file:/nowhere", "can't be read"),
    ],
)
def test_what_is_no_distribution_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lengths(text)


def test_prompts_are_decided_by_the_seed_and_share_what_they_should() -> None:
    first, again, other = (Prompts(seed, 50, Shared(20, 3)) for seed in ("a", "a", "b"))
    some = [first.of(10) for _ in range(100)]
    assert some == [again.of(10) for _ in range(100)]
    assert {len(prompt) for prompt in some} == {30}
    assert {token for prompt in some for token in prompt} == set(range(50))
    prefixes = {tuple(prompt[:20]) for prompt in some}
    assert len(prefixes) == 3
    assert not prefixes & {tuple(other.of(10)[:20]) for _ in range(50)}
    assert len({tuple(prompt[20:]) for prompt in some}) == 100


def test_requests_have_lengths_and_times_of_their_own() -> None:
    def some(due: list[float] | None) -> list[tuple[int, int, float | None]]:
        jobs = random_jobs(Prompts("a", 9), "a", lengths("uniform:1:90"), lengths("uniform:1:90"), due)
        return [(len(job.prompt), job.output_tokens, job.at_s) for job in itertools.islice(jobs, 5)]

    timed, untimed = some([0.5, 1.0, 1.5]), some(None)
    assert [at_s for *_, at_s in timed] == [0.5, 1.0, 1.5]
    # The same requests, however they arrive.
    assert [each[:2] for each in untimed[:3]] == [each[:2] for each in timed]
    assert len(untimed) == 5


def test_requests_of_a_trace_share_the_blocks_that_it_says() -> None:
    trace = [Arrival(0.0, 2 * MOONCAKE_BLOCK + 7, 3, (1, 2)), Arrival(1.0, 2 * MOONCAKE_BLOCK + 7, 0, (1, 3))]
    one, other = trace_jobs(Prompts("a", 1000), trace)
    assert len(one.prompt) == len(other.prompt) == 2 * MOONCAKE_BLOCK + 7
    assert one.prompt[:MOONCAKE_BLOCK] == other.prompt[:MOONCAKE_BLOCK]
    assert one.prompt[MOONCAKE_BLOCK : 2 * MOONCAKE_BLOCK] != other.prompt[MOONCAKE_BLOCK : 2 * MOONCAKE_BLOCK]
    assert one.prompt[-7:] != other.prompt[-7:]
    assert (one.output_tokens, other.output_tokens) == (3, 1)
    assert (one.at_s, other.at_s) == (0.0, 1.0)
