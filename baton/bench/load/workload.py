"""The requests of a run: prompts of random token ids, drawn from a seed, or of a file; and the times when they are due.

The same workload and seed give the same prompts for every server and every kind of arrival, because arrivals, lengths
and ids are drawn separately. A server with a prefix cache has them from the last run with this seed.

A file has JSON lines, each with a prompt and the settings of its request:

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

from baton.errors import InvalidRequest, preview
from baton.rpc import calls

_TEXT, _IDS = "a text", "a list of token ids"
_PROMPT = {"text": (_TEXT,), "prompt": (_TEXT, _IDS), "token_ids": (_IDS,), "prompt_token_ids": (_IDS,)}
_TOKENS = ("max_tokens", "output_tokens")
_FIELDS = (*_PROMPT, *_TOKENS, "cache_salt")
_WARM_WORDS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One request; `at_s` is the time when it is due, from the start of the run; None in a closed loop.

    The prompt is token ids, or text. Only requests with the same `cache_salt` share cached KV.
    """

    prompt: Sequence[int] | str
    output_tokens: int
    at_s: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """Prefixes that prompts share: `groups` of them, each of `tokens` tokens, before the rest of a prompt."""

    tokens: int
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from `low` to `high`, each equally often; `text` is their description."""

    text: str
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """A random length."""
        return source.randint(self.low, self.high)


def lengths(text: str) -> Lengths:
    """Lengths from the command line: N, or uniform:LOW:HIGH. Raises ValueError that says what is wrong."""
    kind, *values = text.split(":")
    if (kind == "uniform" and len(values) != 2) or (kind != "uniform" and values):
        raise ValueError("must be N or uniform:LOW:HIGH")
    low, high = map(_count, values or (kind, kind))
    if low > high:
        raise ValueError(f"the lower bound {low} is greater than the upper bound {high}")
    return Lengths(text, low, high)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ValueError(f"must be a number of tokens of at least 1, got {text!r}")
    return int(text)


class Prompts:
    """Random prompts of token ids below `vocab_size`; with `shared`, each begins with the prefix of a random group."""

    def __init__(self, seed: str, vocab_size: int, shared: Shared | None = None) -> None:
        self._draw = random.Random(f"{seed}/prompts")
        self._seed = seed
        self._vocabulary = range(vocab_size)
        self._prefixes = (
            [self._named(f"group/{group}", shared.tokens) for group in range(shared.groups)] if shared else []
        )

    def of(self, tokens: int) -> list[int]:
        """A prompt that ends with `tokens` random ids; the prefix of its group, if any, comes before them."""
        own = self._draw.choices(self._vocabulary, k=tokens)
        return [*self._draw.choice(self._prefixes), *own] if self._prefixes else own

    def _named(self, name: str, tokens: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(self._vocabulary, k=tokens)


def poisson(rate: float, draw: random.Random) -> Iterator[float]:
    """Times in seconds of a Poisson process without end: `rate` requests per second on average, the first not at 0."""
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


def random_jobs(
    prompts: Prompts, seed: str, inputs: Lengths, outputs: Lengths, due: Iterable[float] | None = None
) -> Iterator[Job]:
    """Endless requests of random lengths without times; with `due`, one request at each of its times."""
    draw = random.Random(f"{seed}/lengths")
    for at_s in itertools.repeat(None) if due is None else due:
        own, output = inputs.draw(draw), outputs.draw(draw)
        yield Job(prompts.of(own), output, at_s)


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
    """Endless requests with random texts, for warming up: they put no prompts of the file into a cache."""
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
    """The one of `names` that a line has, and its value; the name is empty if the line may and does have none."""
    found = [name for name in names if name in values]
    if not at_least <= len(found) <= 1:
        raise InvalidRequest("prompt", f"{problem}, got {', '.join(found) or 'none'}")
    return (found[0], values[found[0]]) if found else ("", None)
