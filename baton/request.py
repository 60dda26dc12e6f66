"""Requests and their results, in plain Python.

All parts of Baton use these types; they import neither torch nor grpc. Ranges are checked when a value is made, so that
a bad one can't exist. What depends on the model is checked by `SamplingParams.check_vocabulary`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidRequest

MAX_ID_LENGTH = 128
MAX_ADDRESS_LENGTH = 300
MAX_CHOICES = 64
MAX_CACHE_SALT_BYTES = 256
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MIN_REPETITION_PENALTY = 2**-10
"""Logits divided by it stay finite. It is a power of two, so the float32 of the wire represents it exactly."""


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token; `logprob` and `top` (best first) are natural logarithms under the unmodified model."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, and of the end of a choice; the same names and meanings as in vLLM.

    `max_tokens` None means as many as the model's length and the memory of the workers allow. `seed` None means that
    the router picks one. `logprobs` and `prompt_logprobs` are the number of alternatives reported with each token, None
    for no report.

    Raises InvalidRequest naming the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_in_output: bool = False

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        check_count("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        for i, text in enumerate(self.stop):
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"stop[{i}]", f"must have 1 to {MAX_STOP_LENGTH} characters", text)
        if (characters := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"may have at most {MAX_STOP_CHARACTERS} characters in all", characters)
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids")
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "entries")
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the choice of the next token depends on the tokens before it other than through their KV."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Raise InvalidRequest if the parameters do not fit the model.

        A token id lies outside the vocabulary, more tokens are allowed than it has, or none can be chosen because
        `min_tokens` bans all allowed ones.
        """
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_count("allowed_token_ids", len(self.allowed_token_ids), vocab_size, "token ids")
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for token_id, _ in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(f"logit_bias[{token_id}]", f"the token id must be in [0, {vocab_size})", token_id)
        ending = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.min_tokens and self.allowed_token_ids and ending.issuperset(self.allowed_token_ids):
            problem = f"all end the choice, and min_tokens ({self.min_tokens}) bans them"
            raise InvalidRequest("allowed_token_ids", problem, self.allowed_token_ids)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One choice as the sampler sees it: all sampling state is a pure function of these fields.

    When a worker gets it, `params.seed` and `params.max_tokens` are set. `output_ids` are the tokens chosen so far; the
    next token has output index `len(output_ids)`.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = field(default_factory=list)
    choice_index: int = 0

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled for one choice; `finish` is set if the choice ends with it."""

    choice_index: int
    token: TokenInfo
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Handoff:
    """Everything except the KV itself that decode needs to continue a request.

    The KV covers `prompt_ids + output_ids`; each choice continues with its first token, whose KV does not exist yet.
    """

    request_id: str
    attempt: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    first_tokens: tuple[FirstToken, ...]


def join_ids(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
    """All token ids of a sequence, in an array: a list of a million numbers would be freed one by one."""
    if not output_ids:
        return prompt_ids
    ids = array("I", prompt_ids)
    ids.extend(output_ids)
    return ids


class CachePolicy(enum.Enum):
    """A request's use of the prefix cache."""

    READ_WRITE = "read_write"
    READ = "read"
    WRITE = "write"
    OFF = "off"

    @property
    def reads(self) -> bool:
        """Whether cached KV may be used."""
        return self in (CachePolicy.READ_WRITE, CachePolicy.READ)

    @property
    def writes(self) -> bool:
        """Whether the request's KV may be cached for others."""
        return self in (CachePolicy.READ_WRITE, CachePolicy.WRITE)


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Number of tokens that were not computed, by where their KV came from; see inference.proto."""

    pool: int = 0
    host: int = 0
    redis: int = 0
    peer: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        """Number of tokens that prefill did not compute."""
        return self.pool + self.host + self.redis + self.peer


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The computed part of a prompt, as in inference.proto. Cached tokens are done."""

    tokens_done: int
    tokens_total: int
    tokens_per_second: float = 0.0
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `completion_tokens` is the sum over all choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cached: CachedTokens = CachedTokens()


@dataclass(frozen=True, slots=True)
class Timings:
    """The latency account in milliseconds: queue + prefill + transfer + slot_wait + decode = total."""

    queue: float
    prefill: float
    transfer: float
    slot_wait: float
    decode: float
    total: float
    first_token: float
    mean_itl: float


def finish_reason(
    params: SamplingParams, output_ids: Sequence[int], eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Why a choice ends after the last of `output_ids`, or None. Stop strings are handled by the router."""
    last, count = output_ids[-1], len(output_ids)
    if count >= params.min_tokens and (
        last in params.stop_token_ids or (last in eos_token_ids and not params.ignore_eos)
    ):
        return FinishReason.STOP
    if params.max_tokens is not None and count >= params.max_tokens:
        return FinishReason.LENGTH
    return None


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """Raise InvalidRequest naming the first id outside `[0, vocab_size)`; `first` is the index of `token_ids[0]`."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        at, bad = next((i, t) for i, t in enumerate(token_ids, first) if not 0 <= t < vocab_size)
        raise InvalidRequest(f"{name}[{at}]", f"must be in [0, {vocab_size})", bad)


def check_id(name: str, value: str, *, optional: bool = False) -> None:
    """Raise InvalidRequest naming the field unless `value` can be an id of a request, transfer, process and so on.

    That is 1 to MAX_ID_LENGTH printable ASCII characters, or none if it is `optional`. Processes keep the ids of other
    processes, and write them to logs.
    """
    if not value and not optional:
        raise InvalidRequest(name, "must not be empty")
    if len(value) > MAX_ID_LENGTH or not (value.isascii() and value.isprintable()):
        raise InvalidRequest(name, f"must have at most {MAX_ID_LENGTH} printable ASCII characters", value)


def check_count(name: str, count: int, limit: int, unit: str) -> None:
    """Raise InvalidRequest naming the field if it has more than `limit` elements."""
    if count > limit:
        raise InvalidRequest(name, f"at most {limit} {unit} are allowed", count)


def check_length(name: str, value: str | bytes, limit: int) -> None:
    """Raise InvalidRequest naming the field if `value` has more than `limit` characters or bytes."""
    if len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        raise InvalidRequest(name, f"must have at most {limit} {unit}", len(value))


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(name, f"must be in {'(' if open_low else '['}{low}, {high}]", value)
