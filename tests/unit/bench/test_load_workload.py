"""Requests of a run, and their times: drawn from a seed, or read from a file."""

import itertools
import random
import statistics
from pathlib import Path

import pytest

from baton.bench.load.workload import (
    Line,
    PromptFileError,
    Prompts,
    Shared,
    find_unknown_token,
    lengths,
    poisson,
    prompt_jobs,
    random_jobs,
    random_texts,
    read,
)


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
        ("many", "at least 1, got 'many'"),
        ("uniform:5", "must be N or uniform"),
        ("uniform:5:4", "the lower bound 5 is greater than the upper bound 4"),
    ],
)
def test_invalid_distributions_are_refused(text: str, words: str) -> None:
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


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_workload_lines_of_all_forms_are_read(tmp_path: Path) -> None:
    text = """{"text": "a\u2028b", "max_tokens": 3}
{"prompt": "c"}

{"prompt": [1, 2], "cache_salt": "s"}
{"token_ids": [3], "output_tokens": 4}
{"prompt_token_ids": [5]}"""
    assert read(file(tmp_path, text)) == [
        Line(1, "a\u2028b", 3, ""),
        Line(2, "c", None, ""),
        Line(4, [1, 2], None, "s"),
        Line(5, [3], 4, ""),
        Line(6, [5], None, ""),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x", "prompt: is not JSON"),
        ("[1]", "prompt: must be an object, got [1]"),
        ("{}", "prompt: must have one of text, prompt, token_ids, prompt_token_ids, got none"),
        ('{"text": "a", "token_ids": [1]}', "got text, token_ids"),
        ('{"text": ""}', "text: must be a text that is not empty, got ''"),
        ('{"token_ids": "a"}', "token_ids: must be a list of token ids that is not empty, got 'a'"),
        ('{"prompt": [1, -2]}', "token_ids[1]: must be in [0, 4294967296), got -2"),
        ('{"text": "a", "max_token": 3}', "max_token: unknown field; known are text"),
        ('{"text": "a", "max_tokens": 0}', "max_tokens: must be a whole number of at least 1, got 0"),
        ('{"text": "a", "output_tokens": 1, "max_tokens": 1}', "may have one of max_tokens, output_tokens"),
        ('{"text": "a", "cache_salt": 3}', "cache_salt: must be text, got 3"),
    ],
)
def test_invalid_prompts_are_refused_with_their_line(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PromptFileError) as error:
        read(file(tmp_path, f'{{"text": "fine"}}\n\n{line}\n'))
    assert str(error.value).startswith("line 3: ")
    assert words in str(error.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="holds no prompt"):
        read(file(tmp_path, "\n"))


def test_prompts_are_asked_in_their_order_again_and_again() -> None:
    lines = [Line(1, "a", 7, "s"), Line(2, [1], None, "")]
    sent = list(itertools.islice(prompt_jobs(lines, "0", lengths("5")), 3))
    assert [(job.prompt, job.output_tokens, job.at_s, job.cache_salt) for job in sent] == [
        ("a", 7, None, "s"),
        ([1], 5, None, ""),
        ("a", 7, None, "s"),
    ]
    assert [job.at_s for job in prompt_jobs(lines, "0", lengths("5"), [0.5, 1.0])] == [0.5, 1.0]


def test_ids_that_the_model_does_not_know_are_named() -> None:
    lines = [Line(1, "a", None, ""), Line(4, [1, 9], None, "")]
    assert find_unknown_token(lines, 10) is None
    assert find_unknown_token(lines, 9) == "line 4: token id 9 must be below 9, the model's vocabulary"


def test_texts_to_warm_up_with_are_all_different() -> None:
    texts = [job.prompt for job in itertools.islice(random_texts("0/warmup", lengths("5")), 50)]
    assert len(set(map(str, texts))) == 50
