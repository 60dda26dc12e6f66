"""Conversion between Baton's errors and gRPC statuses; no other module converts.

On a server, `ErrorInterceptor` wraps every handler:

    request bytes ── strict deserializer ── handler ── BatonError       its status, the message as details
                          │ undecodable              ├ CancelledError   passes through
                          └── INVALID_ARGUMENT       └ anything else    logged with traceback, INTERNAL

gRPC receives the bytes of a request, the deserializer parses them, and the handler reads the message. Each of these
takes milliseconds for a prompt of a million tokens. So each has a turn of the event loop to itself, if the request is
large and the handler gets a single one.

gRPC itself would answer INTERNAL to bytes that can't be parsed, and would not call the handler. So it hands the bytes
to the wrapper, which parses them.

A streaming handler is closed before its call ends, so that its `finally` runs as soon as the client is gone, and not
when the garbage collector runs. On a client, `from_rpc_error` turns a failed call into the same exception that the
server raised.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from baton import errors
from baton.errors import InvalidRequest
from baton.telemetry.logs import about

RETRY_AFTER = "retry-after"
"""Trailing metadata of a refusal: seconds after which a retry makes sense, as a decimal number."""

_NOT_ACCEPTED = "CANCELLED"
"""gRPC's message when a server that stops cancels a call that was on its way."""

_DETAILS_BYTES = 2000

_LARGE_BYTES = 64 << 10
"""Size of requests from which on they are received, parsed and read in turns of their own."""

_PAUSE_S = 0.0001
"""Pause between these turns, in seconds.

`sleep(0)` is not enough: the next turn would run before timers and messages that are due.
"""

_ABORT_S = 1.0
"""Longest wait of a handler until its status was sent."""

_logger = logging.getLogger(__name__)

