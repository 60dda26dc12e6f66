"""From the client's message to a request that can be served, or to the reason why it can't.

Checks go from cheap to costly, and every refusal names the field and the value seen. The number of elements of a
field is checked before any of them is read. Small requests are converted and tokenized at once; larger ones on a
thread, when it is their tenant's turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from baton.errors import InvalidRequest, NotFound, shown
from baton.pb import inference_pb2
from baton.request import MAX_CACHE_SALT_BYTES, SamplingParams, check_count
from baton.rpc.channel import CONTROL_MESSAGE_BYTES
from baton.rpc.convert import cache_policy_from_proto, check_counts, sampling_from_proto, token_ids_from_proto
from baton.tokenizer import Tokenizer
from router.output.stops import StopStrings
from router.request import NoText, Request
from router.serving.threads import Threads

MAX_ROLE_LENGTH = 64

MAX_CHAT_MESSAGES = 4096
"""Messages of a chat. Rendering them keeps the GIL, for about 10 µs each, and so holds up the event loop."""

_INLINE_BYTES = 4096
_INLINE_TOKENS = 4096
_INLINE_MESSAGES = 64

T = TypeVar("T")

_LEAST_MESSAGE_BYTES = 4 << 20
_TEXT_BYTES = 16
_TOKEN_ID_BYTES = 5
_OTHER_BYTES = 2 << 20
"""Bytes of text for each token of the model's length, of one token id, and of all else in a request."""

