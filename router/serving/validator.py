"""Validation and tokenization of clients' requests.

Cheap checks come before costly ones, and every error names the field and the value seen. The number of elements of a
field is checked before any of them is read. Small requests are converted and tokenized at once, larger ones on a thread
(`threads.py`), and long texts in separate processes (`tokenizer_processes.py`). The code does not depend on the
transport: front ends make an `UncheckedRequest`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from baton.errors import InvalidRequest, NotFound, preview
from baton.request import MAX_CACHE_SALT_BYTES, SamplingParams, check_count, checked_array, checked_ids
from baton.tokenizer import Tokenizer
from router.request import ChatPrompt, NoText, Prompt, Request, TextPrompt, TokenPrompt, UncheckedRequest
from router.serving.threads import TenantThreads
from router.serving.tokenizer_processes import LONG_TEXT, TokenizerProcesses

MAX_ROLE_LENGTH = 64

MAX_CHAT_MESSAGES = 4096
"""Most messages of a chat. Rendering holds the GIL for about 10 µs per message, which holds up the event loop."""

_INLINE_BYTES = 4096
_INLINE_TOKENS = 4096
_INLINE_MESSAGES = 64

_ID_BYTES = 4
"""Bytes of a token id in memory."""

_PIECE = 64 << 10
"""Characters encoded in one call, during which the GIL is held."""

T = TypeVar("T")

MAX_REQUEST_BYTES = 64 << 20
"""Most bytes of a request, and of the log-probabilities of its prompt."""

_MIN_REQUEST_BYTES = 4 << 20
_TEXT_BYTES = 16
_TOKEN_ID_BYTES = 5
_OTHER_BYTES = 2 << 20
"""Sizes for `largest_request`: bytes of text per token of the model's length, of a token id, and of the rest."""

_LOGPROB_BYTES = 11
_TOKEN_BYTES = 16
"""Most bytes of one alternative from a worker, and of a token without its alternatives."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, as the router knows it; `tokenizer` is None when the checkpoint has none.

    `processes` tokenize long texts; if it is None, threads do. `default_sampling` has values for parameters that a
    request does not set.
    """

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    processes: TokenizerProcesses | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)


