"""Small prefill and decode workers that speak the protos, and whose tokens can be computed by hand.

Output token `i` of choice `c` is the letter `c + i` places after "a"; prefill says the first one and decode the
rest. A test replaces a stub's `script` to make it misbehave.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from baton.engine.contract import Engine
from baton.kv.format import KvFormat, KvPart
from baton.kv.prefix.contract import PrefixCache
from baton.pb import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2_grpc
from baton.rpc.server import listen
from baton.worker.status import PrefixChangeFeed, StatusHub, WorkerIdentity, WorkerLoad, WorkerRole, WorkerServicer

MAX_MODEL_LEN = 64
KV = KvFormat((KvPart("k", "float32", (2, 4)), KvPart("v", "float32", (2, 4))), layers=2, block_size=16)
LENGTH = inference_pb2.FINISH_REASON_LENGTH
STOP = inference_pb2.FINISH_REASON_STOP


def checkpoint(folder: Path, *, template: str | None = None) -> Path:
    """A checkpoint directory with a byte-level tokenizer and no weights."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def letter(place: int) -> int:
    """Token id of the letter `place` places after "a"."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(chr(ord("a") + place % 26))


def text(choice: int, count: int) -> str:
    """The first `count` tokens of a choice as text."""
    return "".join(chr(ord("a") + (choice + i) % 26) for i in range(count))


@dataclass
class Handoffs:
    """Work of the fleet's prefills, by transfer id: stands for the KV transfer."""

    prefilled: dict[str, asyncio.Future[prefill_pb2.PrefillRequest]] = field(default_factory=dict)

    def of(self, transfer_id: str) -> asyncio.Future[prefill_pb2.PrefillRequest]:
        """The prefill of that transfer id, now or later."""
        return self.prefilled.setdefault(transfer_id, asyncio.get_running_loop().create_future())


class Log:
    def __init__(self) -> None:
        self.entries: list[object] = []
        self._news = asyncio.Event()

    def add(self, entry: object) -> None:
        self.entries.append(entry)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is looked at after each entry."""
        async with asyncio.timeout(60):
            while not true():
                self._news.clear()
                await self._news.wait()


class Pages:
    """Stands for the pages of an engine, as far as they tell of the prefixes in them."""

    def __init__(self) -> None:
        self.tell: Callable[[Sequence[bytes], Sequence[bytes]], object] = lambda stored, dropped: None

    def watch_prefixes(self, changed: Callable[[Sequence[bytes], Sequence[bytes]], object] | None) -> None:
        """Watchers that `tell` tells."""
        self.tell = changed or (lambda stored, dropped: None)


class Stub:
    def __init__(self, identity: WorkerIdentity, handoffs: Handoffs) -> None:
        self.identity = identity
        self.handoffs = handoffs
        # Prompts of some tests are long; those of others fill a decode worker.
        pages = 64 if identity.role is WorkerRole.DECODE else 1 << 16
        self.load = WorkerLoad(pages_total=pages, page_size=16, slots_total=8, tokens_per_second=1000)
        self.pages = Pages()
        self.news = PrefixChangeFeed(cast(Engine, self.pages), PrefixCache(), lambda: self.status.notify())
        self.identify()
        self.log = Log()
        self.address = ""

    def identify(self, **changes: Any) -> None:
        """Change what it says of itself; before it listens."""
        self.identity = replace(self.identity, **changes)
        self.status = StatusHub(self.identity, lambda: self.load, self.news)

    def add(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self.status), server)

    @contextlib.asynccontextmanager
    async def serving(self, address: str = "127.0.0.1:0") -> AsyncIterator[None]:
        async with listen(address, insecure=False, add=self.add, services=[], grace=0) as listener:
            self.address = listener.address
            try:
                yield
            finally:
                self.status.close()


class StubPrefill(Stub, prefill_pb2_grpc.PrefillServicer):
    def __init__(self, identity: WorkerIdentity, handoffs: Handoffs) -> None:
        super().__init__(identity, handoffs)
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.cancelled = 0
        self.script: Callable[[prefill_pb2.PrefillRequest], Awaitable[None]] = _nothing
        self.cached_tokens = 0
        self.abandoned: list[prefill_pb2.AbandonRequest] = []

    def add(self, server: grpc.aio.Server) -> None:
        super().add(server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.requests.append(request)
        self.log.add(request)
        try:
            yield prefill_pb2.PrefillEvent()
            await self.script(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.log.add("cancelled")
            raise
        yield prefill_pb2.PrefillEvent(done=self.done(request))
        if request.transfer_id:
            self.handoffs.of(request.transfer_id).set_result(request)
        for start, token in enumerate(self.report(request)):
            yield prefill_pb2.PrefillEvent(prompt_logprobs=prefill_pb2.PromptLogprobs(start=start, tokens=[token]))

    async def Abandon(
        self, request: prefill_pb2.AbandonRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.AbandonResponse:
        self.abandoned.append(request)
        self.log.add(request)
        return prefill_pb2.AbandonResponse()

    def report(self, request: prefill_pb2.PrefillRequest) -> list[inference_pb2.TokenInfo]:
        """Log-probabilities of the prompt, if they are asked for; they come after `done`."""
        asked = request.sampling.HasField("prompt_logprobs")
        return [inference_pb2.TokenInfo(token_id=each) for each in request.prompt_token_ids if asked]

    def done(self, request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillDone:
        """The first token of each choice."""
        index = len(request.output_token_ids)
        done = prefill_pb2.PrefillDone(cached_tokens=self.cached_tokens)
        for choice in request.choice_indexes:
            first = done.first_tokens.add(choice_index=choice)
            first.token.token_id = letter(choice + index)
            if index + 1 == request.sampling.max_tokens:
                first.finish_reason = LENGTH
        return done


class DownStream:
    """A session as a stub's script sees it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[decode_pb2.SessionDown | None] = asyncio.Queue()
        self.ups: list[decode_pb2.Heartbeat] = []
        self.speaks = True

    def send(self, key: decode_pb2.AttemptKey, choice: int, index: int, tokens: Sequence[int], finish: int = 0) -> None:
        self.messages.put_nowait(decode_pb2.SessionDown(outputs=[output(key, choice, index, tokens, finish)]))

    def fail(self, key: decode_pb2.AttemptKey, kind: int, message: str = "by the script") -> None:
        failure = decode_pb2.AttemptFailure(key=key, kind=kind, message=message)
        self.messages.put_nowait(decode_pb2.SessionDown(failures=[failure]))

    def beat(self, *live: decode_pb2.AttemptKey) -> None:
        self.messages.put_nowait(decode_pb2.SessionDown(heartbeat=decode_pb2.Heartbeat(live=live)))

    def end(self) -> None:
        self.messages.put_nowait(None)