_LOGPROB_BYTES = 11
_TOKEN_BYTES = 16
"""Most bytes on the wire of one alternative, and of a token beside its alternatives."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the router knows of the served model; `tokenizer` is None when the checkpoint has none."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None


class Intake:
    """Checks and tokenizes; `max_model_len` tells the most tokens of prompt and output together.

    `capacity` tells how many of them a decode worker's memory can hold, 0 while that is unknown: a request without
    `max_tokens` may generate what fits both. `salt` makes the salt of a prefix chain from tenant and cache_salt.
    """

    def __init__(
        self,
        model: Model,
        max_model_len: Callable[[], int],
        threads: Threads,
        salt: Callable[[str, str], bytes] = lambda tenant, cache_salt: b"",
        capacity: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model = model
        self._threads = threads
        self._salt = salt
        self._capacity = capacity
        self.max_model_len = max_model_len

    def check_model(self, name: str) -> None:
        """Raise NotFound unless `name` is the served model's, or empty."""
        if name and name != self._model.name:
            raise NotFound(f"model: {shown(name)} is not served; {self._model.name!r} is")

    async def request(
        self,
        message: inference_pb2.GenerateRequest,
        *,
        arrived: float,
        deadline: float | None,
        tenant: str = "",
    ) -> Request:
        """The request, with seed and max_tokens set. Raises InvalidRequest or NotFound."""
        self.check_model(message.model)
        cache = cache_policy_from_proto(message.cache)
        if (size := len(message.cache_salt.encode())) > MAX_CACHE_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"may have at most {MAX_CACHE_SALT_BYTES} bytes", size)
        check_counts(message.sampling, self._model.vocab_size)
        self._check_counts(message)
        params = await self._params(message.sampling, tenant)
        field, prompt_ids = await self._prompt(message, tenant)
        limit, count = self.max_model_len(), len(prompt_ids)
        fits = min(limit, self._capacity() or limit)
        if params.max_tokens is None and fits <= count < limit:
            raise InvalidRequest(
                field, f"{count} prompt tokens leave no room in the {fits} that the workers' KV memory holds"
            )
        max_tokens = max(fits - count, 1) if params.max_tokens is None else params.max_tokens
        if count + max_tokens > limit:
            raise InvalidRequest(
                "max_tokens" if count < limit else field,
                f"{count} prompt tokens + {max_tokens} to generate exceed the model's length of {limit}",
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
            stops=StopStrings(params.stop),
            cache=cache,
            salt=self._salt(tenant, message.cache_salt),
            detokenizer=lambda: (
                self._model.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
                if self._model.tokenizer
                else NoText()
            ),
        )

    async def tokenize(self, message: inference_pb2.TokenizeRequest, tenant: str = "") -> list[int]:
        """Token ids of a text or a chat. Raises InvalidRequest, NotFound or Overloaded."""
        self.check_model(message.model)
        match message.WhichOneof("input"):
            case "text":
                special = message.add_special_tokens if message.HasField("add_special_tokens") else True
                return await self._text(message.text, tenant, add_special_tokens=special)
            case "chat":
                return await self._chat(message.chat, tenant)
        raise InvalidRequest("input", "one of text and chat must be set")

    async def detokenize(self, message: inference_pb2.DetokenizeRequest, tenant: str = "") -> str:
        """Text of token ids. Raises InvalidRequest, NotFound or Overloaded."""
        self.check_model(message.model)
        count, vocab_size = len(message.token_ids), self._model.vocab_size
        self._check_fits("token_ids", count)
        tokenizer = self._tokenizer("token_ids")
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True

        def decode() -> str:
            token_ids = token_ids_from_proto("token_ids", message.token_ids, vocab_size)
            return tokenizer.decode(token_ids, skip_special_tokens=skip)

        return await self._work(decode, tenant, message.ByteSize(), inline=count <= _INLINE_TOKENS)

    def _check_counts(self, message: inference_pb2.GenerateRequest) -> None:
        match message.WhichOneof("prompt"):
            case "chat":
                self._check_messages(message.chat)
            case "token_ids":
                self._check_fits("token_ids", len(message.token_ids.ids))

    async def _params(self, message: inference_pb2.SamplingParams, tenant: str) -> SamplingParams:
        model = self._model

        def convert() -> SamplingParams:
            params = sampling_from_proto(message, model.vocab_size)
            params.check_model(model.vocab_size, model.eos_token_ids)
            return params

        small = len(message.allowed_token_ids) <= _INLINE_TOKENS
        return await self._work(convert, tenant, message.ByteSize(), inline=small)

    async def _prompt(self, message: inference_pb2.GenerateRequest, tenant: str) -> tuple[str, Sequence[int]]:
        """The field that holds the prompt, and its token ids."""
        field = message.WhichOneof("prompt")
        match field:
            case "text":
                if not message.text:
                    raise InvalidRequest("text", "must not be empty", "")
                prompt_ids: Sequence[int] = await self._text(message.text, tenant, add_special_tokens=True)
            case "chat":
                prompt_ids = await self._chat(message.chat, tenant)
            case "token_ids":
                ids, size = message.token_ids.ids, message.token_ids.ByteSize()
                convert = partial(token_ids_from_proto, "token_ids", ids, self._model.vocab_size)
                prompt_ids = await self._work(convert, tenant, size, inline=len(ids) <= _INLINE_TOKENS)
            case _:
                raise InvalidRequest("prompt", "one of text, token_ids and chat must be set")
        if not prompt_ids:
            raise InvalidRequest(field, "must not be empty", [])
        return field, prompt_ids

    async def _text(self, text: str, tenant: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer, size = self._tokenizer("text"), len(text.encode())
        tokenizer.check_size("text", size, self.max_model_len())
        small = size <= _INLINE_BYTES
        encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._work(encode, tenant, size, inline=small)

    async def _chat(self, chat: inference_pb2.Chat, tenant: str) -> list[int]:
        tokenizer = self._tokenizer("chat")
        self._check_messages(chat)
        prompted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        limit = self.max_model_len()

        def render_and_encode() -> list[int]:
            messages = _messages(chat)
            tokenizer.check_size("chat", sum(len(message["content"].encode()) for message in messages), limit)
            text = tokenizer.render_chat(messages, add_generation_prompt=prompted)
            return tokenizer.encode(text, add_special_tokens=False)

        size = chat.ByteSize()
        small = len(chat.messages) <= _INLINE_MESSAGES and size <= _INLINE_BYTES
        return await self._work(render_and_encode, tenant, size, inline=small)

    async def _work(self, function: Callable[[], T], tenant: str, size: int, *, inline: bool) -> T:
        """Call at once, or on a thread. Raises Overloaded if too much of the tenant's waits for one."""
        if inline:
            return function()
        self._threads.check(tenant, size)
        return await self._threads.run(tenant, function, size)

    def _check_fits(self, field: str, count: int) -> None:
        """Refuse what is longer than the model's length before a pass over it holds up the event loop."""
        if count > (limit := self.max_model_len()):
            raise InvalidRequest(field, f"at most {limit} fit the model's length", count)

    def _check_messages(self, chat: inference_pb2.Chat) -> None:
        if not chat.messages:
            raise InvalidRequest("chat.messages", "must not be empty", [])
        check_count("chat.messages", len(chat.messages), MAX_CHAT_MESSAGES, "messages")
        self._check_fits("chat.messages", len(chat.messages))

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidRequest(field, "the model has no tokenizer; send token_ids")
        return self._model.tokenizer


def largest_message(max_model_len: int, vocab_size: int) -> int:
    """Bytes of the largest message that a client may need to send; parsing one holds up the event loop."""
    needed = max_model_len * _TEXT_BYTES + vocab_size * _TOKEN_ID_BYTES + _OTHER_BYTES
    return min(max(needed, _LEAST_MESSAGE_BYTES), CONTROL_MESSAGE_BYTES)


def _messages(chat: inference_pb2.Chat) -> list[dict[str, str]]:
    """The turns as chat templates know them."""
    for index, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_LENGTH:
            field = f"chat.messages[{index}].role"
            raise InvalidRequest(field, f"must have 1 to {MAX_ROLE_LENGTH} characters", message.role)
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _check_prompt_logprobs(alternatives: int, count: int) -> None:
    """Refuse a report on `count` prompt tokens that no message can carry, before they are computed."""
    size = count * (_TOKEN_BYTES + alternatives * _LOGPROB_BYTES)
    if size > CONTROL_MESSAGE_BYTES:
        raise InvalidRequest(
            "prompt_logprobs",
            f"a report on {count} prompt tokens needs up to {size} bytes, a message holds {CONTROL_MESSAGE_BYTES}",
            alternatives,
        )
