"""Listeners over real sockets: errors, bad requests, health, reflection, addresses, graceful stop."""

import asyncio
import gc
import json
import logging
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import errors
from baton.pb import inference_pb2 as pb
from baton.pb import inference_pb2_grpc
from baton.process.sockets import bind
from baton.rpc.channel import control_channel, kv_channel
from baton.rpc.errors import ErrorInterceptor, from_rpc_error
from baton.rpc.server import Listener, listen

INFERENCE = "baton.v1.Inference"


class Service(inference_pb2_grpc.InferenceServicer):
    """Raises what it is told to raise; its stream goes on until it is closed."""

    def __init__(self, error: Exception | None = None, say: int = 1) -> None:
        self.error, self.say = error, say
        self.closed = asyncio.Event()
        self.tasks: set[asyncio.Task[Any] | None] = set()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        if self.error:
            raise self.error
        return pb.TokenizeResponse(token_ids=[1, 2, 3])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.tasks.add(asyncio.current_task())
        try:
            for _ in range(self.say):
                yield pb.GenerateResponse(request_id="r")
            if self.error:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.tasks.add(asyncio.current_task())
            self.closed.set()

    async def echo(self, requests: AsyncIterator[pb.TokenizeRequest], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield pb.TokenizeResponse(token_ids=[len(request.text)])

    def add(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)


class Turns:
    """Counts the turns of the event loop from `start` on, and notes in which one something happens."""

    def __init__(self) -> None:
        self.now = 0
        self.noted: list[int] = []

    def start(self) -> None:
        self.now += 1
        asyncio.get_running_loop().call_soon(self.start)

    def note(self, *_: object) -> None:
        self.noted.append(self.now)


def serving(service: Service, address: str = "127.0.0.1:0", **keywords: Any) -> AbstractAsyncContextManager[Listener]:
    return listen(address, insecure=False, add=service.add, services=[INFERENCE], **keywords)


async def failure(service: Service, *, stream: bool) -> grpc.aio.AioRpcError:
    async with serving(service) as listener, control_channel(listener.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (stream_to_end if stream else unary)(inference_pb2_grpc.InferenceStub(channel))
    return caught.value


@pytest.mark.parametrize("size", [1, 1 << 20])
async def test_a_large_request_is_received_parsed_and_read_in_turns_of_their_own(size: int) -> None:
    turns = Turns()

    def parse(data: bytes) -> bytes:
        turns.note()
        return data

    async def handle(request: bytes, context: Any) -> bytes:
        turns.note()
        return b""

    async def find(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(handle, request_deserializer=parse)

    wrapped = await ErrorInterceptor(turns.note).intercept_service(find, SimpleNamespace(method="/a.Service/Method"))
    turns.start()
    assert await wrapped.unary_unary(b"x" * size, None) == b""
    admitted, parsed, read = turns.noted
    assert (admitted < parsed < read) if size > 1 else (admitted == parsed == read)


async def unary(stub: Any) -> None:
    await stub.Tokenize(pb.TokenizeRequest(text="x"))


async def stream_to_end(stub: Any) -> None:
    async for _ in stub.Generate(pb.GenerateRequest(text="x")):
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("top_p", "must be in (0, 1]", 2.0),
        errors.NotFound("no model 'x'"),
        errors.Overloaded("the queue is full", retry_after=0.25),
        errors.OutOfPages(9, 1, 4),
        errors.DeadlineExceeded("too late"),
        errors.Cancelled("the caller left"),
        errors.Unavailable("no decode worker"),
        errors.Unsupported("a router caches no KV"),
        errors.StaleIncarnation("restarted"),
        errors.EngineError("out of memory: ünïcode"),
    ],
)
async def test_errors_keep_status_message_and_class(error: errors.BatonError, stream: bool) -> None:
    failed = await failure(Service(error), stream=stream)
    assert failed.code() is grpc.StatusCode[error.grpc_status]
    assert failed.details() == str(error)
    back = from_rpc_error(failed)
    assert str(back) == str(error)
    assert back.grpc_status == error.grpc_status
    if isinstance(error, errors.InvalidRequest):
        assert isinstance(back, errors.InvalidRequest)
        assert back.field == error.field
    if isinstance(error, errors.Overloaded):
        assert isinstance(back, errors.Overloaded)
        assert back.retry_after == error.retry_after


@pytest.mark.parametrize("stream", [False, True])
async def test_the_unexpected_is_logged_and_not_shown(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "baton.rpc.errors"):
        failed = await failure(Service(ValueError("secret detail")), stream=stream)
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failed.details()
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


async def test_the_log_names_the_request_of_a_message(caplog: pytest.LogCaptureFixture) -> None:
    async def unary(request: Any, context: Any) -> bytes:
        raise KeyError

    handler = grpc.unary_unary_rpc_method_handler(unary, lambda data: SimpleNamespace(request_id=data.decode()))

    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Unary": handler}),))

    async with (
        listen("127.0.0.1:0", insecure=False, add=add, services=[]) as listener,
        control_channel(listener.address) as channel,
    ):
        assert await channel.unary_unary("/test/Unary")(b"r7").code() is grpc.StatusCode.INTERNAL
    (record,) = (each for each in caplog.records if each.name == "baton.rpc.errors")
    assert vars(record)["request_ids"] == ("r7",)


async def test_clients_that_leave_unread_what_they_were_sent_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Service):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
            while True:
                yield pb.GenerateResponse(request_id="r" * 20_000)

    async def leave(address: str, after_s: float) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
            await call.read()
            await asyncio.sleep(after_s)
            call.cancel()

    with caplog.at_level(logging.ERROR, "baton.rpc.errors"):
        async with serving(Endless()) as listener:
            # Whether gRPC fails the write first or cancels the handler is chance: many leave, and not all at once.
            await asyncio.gather(*(leave(listener.address, 0.006 * number) for number in range(50)))
    assert not caplog.records