def output(
    key: decode_pb2.AttemptKey, choice: int, index: int, tokens: Sequence[int], finish: int = 0
) -> decode_pb2.SequenceOutput:
    return decode_pb2.SequenceOutput(
        key=key,
        choice_index=choice,
        output_index=index,
        tokens=[inference_pb2.TokenInfo(token_id=token) for token in tokens],
        finish_reason=finish,
    )


Script = Callable[[DownStream, decode_pb2.Start, prefill_pb2.PrefillRequest], Awaitable[None]]


class StubDecode(Stub, decode_pb2_grpc.DecodeServicer):
    def __init__(self, identity: WorkerIdentity, handoffs: Handoffs) -> None:
        super().__init__(identity, handoffs)
        self.reserves: list[decode_pb2.Reserve] = []
        self.starts: list[decode_pb2.Start] = []
        self.cancels: list[decode_pb2.Cancel] = []
        self.hellos: list[str] = []
        self.sessions: list[DownStream] = []
        self.script: Script = continue_by_hand
        self.answer: Callable[[decode_pb2.Reserve], decode_pb2.ReserveResult] = granted

    def add(self, server: grpc.aio.Server) -> None:
        super().add(server)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.SessionDown]:
        down = DownStream()
        self.sessions.append(down)
        reading = asyncio.create_task(self._read(requests, down))
        try:
            while (message := await down.messages.get()) is not None:
                yield message
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.log.add("session over")

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionUp], down: DownStream) -> None:
        async with asyncio.TaskGroup() as running:
            async for up in requests:
                match up.WhichOneof("message"):
                    case "hello":
                        self.hellos.append(up.hello.router_id)
                    case "reserve":
                        self.reserves.append(up.reserve)
                        answer = self.answer(up.reserve)
                        down.messages.put_nowait(decode_pb2.SessionDown(reserved=[answer]))
                    case "start":
                        self.starts.append(up.start)
                        running.create_task(self._decode(down, up.start))
                    case "cancel":
                        self.cancels.append(up.cancel)
                    case "heartbeat":
                        down.ups.append(up.heartbeat)
                        # A heartbeat for a heartbeat; the router's list is believed.
                        if down.speaks:
                            down.beat(*up.heartbeat.live)
                self.log.add(up)

    async def _decode(self, down: DownStream, start: decode_pb2.Start) -> None:
        await self.script(down, start, await self.handoffs.of(start.source.transfer_id))


async def continue_by_hand(down: DownStream, start: decode_pb2.Start, request: prefill_pb2.PrefillRequest) -> None:
    """Every remaining token, one message a step for all choices."""
    first, most = len(request.output_token_ids) + 1, request.sampling.max_tokens
    for index in range(first, most):
        outputs = [
            output(start.key, choice, index, [letter(choice + index)], LENGTH if index == most - 1 else 0)
            for choice in request.choice_indexes
        ]
        if index == first:
            for each in outputs:
                each.timings.fetch_ms, each.timings.slot_wait_ms = 2**-9, 2**-10
        down.messages.put_nowait(decode_pb2.SessionDown(outputs=outputs))


async def never_ending(down: DownStream, start: decode_pb2.Start, request: prefill_pb2.PrefillRequest) -> None:
    await asyncio.get_running_loop().create_future()


def granted(reserve: decode_pb2.Reserve) -> decode_pb2.ReserveResult:
    return decode_pb2.ReserveResult(key=reserve.key, granted=True)


async def _nothing(request: prefill_pb2.PrefillRequest) -> None:
    return
