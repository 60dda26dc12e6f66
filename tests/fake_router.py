"""A router played by a small servicer, for tests of what talks to routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc

from baton.errors import NotFound
from baton.pb import inference_pb2 as pb
from baton.pb import inference_pb2_grpc
from baton.rpc.server import Listener, listen
from baton.rpc.tls import peer_principal, peer_roles


class Caller(NamedTuple):
    authorization: str | None
    principal: str
    roles: frozenset[str]


class Router(inference_pb2_grpc.InferenceServicer):
    """Answers with "ab", and "xy" as second choice if asked for; hangs after the first event when told to.

    Before that it tells its progress, if asked for.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.callers: list[Caller] = []
        self.hang = False
        self.progress: list[pb.PrefillProgress] = []
        self.error: Exception | None = None
        self.closed = asyncio.Event()

    def _note(self, request: Any, context: Any) -> None:
        self.seen.append(request)
        authorization = dict(context.invocation_metadata()).get("authorization")
        self.callers.append(Caller(authorization, peer_principal(context), peer_roles(context)))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._note(request, context)
        if self.error:
            raise self.error
        try:
            for progress in self.progress if request.report_progress else ():
                yield pb.GenerateResponse(request_id="r-1", prefill_progress=progress)
            first = pb.TokenInfo(token_id=1, logprob=-0.5, top=[pb.TokenLogprob(token_id=1, logprob=-0.5)])
            yield pb.GenerateResponse(
                request_id="r-1",
                choices=[pb.ChoiceDelta(index=0, text="a", tokens=[first])],
                prompt_tokens=[pb.TokenInfo(token_id=9)],
            )
            if self.hang:
                await asyncio.Event().wait()
            tokens = [pb.TokenInfo(token_id=2)]
            ends = {"finish_reason": pb.FINISH_REASON_STOP, "stop_string": "b"}
            choices = [
                pb.ChoiceDelta(index=0, text="b", tokens=tokens, **ends),
                pb.ChoiceDelta(index=1, text="xy", finish_reason=pb.FINISH_REASON_LENGTH),
            ]
            yield pb.GenerateResponse(request_id="r-1", choices=choices[: max(1, request.sampling.n)])
            yield pb.GenerateResponse(
                request_id="r-1",
                usage=pb.Usage(
                    prompt_tokens=3,
                    cached_tokens=2,
                    completion_tokens=3,
                    cached=pb.CachedTokens(pool=1, redis=1, decode=2),
                ),
                timings=pb.Timings(queue=1, total=5),
            )
        finally:
            self.closed.set()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        self._note(request, context)
        return pb.TokenizeResponse(token_ids=[5, 6])

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        self._note(request, context)
        return pb.DetokenizeResponse(text="hé")

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        self._note(request, context)
        if request.model == "other":
            raise NotFound("model 'other' is not served; served: tiny")
        return pb.GetModelResponse(name="tiny", max_model_len=8, vocab_size=10, eos_token_ids=[2])


@asynccontextmanager
async def served(router: Router, **keywords: Any) -> AsyncIterator[Listener]:
    """The router on a loopback port; `keywords` are those of `listen`, such as `tls` and `roles`."""

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(router, server)

    services = ["baton.v1.Inference"]
    async with listen("127.0.0.1:0", insecure=False, add=add, services=services, **keywords) as listener:
        listener.set_serving(True)
        yield listener
