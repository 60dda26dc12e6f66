"""Requests of OpenAI's HTTP API, and the extensions of vLLM: the fields, and the requests that they stand for.

    JSON object ── fields without effect, refused fields ── model of the endpoint ── one `UncheckedRequest` a prompt

A field is in one of three lists, and every other name is refused:

* The fields of the models here are served. Null stands for a field that is not there.
* WITHOUT_EFFECT are accepted and change nothing.
* REFUSED are fields of other servers that would change the output. They are accepted only with a value that asks for
  nothing.

The models check types. The ranges of values are checked by `SamplingParams`, and prompts by `RequestValidator`, as for
all front ends. Prompts, chats and lists of token ids are `Any` in the models, because a check of a million elements in
one call would hold the interpreter's lock.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import InvalidRequest
from baton.request import SamplingParams, check_count
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, UncheckedRequest
from router.serving.validator import MAX_CHAT_MESSAGES, utf8

MAX_PROMPTS = 256
"""Most prompts of a request."""

COMPLETION_TOKENS = 16
"""The `max_tokens` of /v1/completions for a request without it, as OpenAI has it."""

WITHOUT_EFFECT = (
    "client_metadata",
    "include_reasoning",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "session_id",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
    "user",
)

REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "bad_words": ([],),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "early_stopping": (False,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "modalities": (["text"],),
        "mm_processor_kwargs": ({},),
        "prediction": (),
        "priority": (0,),
        "prompt_embeds": (),
        "reasoning_effort": (),
        "repetition_detection": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "suffix": ("",),
        "thinking_token_budget": (-1,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "verbosity": (),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
"""Refused fields, with the values that ask for nothing."""

_MESSAGE_FIELDS = ("role", "content", "name")
_NO_LIST = "must be a list of token ids"

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class PromptField:
    """A prompt, the field that holds it, its bytes in memory, and its text if it is one."""

    name: str
    prompt: Prompt
    size: int
    text: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str | None = None


class _Generation(_Body):
    """Fields that both endpoints of completions have."""

    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"include_stop_str_in_output": "include_stop_in_output"})
    """Names of parameters here, where they differ from those of SamplingParams."""
    plain: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("seed", "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output", "n"),
        "prompt_logprobs",
    )

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Any = None
    allowed_token_ids: Any = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def most_tokens(self) -> int | None:
        """The number of tokens to generate, if the request has it."""
        return self.max_tokens

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """The number of most likely tokens to report for each token of the output; None for no report."""

    def sampling(self) -> dict[str, Any]:
        """Values for SamplingParams but those of `allowed_token_ids`, which may be many."""
        given = {name: value for name in self.plain if (value := getattr(self, name)) is not None}
        values = {self.renamed.get(name, name): value for name, value in given.items()}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if self.most_tokens is not None:
            values["max_tokens"] = self.most_tokens
        if self.alternatives is not None:
            values["logprobs"] = self.alternatives
        if self.logit_bias:
            values["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        if self.stop:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = tuple(_ids("stop_token_ids", self.stop_token_ids))
        return values


class CompletionBody(_Generation):
    """The body of /v1/completions."""

    prompt: Any = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def most_tokens(self) -> int | None:
        """At least one token is generated, and left out if only the prompt is wanted."""
        return 1 if self.prompt_only else COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """As the field says."""
        return self.logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is the prompt alone."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        """An echo with log-probabilities has those of the prompt too."""
        values = super().sampling()
        if self.echo and self.logprobs is not None:
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    def prompts(self) -> list[PromptField]:
        """The prompts: a text, token ids, or a list of these."""
        given = self.prompt
        if isinstance(given, list) and given and type(given[0]) is not int:
            check_count("prompt", len(given), MAX_PROMPTS, "prompts")
            return [self._prompt(f"prompt[{index}]", each) for index, each in enumerate(given)]
        return [self._prompt("prompt", given)]

    def _prompt(self, name: str, given: Any) -> PromptField:
        if isinstance(given, str):
            return PromptField(name, _text(given, self.add_special_tokens), sys.getsizeof(given), given)
        if not isinstance(given, list | array):
            raise InvalidRequest(name, "must be a text or a list of token ids", _shown(given))
        return PromptField(name, TokenPrompt(_ids(name, given)), 4 * len(given))


class ChatBody(_Generation):
    """The body of /v1/chat/completions."""

    messages: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def most_tokens(self) -> int | None:
        """`max_completion_tokens` is the newer name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """`top_logprobs` needs `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true", self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> list[PromptField]:
        """The one prompt."""
        chat = _chat(self.messages, self.add_generation_prompt, self.chat_template_kwargs)
        return [PromptField("messages", chat, sum(map(_message_size, self.messages)))]


class TokenizeBody(_Body):
    """The body of /tokenize."""

    prompt: Any = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def text(self) -> TextPrompt | ChatPrompt:
        """The text or the chat to tokenize."""
        if self.messages is not None:
            if self.prompt is not None:
                raise InvalidRequest("prompt", "can't be set together with messages")
            return _chat(self.messages, self.add_generation_prompt, self.chat_template_kwargs)
        if not isinstance(self.prompt, str):
            raise InvalidRequest("prompt", "must be a text", _shown(self.prompt))
        return _text(self.prompt, self.add_special_tokens)

    @property
    def size(self) -> int:
        """Bytes of it in memory."""
        return sys.getsizeof(self.prompt) if self.messages is None else sum(map(_message_size, self.messages))


class DetokenizeBody(_Body):
    """The body of /detokenize."""

    tokens: Any = None

    def ids(self) -> Sequence[int]:
        """The token ids."""
        return _ids("tokens", self.tokens)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The form of an answer, as a request wants it."""

    chat: bool
    stream: bool
    n: int
    logprobs: int | None
    """Number of alternatives in the report of each token; None for no report."""
    prompt_logprobs: bool
    echo: bool
    prompt_only: bool
    token_ids: bool
    tokens_as_ids: bool
    include_usage: bool
    continuous_usage: bool
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """A body as requests, one for each prompt."""

    requests: list[UncheckedRequest]
    prompts: list[PromptField]
    options: AnswerOptions
    renamed: Mapping[str, str]

    def error(self, error: InvalidRequest, prompt: int) -> InvalidRequest:
        """The error of a request with the names that fields have in the body."""
        return rename(error, {**self.renamed, **dict.fromkeys(_PROMPT_FIELDS, self.prompts[prompt].name)})


