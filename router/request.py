"""A client's request in the router: as a front end gives it, unchecked, and checked and tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.request import CachePolicy, SamplingParams, TemplateArgument, check_template_arguments
from baton.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text; `read` returns it in UTF-8, which takes milliseconds for a long one."""

    read: Callable[[], bytes]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, not checked yet."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as a chat of `count` messages, for the model's template.

    `read` returns them, each with its `role` and its `content`. That takes milliseconds for a long chat. It raises
    InvalidRequest. `arguments` are further variables for the template, such as `enable_thinking`; InvalidRequest is
    raised if one can't be set.
    """

    count: int
    read: Callable[[], Sequence[Mapping[str, str]]]
    add_generation_prompt: bool = True
    arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_template_arguments(self.arguments)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedRequest:
    """A client's request from a front end, not checked yet.

    `make_params` returns the sampling parameters for a vocabulary of a given size, with the given values for those that
    the request does not set, or raises InvalidRequest. `max_tokens` is None if the request does not set it.
    `allowed_tokens` is the number of their allowed token ids, which determines its time. `size` is the size of the
    request in memory, in bytes.
    """

    prompt: Prompt | None
    size: int
    make_params: Callable[[int, Mapping[str, Any]], SamplingParams]
    max_tokens: int | None = None
    allowed_tokens: int = 0
    model: str = ""
    cache: CachePolicy = CachePolicy.READ_WRITE
    cache_salt: str = ""
    report_progress: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A checked and tokenized request; `salt` is at the root of its prefix chain, `tenant` is "" without keys.

    `arrived` and `deadline` are in seconds on the event loop's clock.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    arrived: float
    deadline: float
    tenant: str = ""
    cache: CachePolicy = CachePolicy.READ_WRITE
    salt: bytes = b""
    report_progress: bool = False
    make_detokenizer: Callable[[], Detokenizer] = field(default=lambda: NoText())

    @property
    def reads_cache(self) -> bool:
        """Whether cached KV may be used; it may not if log-probabilities of the whole prompt are needed."""
        return self.cache.reads and self.params.prompt_logprobs is None


class NoText:
    """The detokenizer of a model without a tokenizer, whose output has no text."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""
