"""The public API of a router: validates through the intake, runs the pipeline, translates.

Tokenize and Detokenize are unary for clients, and streams of one message for the server: the handler of a unary method
ends before gRPC sends its answer, so nothing would bound the answers that clients do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
from google.protobuf.message import Message

from baton.errors import BatonError, Unavailable
from baton.pb import inference_pb2
from baton.rpc.convert import add_token, finish_to_proto, timings_to_proto, usage_to_proto
from baton.rpc.errors import begin, write
from baton.telemetry.metrics import REQUESTS
from router.dispatcher import Dispatcher
from router.output.processor import Emission
from router.output.queue import Delta, News, Outbox
from router.pipeline import Pipeline
from router.request import Request
from router.serving.stalls import Stalls, Stream
from router.serving.tenants import Caller, Tenants
from router.serving.validator import Intake, Model
from router.workers.pool import Pool

SERVICE = "baton.v1.Inference"


class InferenceServicer:
    """Serves clients."""

    def __init__(
        self,
        model: Model,
        intake: Intake,
        pool: Pool,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        tenants: Tenants,
        stalls: Stalls,
    ) -> None:
        self._model = model
        self._intake = intake
        self._pool = pool
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._tenants = tenants
        self._stalls = stalls
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate,
                request_deserializer=inference_pb2.GenerateRequest.FromString,
                response_serializer=inference_pb2.GenerateResponse.SerializeToString,
            ),
            "Tokenize": grpc.unary_stream_rpc_method_handler(
                self.Tokenize,
                request_deserializer=inference_pb2.TokenizeRequest.FromString,
                response_serializer=inference_pb2.TokenizeResponse.SerializeToString,
            ),
            "Detokenize": grpc.unary_stream_rpc_method_handler(
                self.Detokenize,
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

    @property
    def running(self) -> int:
        """Calls that a drain would wait for."""
        return self._running

    async def drain(self) -> None:
        """Refuse new requests, and return when the running ones have ended."""
        self._draining = self._stalls.draining = True
        await self._idle.wait()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Stream the completion of one prompt."""
        status = "CANCELLED"
        try:
            async with self._accepted(request, context) as (accepted, outbox, stream):
                news = await outbox.take()
                await begin(context)
                while news.usage is None:
                    await stream.write(write(context, _response(accepted.id, news)))
                    news = await outbox.take()
                await stream.write(write(context, _response(accepted.id, news)))
            status = "OK"
        except BatonError as error:
            status = error.grpc_status
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            REQUESTS.labels(status).inc()

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext) -> None:
        """Turn a text or a chat into token ids."""
        with self._admitted(context) as caller:
            token_ids = await self._intake.tokenize(request, caller.tenant)
            await self._answer(context, inference_pb2.TokenizeResponse(token_ids=token_ids))

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext) -> None:
        """Turn token ids into text."""
        with self._admitted(context) as caller:
            text = await self._intake.detokenize(request, caller.tenant)
            await self._answer(context, inference_pb2.DetokenizeResponse(text=text))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        """Describe the served model; the fingerprint is empty while no worker is there."""
        self._intake.check_model(request.model)
        tokenizer, identities = self._model.tokenizer, self._pool.identities
        return inference_pb2.GetModelResponse(
            name=self._model.name,
            max_model_len=self._intake.max_model_len(),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            fingerprint=identities[0].fingerprint if identities else "",
        )

    async def _answer(self, context: grpc.aio.ServicerContext, response: Message) -> None:
        """Send the only message of a call, and return when the client has taken it."""
        await begin(context)
        async with self._stalls.stream(lambda: True) as stream:
            await stream.write(write(context, response))

    @contextlib.contextmanager
    def _admitted(self, context: grpc.aio.ServicerContext) -> Iterator[Caller]:
        """A call that counts as one of its tenant's streams, and that a drain waits for."""
        caller = self._tenants.caller(context.invocation_metadata() or ())
        if self._draining:
            raise Unavailable("the router is draining")
        self._running += 1
        self._idle.clear()
        try:
            with self._tenants.stream(caller):
                yield caller
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def _accepted(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[Request, Outbox, Stream]]:
        """A request being served, from its checks until its client has all or is gone."""
        now = asyncio.get_running_loop().time
        arrived, remaining = now(), context.time_remaining()
        with self._admitted(context) as caller:
            self._intake.check_model(message.model)
            self._dispatcher.check(caller.tenant, decodes=message.sampling.max_tokens != 1)
            deadline = None if remaining is None else arrived + remaining
            request = await self._intake.request(message, arrived=arrived, deadline=deadline, tenant=caller.tenant)
            emission = Emission(request, now)
            serving = asyncio.create_task(self._pipeline.run(request, emission), name=f"request {request.id}")
            try:
                async with self._stalls.stream(serving.done) as stream:
                    yield request, emission.outbox, stream
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


def _response(request_id: str, news: News) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(request_id=request_id)
    for delta in news.deltas.values():
        _add_delta(response, delta)
    for token in news.prompt_tokens:
        add_token(response.prompt_tokens, token)
    if news.usage is not None:
        response.usage.CopyFrom(usage_to_proto(news.usage))
    if news.timings is not None:
        response.timings.CopyFrom(timings_to_proto(news.timings))
    return response


def _add_delta(response: inference_pb2.GenerateResponse, delta: Delta) -> None:
    message = response.choices.add(index=delta.index, text=delta.text, finish_reason=finish_to_proto(delta.finish))
    for token in delta.tokens:
        add_token(message.tokens, token)
    if delta.stop_string is not None:
        message.stop_string = delta.stop_string
    elif delta.stop_token_id is not None:
        message.stop_token_id = delta.stop_token_id
