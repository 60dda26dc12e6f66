"""Requests and their results, in plain Python, as clients, routers and workers exchange them.

All parts of Baton use these types; they import neither torch nor grpc. Ranges are checked when a value is made, so that
a bad one can't exist. `SamplingParams.check_vocabulary` checks values that depend on the model.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from baton.errors import InvalidRequest
from baton.kv.format import Shard

A = TypeVar("A", list[int], "array[int]")

_PIECE = 4096
"""Token ids converted at a time. One call keeps the GIL until it ends, so a thread must make several calls."""

MAX_ID_LENGTH = 128
MAX_ADDRESS_LENGTH = 300
MAX_CHOICES = 64
MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_TEXT = 1000
MAX_TEMPLATE_JSON = 1 << 16
MAX_CACHE_SALT_BYTES = 256
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
_MAX_INT32 = 2**31 - 1
MIN_REPETITION_PENALTY = 2**-10
"""Smallest penalty by which a logit stays finite; a power of two, so float32 represents it exactly."""


_TEMPLATE_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")

TemplateArgument = bool | int | float | str | None


class FinishReason(enum.Enum):
    """Reason for the end of a choice."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token; `logprob` and `top` (best first) are natural logarithms under the unmodified model."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declaration of a field of SamplingParams.

    `kind` is its type as written, without None. A number lies in `[low, high]`, above `low` if `open_low`. A tuple has
    at most `most` elements, or as many as the vocabulary if that is 0; `unit` is their name in errors.
    """

    kind: str
    default: Any
    help: str
    low: float | None = None
    high: float = 0
    open_low: bool = False
    most: int = 0
    unit: str = "token ids"


def _param(default: Any, help: str, low: float | None = None, high: float = 0, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high, **more})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, and of the end of a choice.

    Names and meanings are those of vLLM, with three exceptions: `include_stop_in_output` is vLLM's
    `include_stop_str_in_output`; without `max_tokens` a choice may have all tokens that fit; `top_k` 0, and not -1,
    is all. A router replaces defaults by those in the model's generation_config.json.

    The message in `inference.proto` has the same names. Conversion, checks of types and the flags of `baton generate`
    follow from this declaration. `logprobs` and `prompt_logprobs` None mean no report.

    Raises InvalidRequest naming the field.
    """

    max_tokens: int | None = _param(None, "Largest number of tokens to generate; default: all that fit.", 1, _MAX_INT32)
    min_tokens: int = _param(0, "Smallest number of tokens to generate.", 0, _MAX_INT32)
    temperature: float = _param(1.0, "Softmax temperature; 0 is greedy.", 0.0, 100.0)
    top_p: float = _param(1.0, "Total probability of the tokens to sample from, in (0, 1].", 0.0, 1.0, open_low=True)
    top_k: int = _param(0, "Number of most likely tokens to sample from; 0: all.", 0, _MAX_INT32)
    min_p: float = _param(0.0, "Smallest probability of a token, relative to the most likely one.", 0.0, 1.0)
    repetition_penalty: float = _param(
        1.0, "Penalty for tokens of prompt and output; above 1, repeats are less likely.", MIN_REPETITION_PENALTY, 100.0
    )
    presence_penalty: float = _param(0.0, "Amount subtracted from the logits of tokens in the output.", -2.0, 2.0)
    frequency_penalty: float = _param(
        0.0, "Amount subtracted from a logit for each time that its token is in the output.", -2.0, 2.0
    )
    logit_bias: tuple[tuple[int, float], ...] = _param(
        (),
        "Amount in [-100, 100] added to a token's logit; may be given several times.",
        most=MAX_LOGIT_BIAS,
        unit="entries",
    )
    seed: int | None = _param(None, "Seed of the sampling noise; default: a random one.", 0, 2**64 - 1)
    stop: tuple[str, ...] = _param(
        (), "String that ends generation; may be given several times.", most=MAX_STOP_STRINGS, unit="strings"
    )
    stop_token_ids: tuple[int, ...] = _param((), "Token ids that end generation.", most=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = _param(False, "Keep generating past end-of-sequence tokens.")
    logprobs: int | None = _param(None, "Most likely tokens reported for each output token.", 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _param(None, "Most likely tokens reported for each prompt token.", 0, MAX_LOGPROBS)
    n: int = _param(1, "Choices generated from one prefill.", 1, MAX_CHOICES)
    allowed_token_ids: tuple[int, ...] = _param((), "The only token ids that may be generated.")
    skip_special_tokens: bool = _param(True, "Leave special tokens out of the text.")
    include_stop_in_output: bool = _param(False, "Keep the matched stop string in the text.")

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if parameter.low is not None and value is not parameter.default:
                _check_range(name, value, parameter.low, parameter.high, open_low=parameter.open_low)
            if parameter.most:
                check_count(name, len(value), parameter.most, parameter.unit)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens ({self.max_tokens})", self.min_tokens)
        for i, text in enumerate(self.stop):
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"stop[{i}]", f"must have 1 to {MAX_STOP_LENGTH} characters", text)
        if (characters := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest("stop", f"may have at most {MAX_STOP_CHARACTERS} characters in all", characters)
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is set, which makes logits depend on the counts of earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Raise InvalidRequest if the parameters do not fit the model.

        They do not fit if a token id is outside the vocabulary, if more tokens are allowed than it has, or if
        `min_tokens` bans all allowed tokens.
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


PARAMETERS = {
    each.name: Parameter(str(each.type).removesuffix(" | None"), each.default, **each.metadata)
    for each in fields(SamplingParams)
}


class Sampling(TypedDict, total=False):
    """The client's keyword arguments for the fields of SamplingParams."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    allowed_token_ids: Sequence[int] | None
    skip_special_tokens: bool
    include_stop_in_output: bool


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of one choice from which the sampler computes the next token; it needs nothing else.

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


def join_ids(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> array[int]:
    """All token ids of a sequence, as an array, which is freed at once.

    Returns `prompt_ids` itself if it is an array and there is no output.
    """
    if isinstance(prompt_ids, array) and not output_ids:
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
    """Number of tokens that were not computed, by the source of their KV; see inference.proto.

    The fields with a title are the tiers from which prefill loads.
    """

    pool: int = field(default=0, metadata={"title": "pool"})
    host: int = field(default=0, metadata={"title": "host memory"})
    redis: int = field(default=0, metadata={"title": "Redis"})
    peer: int = field(default=0, metadata={"title": "a decode worker"})
    decode: int = 0

    @property
    def total(self) -> int:
        """Number of tokens that prefill did not compute."""
        return sum(getattr(self, name) for name in CACHE_TIERS)


CACHE_TIERS = {each.name: each.metadata["title"] for each in fields(CachedTokens) if each.metadata}
"""Titles of the tiers by name, nearest first."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of prefill; `cached_tokens` tokens were not computed, and `cached` has their number by source."""

    first_tokens: tuple[FirstToken, ...]
    cached_tokens: int
    cached: CachedTokens = field(default_factory=CachedTokens)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt from position `start` on; the first token of a prompt has none."""

    start: int
    tokens: Sequence[TokenInfo]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The progress of a prompt; `tokens_done` includes cached tokens, and `seconds_left` is None while unknown."""

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
    """The latency account in milliseconds: queue + prefill + transfer + slot_wait + decode = total.

    `first_token` is the time to the first token, `mean_itl` the mean time between two tokens of a choice.
    """

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
    """The reason why a choice ends with the last of `output_ids`; None if it goes on. Stop strings are not checked."""
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


def pieces(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in slices, each of which is converted in a fifth of a millisecond at most."""
    return (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))


def checked_ids(name: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list; raises InvalidRequest naming the first one outside the vocabulary.

    On a thread it lets other threads run between pieces.
    """
    return _extend([], name, ids, vocab_size)


def checked_array(name: str, ids: Sequence[int], vocab_size: int) -> array[int]:
    """`checked_ids` as an array of uint32, which takes a tenth of the memory and is freed at once."""
    return _extend(array("I"), name, ids, vocab_size)


def _extend(found: A, name: str, ids: Sequence[int], vocab_size: int) -> A:
    for piece in pieces(ids):
        check_token_ids(name, piece, vocab_size, len(found))
        found.extend(piece)
    return found


def check_id(name: str, value: str, *, optional: bool = False) -> None:
    """Raise InvalidRequest, which names the field, unless `value` is a valid id of a request, transfer or process.

    An id has 1 to MAX_ID_LENGTH printable ASCII characters; if `optional`, it may also be empty. The limit exists
    because processes keep ids of other processes, and write them to logs.
    """
    if not value and not optional:
        raise InvalidRequest(name, "must not be empty")
    if len(value) > MAX_ID_LENGTH or not (value.isascii() and value.isprintable()):
        raise InvalidRequest(name, f"must have at most {MAX_ID_LENGTH} printable ASCII characters", value)


def check_count(name: str, count: int, limit: int, unit: str) -> None:
    """Raise InvalidRequest, which names the field, if it has more than `limit` elements."""
    if count > limit:
        raise InvalidRequest(name, f"at most {limit} {unit} are allowed", count)


def check_template_arguments(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a variable of a chat template that can't be set, or with a value of a wrong type."""
    check_count("chat_template_kwargs", len(given), MAX_TEMPLATE_ARGUMENTS, "names")
    for name, value in given.items():
        check_unicode("chat_template_kwargs", name)
        field = f"chat_template_kwargs.{name[:MAX_TEMPLATE_TEXT]}"
        if name in _TEMPLATE_VARIABLES:
            raise InvalidRequest(field, "can't be set, because the request itself sets it")
        if not isinstance(value, TemplateArgument):
            # Without the value, which may be large.
            problem = f"must be a number, a text, true, false or null, not {type(value).__name__}"
            raise InvalidRequest(field, problem)
        if isinstance(value, str):
            check_length(field, value, MAX_TEMPLATE_TEXT)
            check_unicode(field, value)


def check_unicode(name: str, text: str) -> bytes:
    """The text in UTF-8; raises InvalidRequest, which names the field, if it has a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, f"not valid Unicode at character {error.start}", text[error.start]) from None


def check_length(name: str, value: str | bytes, limit: int) -> None:
    """Raise InvalidRequest, which names the field, if `value` has more than `limit` characters or bytes."""
    if len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        raise InvalidRequest(name, f"must have at most {limit} {unit}", len(value))


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        raise InvalidRequest(name, f"must be in {'(' if open_low else '['}{low}, {high}]", value)


MAX_TICKET_BYTES = 4096
"""Largest size of a signed ticket; a real one has about 200 bytes."""

MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class RemoteExport:
    """An export at another worker. Each of the worker's `shards` serves a part, under the same transfer id.

    `ticket` is the router's permission to fetch it; empty if the fleet has no ticket keys.
    """

    transfer_id: str
    incarnation: str
    shards: tuple[Shard, ...]
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A decode worker's export of the first `tokens` tokens of a prompt."""

    export: RemoteExport
    tokens: int


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """The answer to a reservation; `too_small` if the worker's memory can't hold the request even when empty.

    If `waiting`, the worker keeps the reservation until it can grant it, and answers again. The worker has pinned the
    KV of the first `cached_tokens` tokens of the context.
    """

    granted: bool
    reason: str = ""
    too_small: bool = False
    cached_tokens: int = 0
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Durations on decode's clock: `fetch_ms` from Start to the commit, `slot_wait_ms` from the commit to a slot."""

    fetch_ms: float
    slot_wait_ms: float


@dataclass(slots=True)
class Output:
    """Tokens of one choice; `output_index` is the index of the first token; `finish` is set if the last token ends it.

    The first output of a choice has `timings`. The class is not frozen, because an Output is made for every token, and
    a frozen dataclass takes three times as long to make.
    """

    choice_index: int
    output_index: int
    tokens: Sequence[TokenInfo]
    finish: FinishReason | None = None
    timings: DecodeTimings | None = None
