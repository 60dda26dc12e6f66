"""Requests of a run, and their times: arrivals, lengths, prompts; all of it decided by the seed."""

import itertools
import random
import statistics

import pytest

from baton.bench.load.workload import Prompts, Shared, lengths, poisson, random_jobs


def test_poisson_arrivals_have_exponential_gaps_of_the_rate() -> None:
    times = list(itertools.islice(poisson(50.0, random.Random("a")), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0
    # The standard error of the mean of n exponential gaps is its mean / sqrt(n): 0.7%. Mean and deviation are equal.
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.04)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.012)


def draws(text: str, count: int = 4000) -> list[int]:
    source, distribution = random.Random(7), lengths(text)
    return [distribution.draw(source) for _ in range(count)]


def test_lengths_of_each_distribution() -> None:
    assert set(draws("256")) == {256}
    uniform = draws("uniform:3:6")
    assert [uniform.count(value) / len(uniform) for value in (3, 4, 5, 6)] == pytest.approx([0.25] * 4, abs=0.03)
    assert set(uniform) == {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1, got '0'"),
        ("-1", "at least 1, got '-1'"),
        ("many", "at least 1, got 'many'"),
        ("uniform:5", "must be N or uniform"),
        ("uniform:5:4", "the lower bound 5 is greater than the upper bound 4"),
        ("poisson:3", "must be N or uniform"),
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
