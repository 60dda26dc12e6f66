"""The Python client: `AsyncClient`, and `Client` with the same methods without async.

    with Client("127.0.0.1:50050") as client:
        for delta in client.generate("def fib(n):", max_tokens=64, temperature=0):
            print(delta.text, end="")

A prompt is text, token ids, or a conversation (a list of `{"role": ..., "content": ...}`). The sampling
arguments are the fields of `baton.request.SamplingParams`. `cache` says how the prefix cache is used ("read_write",
"read", "write" or "off"); only requests with the same `cache_salt` share cached KV. With `report_progress=True`,
`generate` first yields deltas that have only `progress`: how much of the prompt is computed, and the time left.
`chat_template_kwargs` are further variables of the chat template: numbers, texts, bools and None.
Methods raise the exceptions of `baton.errors`. If a value is out of range or the prompt is too large, the client raises
InvalidRequest before it sends the request. If the caller leaves the loop over a stream, or closes the stream, the
request is cancelled on the server.

A router on another machine uses TLS, and usually needs an API key:

    Client("baton.example.org:50050", ca="ca.crt", api_key=os.environ["BATON_API_KEY"])

`ca` is a PEM file with the CA that signed the router's certificate. With `tls=True` instead, gRPC's default CAs are
trusted. The certificate must name the host of `target`, or `server_name` if that is given. `cert` and `key`
are PEM files with the client's own certificate, for routers that require one. Without TLS an API key is not encrypted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.completion import Cache, Choice, Completion, Delta, Messages, Model, Prompt
from baton.errors import InvalidRequest, Unavailable
from baton.ledger import CacheReport, CacheTier, Ledger
from baton.pb import inference_pb2 as pb
from baton.pb import inference_pb2_grpc
from baton.pb.admin_pb2 import CacheRequest, ClearCacheRequest, LedgerRequest
from baton.pb.admin_pb2_grpc import AdminStub
from baton.request import CachePolicy, Sampling, TemplateArgument
from baton.rpc import calls
from baton.rpc.admin import cache_from_proto, ledger_from_proto, tiers_from_proto
from baton.rpc.calls import ClientCall, Security, client_credentials

__all__ = ["AsyncClient", "Choice", "Client", "Completion", "Delta", "Model"]


class _Connection:
    """The common part of both clients: a channel of `api` (`grpc` or `grpc.aio`), its stubs, metadata of calls."""

    def __init__(self, api: Any, target: str, model: str, api_key: str | None, security: Security) -> None:
        calls.check_target(target)
        self._model, self._target = model, target
        self._closed = False
        self._metadata = _metadata(api_key)
        credentials, options = client_credentials(**security)
        self._tls = None if credentials is None else security
        if credentials is None:
            self._channel = api.insecure_channel(target, options=options)
        else:
            self._channel = api.secure_channel(target, credentials, options=options)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._admin: Any = AdminStub(self._channel)

    def _call(self, timeout: float | None) -> ClientCall:
        return ClientCall(self._target, timeout, self._tls)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the client is closed")


class AsyncClient(_Connection):
    """A client of the router at `target` ("host:port"); close it, or use it as an async context manager.

    `model` is the name of the served model; if empty, the only one is used. Every `timeout` is in seconds, and is also
    the deadline of the request on the server; the message of DeadlineExceeded has the number of tokens so far.
    """

    def __init__(
        self, target: str, *, model: str = "", api_key: str | None = None, **security: Unpack[Security]
    ) -> None:
        """Connect at the first call. `security` are `tls`, `ca`, `cert`, `key` and `server_name`, as above.

        Raises ConfigError, which names the setting, if the target or a TLS setting can't be used, and InvalidRequest
        if `api_key` is empty or has other characters than printable ASCII.
        """
        super().__init__(grpc.aio, target, model, api_key, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, and cancel running calls."""
        self._closed = True
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        cache: Cache = CachePolicy.READ_WRITE,
        cache_salt: str = "",
        report_progress: bool = False,
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Delta, None]:
        """Stream the completion of `prompt`: a text, token ids, or a conversation.

        `sampling` are the fields of `SamplingParams`; `timeout` is in seconds. Raises InvalidRequest, Overloaded,
        Unavailable, NotFound, Unauthenticated, PermissionDenied, or DeadlineExceeded; TransferError if KV could not be
        moved in any attempt; BatonError if the model runtime failed; TypeError for an unknown argument.
        """
        request = calls.generate_request(
            self._model,
            prompt,
            sampling,
            cache=cache,
            cache_salt=cache_salt,
            report_progress=report_progress,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(request, self._call(timeout))

    async def complete(
        self,
        prompt: Prompt,
        *,
        cache: Cache = CachePolicy.READ_WRITE,
        cache_salt: str = "",
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole completion of `prompt`, after its end; arguments and errors are those of `generate`."""
        completion = Completion()
        stream = self.generate(
            prompt,
            cache=cache,
            cache_salt=cache_salt,
            chat_template_kwargs=chat_template_kwargs,
            timeout=timeout,
            **sampling,
        )
        async for delta in stream:
            completion.add(delta)
        return completion

    async def tokenize(
        self,
        text: str | Messages,
        *,
        add_special_tokens: bool = True,
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation rendered with the chat template."""
        request = calls.tokenize_request(self._model, text, add_special_tokens, chat_template_kwargs)
        return list((await self._ask(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = calls.detokenize_request(self._model, token_ids, skip_special_tokens)
        return str((await self._ask(self._stub.Detokenize, request, timeout)).text)

    async def get_model(self, *, timeout: float | None = None) -> Model:
        """The served model."""
        return calls.model(await self._ask(self._stub.GetModel, pb.GetModelRequest(model=self._model), timeout))

    async def health(self, *, timeout: float | None = None) -> bool:
        """Whether the router serves requests now; raises Unavailable if it can't be reached."""
        return calls.serving(await self._ask(self._health.Check, health_pb2.HealthCheckRequest(), timeout))

    async def ledger(self, *, timeout: float | None = None) -> Ledger:
        """The owners of memory in the process at `target`, which may also be a worker's control listener."""
        return ledger_from_proto(await self._ask(self._admin.Ledger, LedgerRequest(), timeout))

    async def cache(self, *, timeout: float | None = None) -> CacheReport:
        """The tiers of the prefix cache of the process at `target`, a router or a worker's control listener."""
        return cache_from_proto(await self._ask(self._admin.Cache, CacheRequest(), timeout))

    async def clear_cache(self, *, redis: bool = False, timeout: float | None = None) -> tuple[CacheTier, ...]:
        """Delete the cached blocks of the worker at `target`, and if `redis`, all blocks in Redis.

        Returns the number of deleted blocks and bytes of each tier. Raises Unsupported at a router.
        """
        answer = await self._ask(self._admin.ClearCache, ClearCacheRequest(redis=redis), timeout)
        return tiers_from_proto(answer.dropped)

    async def _ask(self, method: Any, request: Any, timeout: float | None) -> Any:
        call = self._call(timeout)
        self._check_open()
        try:
            return await method(request, timeout=call.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise await call.to_error_async(error) from None

    async def _stream(self, request: pb.GenerateRequest, call: ClientCall) -> AsyncGenerator[Delta, None]:
        self._check_open()
        call.start_stream()
        stream = self._stub.Generate(request, timeout=call.timeout, metadata=self._metadata)
        try:
            async for response in stream:
                for delta in call.count_tokens(calls.deltas(response)):
                    yield delta
        except grpc.RpcError as error:
            raise await call.to_error_async(error) from None
        finally:
            stream.cancel()


class Client(_Connection):
    """The same as `AsyncClient`, without async; may be used from several threads at once."""

    def __init__(
        self, target: str, *, model: str = "", api_key: str | None = None, **security: Unpack[Security]
    ) -> None:
        """The same as for `AsyncClient`."""
        super().__init__(grpc, target, model, api_key, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and cancel running calls."""
        self._closed = True
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        cache: Cache = CachePolicy.READ_WRITE,
        cache_salt: str = "",
        report_progress: bool = False,
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generator[Delta, None, None]:
        """Stream the completion of `prompt`: a text, token ids, or a conversation.

        `sampling` are the fields of `SamplingParams`; `timeout` is in seconds. Raises InvalidRequest, Overloaded,
        Unavailable, NotFound, Unauthenticated, PermissionDenied, or DeadlineExceeded; TransferError if KV could not be
        moved in any attempt; BatonError if the model runtime failed; TypeError for an unknown argument.
        """
        request = calls.generate_request(
            self._model,
            prompt,
            sampling,
            cache=cache,
            cache_salt=cache_salt,
            report_progress=report_progress,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._stream(request, self._call(timeout))

    def complete(
        self,
        prompt: Prompt,
        *,
        cache: Cache = CachePolicy.READ_WRITE,
        cache_salt: str = "",
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """The whole completion of `prompt`, after its end; arguments and errors are those of `generate`."""
        completion = Completion()
        stream = self.generate(
            prompt,
            cache=cache,
            cache_salt=cache_salt,
            chat_template_kwargs=chat_template_kwargs,
            timeout=timeout,
            **sampling,
        )
        for delta in stream:
            completion.add(delta)
        return completion

    def tokenize(
        self,
        text: str | Messages,
        *,
        add_special_tokens: bool = True,
        chat_template_kwargs: Mapping[str, TemplateArgument] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text, or of a conversation rendered with the chat template."""
        request = calls.tokenize_request(self._model, text, add_special_tokens, chat_template_kwargs)
        return list(self._ask(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = calls.detokenize_request(self._model, token_ids, skip_special_tokens)
        return str(self._ask(self._stub.Detokenize, request, timeout).text)

    def get_model(self, *, timeout: float | None = None) -> Model:
        """The served model."""
        return calls.model(self._ask(self._stub.GetModel, pb.GetModelRequest(model=self._model), timeout))

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether the router serves requests now; raises Unavailable if it can't be reached."""
        return calls.serving(self._ask(self._health.Check, health_pb2.HealthCheckRequest(), timeout))

    def ledger(self, *, timeout: float | None = None) -> Ledger:
        """The owners of memory in the process at `target`, which may also be a worker's control listener."""
        return ledger_from_proto(self._ask(self._admin.Ledger, LedgerRequest(), timeout))

    def cache(self, *, timeout: float | None = None) -> CacheReport:
        """The tiers of the prefix cache of the process at `target`, a router or a worker's control listener."""
        return cache_from_proto(self._ask(self._admin.Cache, CacheRequest(), timeout))

    def clear_cache(self, *, redis: bool = False, timeout: float | None = None) -> tuple[CacheTier, ...]:
        """Delete the cached blocks of the worker at `target`, and if `redis`, all blocks in Redis.

        Returns the number of deleted blocks and bytes of each tier. Raises Unsupported at a router.
        """
        answer = self._ask(self._admin.ClearCache, ClearCacheRequest(redis=redis), timeout)
        return tiers_from_proto(answer.dropped)

    def _ask(self, method: Any, request: Any, timeout: float | None) -> Any:
        call = self._call(timeout)
        self._check_open()
        try:
            return method(request, timeout=call.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise call.to_error(error) from None

    def _stream(self, request: pb.GenerateRequest, call: ClientCall) -> Generator[Delta, None, None]:
        self._check_open()
        call.start_stream()
        stream = self._stub.Generate(request, timeout=call.timeout, metadata=self._metadata)
        try:
            for response in stream:
                yield from call.count_tokens(calls.deltas(response))
        except grpc.RpcError as error:
            raise call.to_error(error) from None
        finally:
            stream.cancel()


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    if api_key is None:
        return ()
    if not calls.can_be_key(api_key):
        # The message does not contain the key.
        raise InvalidRequest("api_key", "must be of printable ASCII without spaces, and not be empty")
    return (("authorization", f"Bearer {api_key}"),)