_PROMPT_FIELDS = ("chat.messages", "chat", "text", "token_ids", "prompt")


def read(body: type[B], given: dict[str, Any]) -> B:
    """The fields of a body. Raises InvalidRequest naming the field."""
    known = body.model_fields
    values = {}
    for name, value in given.items():
        if value is None and (name in known or name in REFUSED or name in WITHOUT_EFFECT):
            continue
        if name in known:
            values[name] = value
        elif name in REFUSED:
            if not any(type(value) is type(each) and value == each for each in _neutral(name)):
                raise InvalidRequest(name, "is not supported", _shown(value))
        elif name not in WITHOUT_EFFECT:
            raise InvalidRequest(name[:64], "is not a field of this endpoint", _shown(value))
    try:
        return body.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"][1:])
        # Of a field that may be a text or a list, the parts of the path that name the kind say nothing.
        name = f"{found['loc'][0]}{path}" if found["loc"][0] == "stream_options" else str(found["loc"][0])
        raise InvalidRequest(name, _lower(found["msg"]), _shown(found["input"])) from None


def generation(body: CompletionBody | ChatBody) -> Generation:
    """The requests of a body. Raises InvalidRequest naming the field."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise InvalidRequest("stream_options", "needs stream: true")
    if stream and body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs", "can't be streamed; set stream to false", body.prompt_logprobs)
    completion = body if isinstance(body, CompletionBody) else None
    prompts = body.prompts()
    values = body.sampling()
    allowed = None if body.allowed_token_ids is None else _ids("allowed_token_ids", body.allowed_token_ids)
    requests = [
        UncheckedRequest(
            prompt=each.prompt,
            size=each.size,
            make_params=partial(_params, values, allowed),
            max_tokens=body.most_tokens,
            allowed_tokens=len(allowed or ()),
            model=body.model or "",
            cache_salt=body.cache_salt or "",
        )
        for each in prompts
    ]
    return Generation(
        requests,
        prompts,
        AnswerOptions(
            chat=completion is None,
            stream=stream,
            n=1 if body.n is None else body.n,
            logprobs=body.alternatives,
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=bool(completion and completion.echo),
            prompt_only=bool(completion and completion.prompt_only),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            stop_token_ids=frozenset(values.get("stop_token_ids", ())),
        ),
        _renames(body),
    )


def rename(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error with another name of its field, or of the field that its field is a part of."""
    for old, new in names.items():
        rest = error.field[len(old) :]
        if error.field.startswith(old) and (not rest or rest[0] in ".["):
            return InvalidRequest(new + rest, str(error)[len(error.field) + 2 :])
    return error