_CLASSES: dict[str, Callable[[str], errors.BatonError]] = {
    cls.grpc_status: cls
    for cls in (
        errors.NotFound,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.Unavailable,
        errors.Unsupported,
        errors.TransferError,
    )
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Adds the error mapping and the strict deserializer to every handler of a server."""

    def __init__(self, admit: Callable[[Any], None] | None = None) -> None:
        """`admit` is called with the context of each call before its handler, and raises to refuse the call."""
        self._admit = admit
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the handler of the call, wrapped."""
        handler = await continuation(details)
        if handler is None:
            return None
        known = self._wrapped.get(details.method)
        if known is None or known[0] is not handler:
            wrapped = _wrap(handler, details.method, self._running, self._admit)
            known = self._wrapped[details.method] = (handler, wrapped)
        return known[1]

    async def wait_ended(self, timeout: float) -> None:
        """Wait until no handler runs; log the handlers that still run after `timeout` seconds."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=timeout)
            for task in late:
                _logger.error("a handler has not ended %s s after its server: %r", timeout, task)


async def send(context: Any, response: Any) -> None:
    """Send a response from a handler; raises CancelledError when the client has gone."""
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        # When a client leaves, sending fails, often before gRPC cancels the handler.
        raise asyncio.CancelledError from error


async def send_initial_metadata(context: Any) -> None:
    """Send the initial metadata before the first response; raises CancelledError when the client has gone.

    Otherwise gRPC sends both together, and can't end the call with a status while the client does not read them.
    """
    try:
        await context.send_initial_metadata(())
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def status_of(error: errors.BatonError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


def from_rpc_error(error: grpc.RpcError) -> errors.BatonError:
    """The Baton error of a failed call; BatonError if the status has no class of its own."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field, separator, problem = details.partition(": ")
        return errors.InvalidRequest(field, problem) if separator else errors.InvalidRequest("request", details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Overloaded(details, _retry_after(error))
    if code is grpc.StatusCode.INTERNAL:
        return errors.BatonError(details)
    if code is grpc.StatusCode.CANCELLED and details == _NOT_ACCEPTED:
        return errors.Unavailable("the server stops, and does not serve the call; send it again")
    make = _CLASSES.get(code.name)
    return make(details) if make else errors.BatonError(f"{code.name}: {details}")


def _retry_after(error: grpc.RpcError) -> float | None:
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_AFTER:
            try:
                return float(value)
            except ValueError:
                return None
    return None


def _wrap(handler: Any, method: str, running: set[asyncio.Task[Any]], admit: Callable[[Any], None] | None) -> Any:
    behaviour, make = _behaviour(handler)
    if not (inspect.isasyncgenfunction(behaviour) or inspect.iscoroutinefunction(behaviour)):
        # Without the wrapper, it would also serve callers that `admit` refuses.
        raise TypeError(f"the handler of {method} is not async")
    decode = strict(handler.request_deserializer)
    return make(
        _guard(behaviour, method, running, admit, decode, stream_in=handler.request_streaming),
        response_serializer=handler.response_serializer,
    )


def _behaviour(handler: Any) -> tuple[Any, Any]:
    """The handler's function and the factory for handlers of its kind."""
    kinds = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    return kinds[handler.request_streaming, handler.response_streaming]


def _guard(
    behaviour: Any,
    method: str,
    running: set[asyncio.Task[Any]],
    admit: Callable[[Any], None] | None,
    decode: Deserializer | None,
    *,
    stream_in: bool,
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        _add_current(running)
        try:
            if admit is not None:
                admit(context)
            request = _Decoded(request, decode) if stream_in else await _decode(request, decode)
            if not inspect.isasyncgenfunction(behaviour):
                return await behaviour(request, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await send(context, response)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            # gRPC keeps the exception that ends the call. It refers to this frame, and the frame to the call: a cycle
            # that only the garbage collector ends. The messages must be freed before that.
            name = getattr(request, "request_id", "")
            request = response = responses = None
            await _abort(context, error, method, *filter(None, (name,)))

    return call


def _add_current(running: set[asyncio.Task[Any]]) -> None:
    """Add the current task until it has ended; a handler that knew its own task would be part of a cycle."""
    if (task := asyncio.current_task()) is not None:
        running.add(task)
        task.add_done_callback(running.discard)


async def _decode(data: bytes, decode: Deserializer | None) -> Any:
    """The request in `data`; raises InvalidRequest."""
    large = len(data) >= _LARGE_BYTES
    if large:
        await asyncio.sleep(_PAUSE_S)
    request = decode(data) if decode else data
    if large:
        await asyncio.sleep(_PAUSE_S)
    return request


class _Decoded:
    """A stream of requests that decodes each one; raises InvalidRequest."""

    def __init__(self, requests: AsyncIterable[Any], decode: Deserializer | None) -> None:
        self._stream = requests
        self._decode = decode
        self._requests: AsyncIterator[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._requests is None:
            # gRPC warns about an iterator that is created and not used, for example by a handler that refuses at once.
            self._requests = aiter(self._stream)
        try:
            data = await anext(self._requests)
        except grpc.aio.UsageError:
            raise
        except grpc.aio.BaseError as error:
            # The server has stopped, or the call has ended.
            raise asyncio.CancelledError from error
        return self._decode(data) if self._decode else data


async def _abort(context: Any, error: Exception, method: str, *names: str) -> NoReturn:
    """End the call with the status of an error; `names` has the request's id, if its message tells it."""
    if context.cancelled() or context.done():
        # The client has gone, and gRPC refuses to abort a call that has ended.
        raise asyncio.CancelledError from error
    if not isinstance(error, errors.BatonError):
        _logger.error("%s raised an unexpected error", method, exc_info=error, extra=about(*names))
        cause, error = error, errors.unexpected(error, method)
        _forget_frames(cause)
    _forget_frames(error)
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, errors.Overloaded) and error.retry_after is not None:
        metadata = ((RETRY_AFTER, f"{error.retry_after:.3f}"),)
    try:
        async with asyncio.timeout(_ABORT_S):
            await context.abort(status_of(error), _details(error), metadata)
    except (grpc.aio.InternalError, TimeoutError) as ended:
        # The call has ended since: its deadline passed, or the client left. Or the status is sent, but waits behind
        # messages that the client does not read.
        raise asyncio.CancelledError from ended
    raise error


def _forget_frames(error: BaseException) -> None:
    """Drop an error's tracebacks and causes: tracebacks keep the frames of handlers alive, and these keep messages."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def _details(error: Exception) -> str:
    # Details travel in a header, whose size is limited; a longer one would replace the status by another.
    text = str(error) or type(error).__name__
    return text.encode("utf-8", "backslashreplace")[:_DETAILS_BYTES].decode("utf-8", "ignore")


Deserializer = Callable[[bytes], object]

_SHOWN_BYTES = 8
_PIECE_BYTES = 64 << 10


def strict(deserializer: Deserializer | None) -> Deserializer | None:
    """`deserializer`, which raises InvalidRequest for bytes that are no message; None, for raw bytes, stays None."""
    if deserializer is None:
        return None

    def decode(data: bytes) -> object:
        try:
            return deserializer(data)
        except DecodeError as error:
            # Protobuf does not name the field.
            if "UTF-8" in str(error):
                problem = f"a text field of the message ({len(data)} bytes) is not valid UTF-8"
            else:
                problem = f"not a valid message ({len(data)} bytes): {error}"
            raise InvalidRequest("request", problem) from None

    return decode


def utf8_pieces(path: str, data: bytes) -> Iterator[str]:
    """The text in `data` in pieces, between which other threads run; `path` is the field that held it.

    Raises InvalidRequest at the first piece that is not UTF-8.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            yield decode(data[start : start + _PIECE_BYTES])
        decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _find_invalid_utf8(path, data) or error from None


def _find_invalid_utf8(path: str, value: bytes) -> InvalidRequest | None:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as error:
        seen = value[error.start : error.start + _SHOWN_BYTES]
        return InvalidRequest(path, f"not valid UTF-8 at byte {error.start}", seen)
    return None