async def test_a_very_long_message_keeps_its_status() -> None:
    failed = await failure(Service(errors.NotFound("ü" * 100_000)), stream=False)
    assert failed.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
async def test_invalid_utf8_is_an_invalid_argument(method: str) -> None:
    async with serving(Service()) as listener, control_channel(listener.address) as channel:
        kind = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(f"/{INFERENCE}/{method}")(b"\x12\x03ab\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if method == "Generate" else call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "request: a text field of the message (5 bytes) is not valid UTF-8"


async def test_invalid_utf8_within_a_stream_of_requests() -> None:
    service = Service()

    def add(server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            service.echo, pb.TokenizeRequest.FromString, pb.TokenizeResponse.SerializeToString
        )
        handlers = {"Tokenize": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))

    async with (
        listen("127.0.0.1:0", insecure=False, add=add, services=[INFERENCE]) as listener,
        control_channel(listener.address) as channel,
    ):
        call = channel.stream_stream(f"/{INFERENCE}/Tokenize")()
        await call.write(pb.TokenizeRequest(text="four").SerializeToString())
        assert pb.TokenizeResponse.FromString(await call.read()).token_ids == [4]
        await call.write(b"\x12\x01\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "request: a text field of the message (3 bytes) is not valid UTF-8"


async def test_a_read_from_a_stopped_server_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC has an exception without a public name for it."""

    class Stopped(grpc.aio.BaseError):  # type: ignore[misc]
        pass

    async def requests() -> AsyncIterator[Any]:
        raise Stopped
        yield

    async def find(_: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(Service().echo)

    handler = await ErrorInterceptor().intercept_service(find, SimpleNamespace(method=f"/{INFERENCE}/Tokenize"))
    context = SimpleNamespace(cancelled=lambda: False, done=lambda: False)
    with caplog.at_level(logging.ERROR, "baton.rpc.errors"), pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(requests(), context)
    assert not caplog.records


@pytest.mark.parametrize("say", [1, 10**9])
async def test_a_stream_is_closed_when_its_client_leaves(say: int) -> None:
    """Both while the handler waits and while it writes against flow control."""
    service = Service(say=say)
    async with serving(service) as listener, control_channel(listener.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
        assert (await call.read()).request_id == "r"
        call.cancel()
        await asyncio.wait_for(service.closed.wait(), 60)
    assert len(service.tasks) == 1, "it was left to the garbage collector"


async def test_health_follows_set_serving() -> None:
    async with serving(Service()) as listener, control_channel(listener.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        seen = [(await watch.read()).status]
        for serving_now in (True, False):
            listener.set_serving(serving_now)
            seen.append((await watch.read()).status)
        watch.cancel()
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == seen[2]
    status = health_pb2.HealthCheckResponse
    assert seen == [status.NOT_SERVING, status.SERVING, status.NOT_SERVING]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:80", "example.org:80"])
async def test_beyond_loopback_only_when_insecure(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="--insecure") as caught:
        await serving(Service(), address).__aenter__()
    assert str(caught.value).startswith(f"address: {address} can be reached")


async def test_a_taken_port_is_named() -> None:
    async with serving(Service()) as listener:
        with pytest.raises(errors.ConfigError, match=rf"^control: {listener.address} is already in use$"):
            await serving(Service(), listener.address, field="control").__aenter__()


async def test_the_stop_waits_no_longer_than_its_grace() -> None:
    service = Service()
    async with asyncio.timeout(60):
        async with serving(service, grace=0.05) as listener:
            channel = kv_channel(listener.address)
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="x"))
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await channel.close()
    assert service.closed.is_set()


async def test_a_message_over_the_limit_is_refused() -> None:
    async with serving(Service()) as listener, control_channel(listener.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{INFERENCE}/Tokenize")(bytes(65 << 20))
    assert isinstance(from_rpc_error(caught.value), errors.Overloaded)


def test_a_name_is_bound_at_the_first_of_its_addresses_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    places = [(*stream, ("192.0.2.1", 0)), (*stream, ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    with bind("localhost:0") as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
    places.pop()
    with pytest.raises(errors.ConfigError, match=r"^localhost:0 can't be bound: Cannot assign"):
        bind("localhost:0")


class Message(bytearray):
    """A request that can be watched."""


@pytest.mark.parametrize("error", [errors.Unavailable, RuntimeError])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_message_of_a_refused_call_is_gone_without_the_garbage_collector(
    stream: bool, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    # The log record of an unexpected error would keep its traceback.
    caplog.set_level(logging.CRITICAL, "baton.rpc.errors")
    gone = asyncio.Event()
    watches = []

    def message(data: bytes) -> Message:
        made = Message(data)
        watches.append(weakref.ref(made, lambda _: gone.set()))
        return made

    async def unary(request: Message, context: Any) -> bytes:
        raise error("refused") from ValueError(request)

    async def streaming(request: Message, context: Any) -> AsyncIterator[bytes]:
        if request:
            raise error("refused") from ValueError(request)
        yield b""

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, request_deserializer=message),
        "Streaming": grpc.unary_stream_rpc_method_handler(streaming, request_deserializer=message),
    }

    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))

    gc.disable()
    try:
        async with (
            listen("127.0.0.1:0", insecure=False, add=add, services=[]) as listener,
            control_channel(listener.address) as channel,
        ):
            call = channel.unary_stream("/test/Streaming") if stream else channel.unary_unary("/test/Unary")
            assert await call(b"x").code() is not grpc.StatusCode.OK
            await asyncio.wait_for(gone.wait(), 60)
    finally:
        gc.enable()


async def test_peers_connect_again_for_new_calls_and_running_ones_go_on() -> None:
    peers: list[str] = []

    class Peers(Service):
        async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
            peers.append(context.peer())
            return await super().Tokenize(request, context)

    service = Peers()
    async with (
        listen("127.0.0.1:0", insecure=False, add=service.add, services=[INFERENCE], connection_age_s=0.1) as listener,
        grpc.aio.insecure_channel(listener.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(pb.GenerateRequest())
        await stream.read()
        async with asyncio.timeout(20):
            while len(set(peers)) < 2:
                await stub.Tokenize(pb.TokenizeRequest())
                await asyncio.sleep(0.02)
        assert not stream.done()
        stream.cancel()


async def test_a_listener_that_stops_accepting_sends_its_clients_elsewhere_and_running_calls_go_on() -> None:
    """gRPC cancels calls that are on their way at this moment; a retry policy sends them again."""
    first, second, loaded = Service(), Service(), asyncio.Event()
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    retries = [("grpc.service_config", config), ("grpc.use_local_subchannel_pool", 1)]
    answers, ends, stopped = [], set(), False

    async def ask(target: str, options: list[tuple[str, Any]]) -> None:
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not stopped:
                answers.append(await stub.Tokenize(pb.TokenizeRequest()))
                if len(answers) > 200:
                    loaded.set()
            # The other listener answers this one.
            await stub.Tokenize(pb.TokenizeRequest())

    async def ask_once(target: str) -> None:
        try:
            await ask(target, retries[1:])
        except grpc.aio.AioRpcError as error:
            ends.add((error.code(), error.details() or ""))

    async with (
        listen("127.0.0.1:0", insecure=False, add=first.add, services=[INFERENCE]) as closing,
        listen("127.0.0.1:0", insecure=False, add=second.add, services=[INFERENCE]) as other,
        grpc.aio.insecure_channel(closing.address) as channel,
        asyncio.timeout(60),
    ):
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest())
        await stream.read()
        patient = [asyncio.create_task(ask(f"ipv4:{closing.address},{other.address}", retries)) for _ in range(8)]
        others = [asyncio.create_task(ask_once(closing.address)) for _ in range(8)]
        await loaded.wait()
        closing.stop_accepting()
        await asyncio.gather(*others)
        stopped = True
        await asyncio.gather(*patient)
        assert not stream.done()
        stream.cancel()
    assert all(
        (code is grpc.StatusCode.CANCELLED and details == "CANCELLED")
        or (code is grpc.StatusCode.UNAVAILABLE and "Connection refused" in details)
        for code, details in ends
    ), ends
