"""Prompts from a file: what a line may say, what is refused and how it is named, and the requests that come of it."""

import itertools
from pathlib import Path

import pytest

from baton.bench.load.prompt_file import Line, PromptFileError, find_unknown_token, prompt_jobs, random_texts, read
from baton.bench.load.workload import lengths


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_of_every_form(tmp_path: Path) -> None:
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
        ('{"text": [1]}', "text: must be a text that is not empty, got [1]"),
        ('{"token_ids": "a"}', "token_ids: must be a list of token ids that is not empty, got 'a'"),
        ('{"prompt": [1, true]}', "prompt: must be a text or a list of token ids that is not empty, got [1, True]"),
        ('{"prompt": [1, -2]}', "prompt[1]: must be in [0, 4294967296), got -2"),
        ('{"text": "a", "max_token": 3}', "max_token: unknown field; known are text"),
        ('{"text": "a", "max_tokens": 0}', "max_tokens: must be a whole number of at least 1, got 0"),
        ('{"text": "a", "output_tokens": true}', "output_tokens: must be a whole number of at least 1, got True"),
        ('{"text": "a", "output_tokens": 1, "max_tokens": 1}', "may have one of max_tokens, output_tokens"),
        ('{"text": "a", "cache_salt": 3}', "cache_salt: must be text, got 3"),
    ],
)
def test_what_can_not_be_asked_is_refused_with_its_line(line: str, words: str, tmp_path: Path) -> None:
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
