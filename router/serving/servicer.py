"""The public API over gRPC: checks keys, and translates between messages and the front door.

`ApiKeyGuard` stands before every method of the listener, so that a new one can't be forgotten: all but health and
reflection need a key, and those of Admin an admin's. Who has none is refused before the message is received.

Tokenize and Detokenize are unary for clients, and streams of one message for the server: the handler of a unary method
ends before gRPC sends its answer, so nothing would bound the answers that clients do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from baton.errors import BatonError, CorruptFrame, InvalidRequest, PermissionDenied
from baton.pb import inference_pb2
from baton.rpc.admin import ADMIN_SERVICE
from baton.rpc.convert import (
    add_token,
    cache_policy_from_proto,
    finish_to_proto,
    pieces,
    progress_to_proto,
    sampling_from_proto,
    split,
    timings_to_proto,
    usage_to_proto,
)
from baton.rpc.errors import begin, shadow, utf8_pieces, write
from router.output import ChoiceUpdate, Update
from router.serving.front_door import HEADER, FrontDoor, Tenants
from router.serving.validator import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt

M = TypeVar("M", bound=Message)

SERVICE = "baton.v1.Inference"
_LONG_BYTES = 1 << 18
_FEW_MESSAGES = 64
_TOKEN_IDS = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["token_ids"].number
_LONG_IDS = inference_pb2.TokenIds.DESCRIPTOR.fields_by_name["long_ids"].number
OPEN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)


@dataclass(frozen=True, slots=True)
class Sized(Generic[M]):
    """A message, and the bytes it came in. Their number is noted because `ByteSize` serializes all of the message.

    `long_ids` are the token ids of a long prompt, and `texts` its text, or the texts of its chat, in bytes that are not
    checked. The message then lacks them.
    """

    message: M
    size: int
    long_ids: Sequence[int] = ()
    texts: Sequence[bytes] = ()


def sized(kind: type[M]) -> Callable[[bytes], Sized[M]]:
    """The deserializer of messages of a kind that may have a text or a chat.

    To check that 5 MB are UTF-8, as the generated class does, takes 5 ms of the event loop or more.
    """
    numbers = [kind.DESCRIPTOR.fields_by_name[name].number for name in ("text", "chat")]
    shadow(kind, b"")  # is built here and not for the first request

    def read(data: bytes) -> Sized[M]:
        if len(data) > _LONG_BYTES:
            with contextlib.suppress(CorruptFrame, DecodeError):
                if split(memoryview(data), *numbers)[1]:
                    unread = shadow(kind, data)
                    texts = _take_texts(unread)
                    return Sized(kind.FromString(unread.SerializeToString()), len(data), texts=texts)
        return Sized(kind.FromString(data), len(data))

    return read


def _take_texts(unread: Any) -> list[bytes]:
    """Remove from a shadow its text, or the texts of a chat of few messages."""
    places = [(unread, "text")] if unread.HasField("text") else [(each, "content") for each in unread.chat.messages]
    if len(places) > _FEW_MESSAGES:
        return []
    texts = [getattr(place, name) for place, name in places]
    for place, name in places:
        setattr(place, name, b"")
    return texts


_sized_request = sized(inference_pb2.GenerateRequest)


def sized_prompt(data: bytes) -> Sized[inference_pb2.GenerateRequest]:
    """The deserializer of requests to generate. Ids of fixed width stay where they are: the generated class would copy
    megabytes of them, on the event loop.
    """
    message = inference_pb2.GenerateRequest
    if len(data) > _LONG_BYTES and sys.byteorder == "little":
        with contextlib.suppress(CorruptFrame, KeyError, TypeError):
            rest, found = split(memoryview(data), _TOKEN_IDS)
            others, ids = split(found[_TOKEN_IDS], _LONG_IDS)
            read = message.FromString(rest)
            if not others and read.WhichOneof("prompt") is None:
                read.token_ids.SetInParent()
                return Sized(read, len(data), ids[_LONG_IDS].cast("I"))
    return _sized_request(data)


class InferenceServicer:
    """Serves gRPC clients."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        # As streams of messages, so that a call is counted before its message is received.
        handlers = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._counted(self.Generate),
                request_deserializer=sized_prompt,
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            ),
            "Tokenize": grpc.stream_stream_rpc_method_handler(
                self._counted(self.Tokenize),
                request_deserializer=sized(inference_pb2.TokenizeRequest),
            ),
            "Detokenize": grpc.stream_stream_rpc_method_handler(
                self._counted(self.Detokenize),
                request_deserializer=inference_pb2.DetokenizeRequest.FromString,
                response_serializer=inference_pb2.DetokenizeResponse.SerializeToString,
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel,
                request_deserializer=inference_pb2.GetModelRequest.FromString,
                response_serializer=inference_pb2.GetModelResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _counted(self, serve: Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]) -> Any:
        """A handler that receives the message of a call while the call counts as a stream of its tenant."""

        async def receive(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            with self._door.receive(self._door.authenticate(_metadata(context))):
                sent = await anext(messages, None)
            if sent is None:
                raise InvalidRequest("message", "is missing")
            await serve(sent, context)

        return receive

    async def Generate(self, sent: Sized[inference_pb2.GenerateRequest], context: grpc.aio.ServicerContext) -> None:
        """Stream the completion of one prompt."""
        remaining, caller = context.time_remaining(), self._door.authenticate(_metadata(context))
        deadline = None if remaining is None else asyncio.get_running_loop().time() + remaining
        request = generate_request(sent.message, sent.size, sent.long_ids, sent.texts)
        async with self._door.generate(request, caller, deadline) as (request_id, updates):
            begun = False
            async for update in updates:
                if not begun:
                    await begin(context)
                    begun = True
                await write(context, _response(request_id, update))

    async def Tokenize(self, sent: Sized[inference_pb2.TokenizeRequest], context: grpc.aio.ServicerContext) -> None:
        """Tokenize a text or a chat."""
        caller, prompt = self._door.authenticate(_metadata(context)), tokenize_prompt(sent.message, sent.texts)
        async with self._door.tokenize(prompt, sent.size, caller, model=sent.message.model) as answers:
            async for token_ids in answers:
                await begin(context)
                parts = []
                for piece in pieces(token_ids):
                    parts.append(inference_pb2.TokenizeResponse(token_ids=piece).SerializeToString())
                    # All of a million would hold the event loop for 35 ms.
                    await asyncio.sleep(0)
                # Messages one after the other are one message, of which a repeated field has all elements.
                await write(context, b"".join(parts))

    async def Detokenize(self, message: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext) -> None:
        """Turn token ids into text."""
        caller = self._door.authenticate(_metadata(context))
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        async with self._door.detokenize(
            message.token_ids, caller, skip_special_tokens=skip, model=message.model
        ) as answers:
            async for text in answers:
                await begin(context)
                await write(context, inference_pb2.DetokenizeResponse(text=text))

    async def GetModel(
        self, message: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        """Describe the served model; the fingerprint is empty while no worker is there."""
        model = self._door.model(message.model)
        return inference_pb2.GetModelResponse(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=model.has_chat_template,
            fingerprint=model.fingerprint,
        )


class ApiKeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the key that their method needs; use it inside `ErrorInterceptor`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The handler of the call, or one that refuses it."""
        handler = await continuation(details)
        service = details.method.rpartition("/")[0].lstrip("/")
        if handler is None or service in OPEN_SERVICES:
            return handler
        try:
            caller = self._tenants.caller(_authorization(details.invocation_metadata))
            if service == ADMIN_SERVICE and not caller.admin:
                raise PermissionDenied(f"{service}: needs an admin's API key")
        except BatonError as error:
            return _refusal(error)
        return handler


def _refusal(error: BatonError) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        raise error

    # Of whatever kind the method is, on the wire it is a stream, of which nothing need be received to refuse it.
    return grpc.stream_stream_rpc_method_handler(refuse)


def generate_request(
    message: inference_pb2.GenerateRequest, size: int, long_ids: Sequence[int] = (), texts: Sequence[bytes] = ()
) -> GenerateRequest:
    """The request in a message of `size` bytes; neither a text nor a repeated field is read."""
    sampling = message.sampling
    prompt: Prompt | None = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(_text(message, texts))
        case "chat":
            prompt = _chat(message.chat, texts)
        case "token_ids":
            ids, long_ids = message.token_ids.ids, long_ids or message.token_ids.long_ids
            if ids and long_ids:
                raise InvalidRequest("token_ids", "ids and long_ids can't both be set")
            prompt = TokenPrompt(ids or long_ids)
    return GenerateRequest(
        prompt=prompt,
        size=size,
        make_params=partial(sampling_from_proto, sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        allowed_tokens=len(sampling.allowed_token_ids),
        model=message.model,
        cache=cache_policy_from_proto(message.cache),
        cache_salt=message.cache_salt,
        report_progress=message.report_progress,
    )


def tokenize_prompt(
    message: inference_pb2.TokenizeRequest, texts: Sequence[bytes] = ()
) -> TextPrompt | ChatPrompt | None:
    """The text to tokenize."""
    match message.WhichOneof("input"):
        case "text":
            special = message.add_special_tokens if message.HasField("add_special_tokens") else True
            return TextPrompt(_text(message, texts), add_special_tokens=special)
        case "chat":
            return _chat(message.chat, texts)
    return None


def _text(message: Any, texts: Sequence[bytes]) -> Callable[[], bytes]:
    """Reads a text in UTF-8; raises InvalidRequest if it is another."""

    def read() -> bytes:
        if not texts:
            return bytes(message.text, "utf-8")
        deque(utf8_pieces("text", texts[0]), 0)
        return texts[0]

    return read


def _chat(chat: inference_pb2.Chat, texts: Sequence[bytes]) -> ChatPrompt:
    prompted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(chat.messages, add_generation_prompt=prompted, contents=texts)


def _metadata(context: grpc.aio.ServicerContext) -> list[str]:
    return _authorization(context.invocation_metadata() or ())


def _authorization(metadata: Sequence[tuple[str, str | bytes]]) -> list[str]:
    return [str(value) for name, value in metadata if name == HEADER]


def _response(request_id: str, update: Update) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(request_id=request_id)
    for delta in update.deltas.values():
        _add_delta(response, delta)
    for token in update.prompt_tokens:
        add_token(response.prompt_tokens, token)
    if update.progress is not None:
        response.prefill_progress.CopyFrom(progress_to_proto(update.progress))
    if update.usage is not None:
        response.usage.CopyFrom(usage_to_proto(update.usage))
    if update.timings is not None:
        response.timings.CopyFrom(timings_to_proto(update.timings))
    return response


def _add_delta(response: inference_pb2.GenerateResponse, delta: ChoiceUpdate) -> None:
    message = response.choices.add(index=delta.index, text=delta.text, finish_reason=finish_to_proto(delta.finish))
    for token in delta.tokens:
        add_token(message.tokens, token)
    if delta.stop_string is not None:
        message.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id