def _renames(body: _Generation) -> dict[str, str]:
    names = {parameter: name for name, parameter in body.renamed.items()}
    if isinstance(body, ChatBody):
        names["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    elif body.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    return names


def _params(
    values: Mapping[str, Any], allowed: Sequence[int] | None, vocab_size: int, defaults: Mapping[str, Any]
) -> SamplingParams:
    if allowed is None:
        return SamplingParams(**{**defaults, **values})
    check_count("allowed_token_ids", len(allowed), vocab_size, "token ids")
    return SamplingParams(**{**defaults, **values, "allowed_token_ids": tuple(allowed)})


def _ids(name: str, given: Any) -> Sequence[int]:
    """Token ids in a list, which is short, or in an array."""
    if isinstance(given, array):
        return given
    if not isinstance(given, list):
        raise InvalidRequest(name, _NO_LIST, _shown(given))
    for index, each in enumerate(given):
        if type(each) is not int:
            raise InvalidRequest(f"{name}[{index}]", "must be a token id", _shown(each))
    return given


def _text(given: str, add_special_tokens: bool | None) -> TextPrompt:
    return TextPrompt(
        partial(utf8, given), add_special_tokens=True if add_special_tokens is None else add_special_tokens
    )


def _chat(given: Any, add_generation_prompt: bool | None, arguments: dict[str, Any] | None) -> ChatPrompt:
    if not isinstance(given, list):
        raise InvalidRequest("messages", "must be a list of messages", _shown(given))
    check_count("messages", len(given), MAX_CHAT_MESSAGES, "messages")
    return ChatPrompt(
        len(given),
        partial(_messages, given),
        add_generation_prompt=True if add_generation_prompt is None else add_generation_prompt,
        arguments=arguments or {},
    )


def _messages(given: list[Any]) -> list[dict[str, str]]:
    return [_message(f"chat.messages[{index}]", each) for index, each in enumerate(given)]


def _message(path: str, given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise InvalidRequest(path, "must be an object with role and content", _shown(given))
    for name, value in given.items():
        if name not in _MESSAGE_FIELDS and value not in (None, [], ""):
            raise InvalidRequest(f"{path}.{name[:64]}", "is not supported", _shown(value))
    found = {"role": given.get("role"), "content": _content(f"{path}.content", given.get("content"))}
    if given.get("name") is not None:
        found["name"] = given["name"]
    for name, value in found.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{path}.{name}", "must be a text", _shown(value))
    return found


def _content(path: str, given: Any) -> Any:
    """The content as one text; parts are lines of it, as in vLLM."""
    if given is None:
        return ""
    if not isinstance(given, list):
        return given
    texts = []
    for index, part in enumerate(given):
        here = f"{path}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(f"{here}.type", "only text is supported", _shown(kind))
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{here}.text", "must be a text", _shown(part.get("text")))
        texts.append(part["text"])
    return "\n".join(texts)


def _neutral(name: str) -> tuple[Any, ...]:
    values = REFUSED[name]
    return (*values, *(float(each) for each in values if type(each) is int))


def _message_size(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return sum(sys.getsizeof(part.get("text")) for part in content if isinstance(part, dict))
    return sys.getsizeof(content)


def _shown(value: Any) -> Any:
    """A value for an error; of a long list only its length."""
    if isinstance(value, list | array | dict):
        return f"{type(value).__name__} of {len(value)}"
    return value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