class RequestValidator:
    """Checks and tokenizes requests.

    `max_model_len` returns the most tokens of prompt and output together. `prefill_capacity` and `decode_capacity`
    return the most tokens that fit the KV memory of a worker, 0 while unknown. A prompt must fit a prefill worker. A
    request without `max_tokens` gets as many as fit `max_model_len` and a decode worker. `salt` makes the salt of a
    prefix chain from tenant and cache_salt.
    """

    def __init__(
        self,
        model: ServedModel,
        max_model_len: Callable[[], int],
        threads: TenantThreads,
        salt: Callable[[str, str], bytes] = lambda tenant, cache_salt: b"",
        *,
        prefill_capacity: Callable[[], int] = lambda: 0,
        decode_capacity: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model = model
        self._threads = threads
        self._salt = salt
        self._prefill_capacity = prefill_capacity
        self._decode_capacity = decode_capacity
        self.max_model_len = max_model_len

    def check_model(self, name: str) -> None:
        """Raise NotFound unless `name` is empty or the name of the served model."""
        if name and name != self._model.name:
            raise NotFound(f"model: {preview(name)} is not served; {self._model.name!r} is")

    async def validate(
        self, request: UncheckedRequest, *, arrived: float, deadline: float, tenant: str = ""
    ) -> Request:
        """The checked request, with seed and max_tokens set.

        Raises InvalidRequest, NotFound, and the errors of `tokenize`.
        """
        self.check_model(request.model)
        if (size := len(request.cache_salt.encode())) > MAX_CACHE_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"may have at most {MAX_CACHE_SALT_BYTES} bytes", size)
        self._check_counts(request.prompt)
        params = await self._params(request, tenant)
        if params.stop and self._model.tokenizer is None:
            raise InvalidRequest("stop", "the model has no tokenizer; send stop_token_ids", list(params.stop))
        field, prompt_ids = await self._prompt(request, tenant)
        limit, count = self.max_model_len(), len(prompt_ids)
        fits = min(limit, self._decode_capacity() or limit)
        if request.max_tokens is None and fits <= count < limit:
            raise InvalidRequest(
                field,
                f"{count} prompt tokens leave no room for output: the KV memory of a decode worker holds {fits} tokens",
            )
        if request.max_tokens is None:
            # A default of the model is the most, and needs not fit.
            max_tokens = min(max(fits - count, 1), params.max_tokens or fits)
        else:
            max_tokens = request.max_tokens
        if count + max_tokens > limit:
            raise InvalidRequest(
                "max_tokens" if count < limit else field,
                f"{count} prompt tokens + {max_tokens} to generate exceed the model's length of {limit}",
            )
        if count > (room := self._prefill_capacity() or count):
            raise InvalidRequest(
                field, f"{count} prompt tokens do not fit the {room} that a prefill worker's KV memory holds"
            )
        if params.prompt_logprobs is not None:
            _check_prompt_logprobs(params.prompt_logprobs, count)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(
            id=secrets.token_hex(12),
            prompt_ids=prompt_ids,
            params=replace(params, max_tokens=max_tokens, seed=seed),
            max_tokens=max_tokens,
            arrived=arrived,
            deadline=deadline,
            tenant=tenant,
            cache=request.cache,
            salt=self._salt(tenant, request.cache_salt),
            report_progress=request.report_progress,
            make_detokenizer=lambda: (
                self._model.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
                if self._model.tokenizer
                else NoText()
            ),
        )

    async def tokenize(self, prompt: TextPrompt | ChatPrompt | None, size: int, tenant: str = "") -> Sequence[int]:
        """Token ids of a text or a chat; `size` is its size in memory, in bytes.

        Raises InvalidRequest or Overloaded, and for a long text the errors of `TokenizerProcesses.encode`.
        """
        match prompt:
            case TextPrompt():
                return await self._text(prompt, tenant, size)
            case ChatPrompt():
                return await self._chat(prompt, tenant, size)
        raise InvalidRequest("input", "one of text and chat must be set")

    async def detokenize(self, token_ids: Sequence[int], tenant: str = "", *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises InvalidRequest or Overloaded."""
        count, vocab_size = len(token_ids), self._model.vocab_size
        self._check_fits("token_ids", count)
        tokenizer = self._tokenizer("token_ids")

        def decode() -> str:
            checked = checked_ids("token_ids", token_ids, vocab_size)
            return tokenizer.decode(checked, skip_special_tokens=skip_special_tokens)

        return await self._work(decode, tenant, _ID_BYTES * count, inline=count <= _INLINE_TOKENS)

    def _check_counts(self, prompt: Prompt | None) -> None:
        match prompt:
            case ChatPrompt():
                self._check_messages(prompt)
            case TokenPrompt():
                self._check_fits("token_ids", len(prompt.token_ids))

    async def _params(self, request: UncheckedRequest, tenant: str) -> SamplingParams:
        model = self._model

        def convert() -> SamplingParams:
            params = request.make_params(model.vocab_size, model.default_sampling)
            params.check_vocabulary(model.vocab_size, model.eos_token_ids)
            return params

        return await self._work(convert, tenant, request.size, inline=request.allowed_tokens <= _INLINE_TOKENS)

    async def _prompt(self, request: UncheckedRequest, tenant: str) -> tuple[str, Sequence[int]]:
        """The field that holds the prompt, and its token ids."""
        prompt_ids: Sequence[int]
        match request.prompt:
            case TextPrompt() as prompt:
                field = "text"
                prompt_ids = await self._text(prompt, tenant, request.size, may_be_empty=False)
            case ChatPrompt() as prompt:
                field, prompt_ids = "chat", await self._chat(prompt, tenant, request.size)
            case TokenPrompt(ids):
                field, convert = "token_ids", partial(checked_array, "token_ids", ids, self._model.vocab_size)
                prompt_ids = await self._work(convert, tenant, request.size, inline=len(ids) <= _INLINE_TOKENS)
            case None:
                raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")
        if not prompt_ids:
            raise InvalidRequest(field, "must not be empty", [])
        return field, prompt_ids

    async def _text(self, prompt: TextPrompt, tenant: str, size: int, *, may_be_empty: bool = True) -> Sequence[int]:
        tokenizer, limit = self._tokenizer("text"), self.max_model_len()

        def encode() -> Sequence[int]:
            text = prompt.read()
            if not (text or may_be_empty):
                raise InvalidRequest("text", "must not be empty", "")
            tokenizer.check_size("text", len(text), limit)
            return self._encode(text, add_special_tokens=prompt.add_special_tokens)

        return await self._work(encode, tenant, size, inline=size <= _INLINE_BYTES)

    async def _chat(self, prompt: ChatPrompt, tenant: str, size: int) -> Sequence[int]:
        tokenizer = self._tokenizer("chat")
        self._check_messages(prompt)
        limit = self.max_model_len()

        def render_and_encode() -> Sequence[int]:
            messages = prompt.read()
            _check_roles(messages)
            tokenizer.check_size("chat", sum(_size(message["content"]) for message in messages), limit)
            text = tokenizer.render_chat(
                messages, add_generation_prompt=prompt.add_generation_prompt, arguments=prompt.arguments
            )
            if small:
                return tokenizer.encode(text, add_special_tokens=False)
            return self._encode(utf8(text), add_special_tokens=False)

        small = prompt.count <= _INLINE_MESSAGES and size <= _INLINE_BYTES
        return await self._work(render_and_encode, tenant, size, inline=small)

    def _encode(self, text: bytes, *, add_special_tokens: bool) -> Sequence[int]:
        """Token ids of a text in UTF-8; an array if the text is long."""
        if self._model.processes is not None and len(text) >= LONG_TEXT:
            return self._model.processes.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer("text").encode(text.decode(), add_special_tokens=add_special_tokens)

    async def _work(self, function: Callable[[], T], tenant: str, size: int, *, inline: bool) -> T:
        """Call `function` at once if `inline`, else on a thread. Raises Overloaded if the tenant's queue is full."""
        if inline:
            return function()
        self._threads.check(tenant, size)
        return await self._threads.run(tenant, function, size)

    def _check_fits(self, field: str, count: int) -> None:
        """Raise InvalidRequest for more than the model's length, before a long loop holds up the event loop."""
        if count > (limit := self.max_model_len()):
            raise InvalidRequest(field, f"at most {limit} fit the model's length", count)

    def _check_messages(self, chat: ChatPrompt) -> None:
        if not chat.count:
            raise InvalidRequest("chat.messages", "must not be empty", [])
        check_count("chat.messages", chat.count, MAX_CHAT_MESSAGES, "messages")
        self._check_fits("chat.messages", chat.count)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidRequest(field, "the model has no tokenizer; send token_ids")
        return self._model.tokenizer


def largest_request(max_model_len: int, vocab_size: int) -> int:
    """Size in bytes of the largest request that a client may need."""
    needed = max_model_len * _TEXT_BYTES + vocab_size * _TOKEN_ID_BYTES + _OTHER_BYTES
    return min(max(needed, _MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)


def utf8(text: str) -> bytes:
    """The text in UTF-8, encoded in pieces, so that other threads run between them."""
    return b"".join(text[start : start + _PIECE].encode() for start in range(0, len(text), _PIECE))


def _size(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(utf8(text))


def _check_roles(messages: Sequence[Mapping[str, str]]) -> None:
    for index, message in enumerate(messages):
        if not 1 <= len(message["role"]) <= MAX_ROLE_LENGTH:
            field = f"chat.messages[{index}].role"
            raise InvalidRequest(field, f"must have 1 to {MAX_ROLE_LENGTH} characters", message["role"])


def _check_prompt_logprobs(alternatives: int, count: int) -> None:
    """Raise InvalidRequest if log-probabilities of `count` prompt tokens would take too much of the router's memory."""
    size = count * (_TOKEN_BYTES + alternatives * _LOGPROB_BYTES)
    if size > MAX_REQUEST_BYTES:
        raise InvalidRequest(
            "prompt_logprobs",
            f"those of {count} prompt tokens need up to {size} bytes, at most {MAX_REQUEST_BYTES} are allowed",
            alternatives,
        )
