"""Prompts from a file: JSON lines, each with a prompt and the settings of its request.

    {"text": "Once upon a time", "max_tokens": 32}
    {"token_ids": [1, 2, 3], "cache_salt": "a"}

Files of other load generators work too: `prompt` (a text, or token ids as in OpenAI's API) means `text` or `token_ids`,
`prompt_token_ids` means `token_ids`, and `output_tokens` means `max_tokens`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.load.workload import Job, Lengths
from baton.errors import InvalidRequest, preview
from baton.rpc import calls

_TEXT, _IDS = "a text", "a list of token ids"
_PROMPT = {"text": (_TEXT,), "prompt": (_TEXT, _IDS), "token_ids": (_IDS,), "prompt_token_ids": (_IDS,)}
_TOKENS = ("max_tokens", "output_tokens")
_FIELDS = (*_PROMPT, *_TOKENS, "cache_salt")
_WARM_WORDS = 64


class PromptFileError(ValueError):
    """A line that can't be sent; the message names the line, the field, and the value seen."""


@dataclass(frozen=True, slots=True)
class Line:
    """The prompt of line `number`, as text or token ids; `output_tokens` is None if the line has no length."""

    number: int
    prompt: Sequence[int] | str
    output_tokens: int | None
    cache_salt: str


def read(path: Path) -> list[Line]:
    """The prompts of a file in order, without empty lines. Raises PromptFileError, OSError, UnicodeDecodeError."""
    # Not `splitlines`: strings may contain other characters that Unicode treats as the end of a line.
    texts = path.read_bytes().decode("utf-8").split("\n")
    lines = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                lines.append(_line(number, text))
            except InvalidRequest as error:
                raise PromptFileError(f"line {number}: {error}") from None
    if not lines:
        raise PromptFileError("holds no prompt")
    return lines


def prompt_jobs(
    lines: Sequence[Line], seed: str, outputs: Lengths, due: Iterable[float] | None = None
) -> Iterator[Job]:
    """Requests for the prompts in their order, repeated without end; lines without a length get a random one."""
    draw = random.Random(f"{seed}/lengths")
    for at_s, line in zip(itertools.repeat(None) if due is None else due, itertools.cycle(lines), strict=False):
        yield Job(line.prompt, line.output_tokens or outputs.draw(draw), at_s, line.cache_salt)


def find_unknown_token(lines: Iterable[Line], vocab_size: int) -> str | None:
    """The error of the first line with a token id that the model does not have; None if there is none."""
    for line in lines:
        if not isinstance(line.prompt, str) and (most := max(line.prompt)) >= vocab_size:
            return f"line {line.number}: token id {most} must be below {vocab_size}, the model's vocabulary"
    return None


def random_texts(seed: str, outputs: Lengths) -> Iterator[Job]:
    """Requests for texts that are in no file, without end. A cache learns none of the file's prompts from them."""
    draw = random.Random(seed)
    while True:
        words = " ".join(f"{draw.randrange(1 << 32):x}" for _ in range(_WARM_WORDS))
        yield Job(words, outputs.draw(draw))


def _line(number: int, text: str) -> Line:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("prompt", f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("prompt", f"must be an object, got {preview(values)}")
    if unknown := values.keys() - set(_FIELDS):
        raise InvalidRequest(min(unknown), f"unknown field; known are {', '.join(_FIELDS)}")
    name, prompt = _only(values, tuple(_PROMPT), f"must have one of {', '.join(_PROMPT)}")
    if not prompt or _kind(prompt) not in _PROMPT[name]:
        raise InvalidRequest(name, f"must be {' or '.join(_PROMPT[name])} that is not empty, got {preview(prompt)}")
    name, tokens = _only(values, _TOKENS, f"may have one of {', '.join(_TOKENS)}", at_least=0)
    if name and (type(tokens) is not int or tokens < 1):
        raise InvalidRequest(name, f"must be a whole number of at least 1, got {preview(tokens)}")
    salt = values.get("cache_salt", "")
    # As a client checks what it sends.
    calls.generate_request("", prompt, {"max_tokens": tokens}, cache_salt=salt)
    return Line(number, prompt, tokens, salt)


def _kind(prompt: Any) -> str | None:
    if isinstance(prompt, list):
        # Not true and false, which are numbers to Python.
        return _IDS if all(type(each) is int for each in prompt) else None
    return _TEXT if isinstance(prompt, str) else None


def _only(values: dict[str, Any], names: Sequence[str], problem: str, at_least: int = 1) -> tuple[str, Any]:
    """Name from `names` that a line has, and its value; an empty name if it has none and may have none."""
    found = [name for name in names if name in values]
    if not at_least <= len(found) <= 1:
        raise InvalidRequest("prompt", f"{problem}, got {', '.join(found) or 'none'}")
    return (found[0], values[found[0]]) if found else ("", None)
