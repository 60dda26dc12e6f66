"""The public API over gRPC: checks keys, and translates between messages and the front door.

`ApiKeyGuard` stands before every method of the listener, so that a new one can't be forgotten: all but health and
reflection need a key, and those of Admin an admin's. A caller without such a key is refused before its message is
received.

Tokenize and Detokenize are unary for clients, and streams of one message for the server: the handler of a unary method
ends before gRPC sends its answer, so nothing would bound the answers that clients do not read.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from baton.errors import BatonError, InvalidRequest, PermissionDenied, Unauthenticated
from baton.pb import inference_pb2
from baton.request import MAX_TEMPLATE_JSON, check_length, pieces
from baton.rpc.admin import ADMIN_SERVICE
from baton.rpc.convert import (
    add_token,
    cache_policy_from_proto,
    finish_to_proto,
    progress_to_proto,
    sampling_from_proto,
    timings_to_proto,
    usage_to_proto,
)
from baton.rpc.errors import send, send_initial_metadata, utf8_pieces
from baton.telemetry.metrics import REFUSED
from router.output import ChoiceUpdate, Update
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, UncheckedRequest
from router.serving.front_door import HEADER, ApiKeys, Caller, FrontDoor
from router.serving.large_messages import ReceivedMessage, deserializer_for

SERVICE = "baton.v1.Inference"
OPEN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)


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
                request_deserializer=deserializer_for(inference_pb2.GenerateRequest),
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            ),
            "Tokenize": grpc.stream_stream_rpc_method_handler(
                self._counted(self.Tokenize),
                request_deserializer=deserializer_for(inference_pb2.TokenizeRequest),
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

    def _counted(self, serve: Callable[[Any, Caller, grpc.aio.ServicerContext], Awaitable[None]]) -> Any:
        """A handler that finds the caller, and counts the call as a stream of its tenant while the message comes."""

        async def receive(messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            caller = self._door.authenticate(_authorization(context.invocation_metadata() or ()))
            with self._door.count_receiving(caller):
                received = await anext(messages, None)
            if received is None:
                raise InvalidRequest("message", "is missing")
            await serve(received, caller, context)

        return receive

    async def Generate(
        self,
        received: ReceivedMessage[inference_pb2.GenerateRequest],
        caller: Caller,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Stream the completion of one prompt."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else asyncio.get_running_loop().time() + remaining
        request = generate_request(received)
        async with self._door.generate(request, caller, deadline) as (checked, updates):
            begun = False
            async for update in updates:
                if not begun:
                    await send_initial_metadata(context)
                    begun = True
                await send(context, _response(checked.id, update))

    async def Tokenize(
        self,
        received: ReceivedMessage[inference_pb2.TokenizeRequest],
        caller: Caller,
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Tokenize a text or a chat."""
        prompt = tokenize_prompt(received)
        async with self._door.tokenize(prompt, received.size, caller, model=received.message.model) as answers:
            async for token_ids in answers:
                await send_initial_metadata(context)
                parts = []
                for piece in pieces(token_ids):
                    parts.append(inference_pb2.TokenizeResponse(token_ids=piece).SerializeToString())
                    # All of a million would hold the event loop for 35 ms.
                    await asyncio.sleep(0)
                # Protobuf merges concatenated messages: the repeated field gets the elements of all of them.
                await send(context, b"".join(parts))

    async def Detokenize(
        self, message: inference_pb2.DetokenizeRequest, caller: Caller, context: grpc.aio.ServicerContext
    ) -> None:
        """Turn token ids into text."""
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        async with self._door.detokenize(
            message.token_ids, caller, skip_special_tokens=skip, model=message.model
        ) as answers:
            async for text in answers:
                await send_initial_metadata(context)
                await send(context, inference_pb2.DetokenizeResponse(text=text))

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
            workers=[inference_pb2.WorkerGroup(**asdict(group)) for group in model.workers],
        )


class ApiKeyGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the key that their method needs; use it inside `ErrorInterceptor`."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The handler of the call, or one that refuses it."""
        handler = await continuation(details)
        service = details.method.rpartition("/")[0].lstrip("/")
        if handler is None or service in OPEN_SERVICES:
            return handler
        try:
            caller = self._api_keys.caller(_authorization(details.invocation_metadata))
            if service == ADMIN_SERVICE and not caller.admin:
                raise PermissionDenied(f"{service}: needs an admin's API key")
        except BatonError as error:
            if isinstance(error, Unauthenticated):
                REFUSED.labels("", "unauthenticated").inc()
            return _refusal(error)
        return handler


def _refusal(error: BatonError) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        raise error

    # On the wire every method is a stream. So a stream handler can refuse any method, before it receives a message.
    return grpc.stream_stream_rpc_method_handler(refuse)


def generate_request(received: ReceivedMessage[inference_pb2.GenerateRequest]) -> UncheckedRequest:
    """The request in a message; neither a text nor a repeated field is read."""
    message, sampling = received.message, received.message.sampling
    prompt: Prompt | None = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(_text(received))
        case "chat":
            prompt = _chat(received)
        case "token_ids":
            ids, long_ids = message.token_ids.ids, received.long_ids or message.token_ids.long_ids
            if ids and long_ids:
                raise InvalidRequest("token_ids", "ids and long_ids can't both be set")
            prompt = TokenPrompt(ids or long_ids)
    return UncheckedRequest(
        prompt=prompt,
        size=received.size,
        make_params=partial(sampling_from_proto, sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        allowed_tokens=len(sampling.allowed_token_ids),
        model=message.model,
        cache=cache_policy_from_proto(message.cache),
        cache_salt=message.cache_salt,
        report_progress=message.report_progress,
    )


def tokenize_prompt(received: ReceivedMessage[inference_pb2.TokenizeRequest]) -> TextPrompt | ChatPrompt | None:
    """The text to tokenize."""
    message = received.message
    match message.WhichOneof("input"):
        case "text":
            special = message.add_special_tokens if message.HasField("add_special_tokens") else True
            return TextPrompt(_text(received), add_special_tokens=special)
        case "chat":
            return _chat(received)
    return None


def _text(received: ReceivedMessage[Any]) -> Callable[[], bytes]:
    """A function that returns the text of a message in UTF-8; it raises InvalidRequest for other bytes."""

    def read() -> bytes:
        if not received.texts:
            return bytes(received.message.text, "utf-8")
        deque(utf8_pieces("text", received.texts[0]), 0)
        return received.texts[0]

    return read


def _chat(received: ReceivedMessage[Any]) -> ChatPrompt:
    chat = received.message.chat
    prompted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    arguments = _template_arguments(chat.chat_template_kwargs)
    return ChatPrompt(len(chat.messages), partial(_messages, received), prompted, arguments)


def _template_arguments(given: str) -> dict[str, Any]:
    check_length("chat_template_kwargs", given, MAX_TEMPLATE_JSON)
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("chat_template_kwargs", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("chat_template_kwargs", "must be a JSON object", found)
    return found


def _messages(received: ReceivedMessage[Any]) -> list[dict[str, str]]:
    """Role and content of each message of a chat."""
    messages = received.message.chat.messages
    contents = [
        "".join(utf8_pieces(f"chat.messages[{index}].content", data)) for index, data in enumerate(received.texts)
    ] or [message.content for message in messages]
    return [{"role": each.role, "content": text} for each, text in zip(messages, contents, strict=True)]


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
