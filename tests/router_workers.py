"""Simulated workers that need almost no CPU time, for measurements and tests of the router.

One process that speaks the protos of a prefill and of a decode worker and computes nothing. Prefill answers at once.
Decode has all its sequences in one batch, takes a step every `--step-ms` milliseconds, and sends each router one
message a step, as a real decode worker does. It writes `listening prefill=HOST:PORT decode=HOST:PORT`, and serves until
it is killed.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc

from baton import bundled
from baton.kv.format import KvFormat, attention_parts
from baton.model.checkpoint import tokenizer_digest
from baton.pb import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc
from baton.pb.worker_pb2_grpc import add_WorkerServicer_to_server
from baton.rpc.server import listen
from baton.worker.status import StatusHub, WorkerIdentity, WorkerLoad, WorkerRole, WorkerServicer

TOKEN = 300
"""An ordinary token of the bundled model; every token is this one."""

MAX_MODEL_LEN = 1 << 20
_SEQUENCES = 1024


class Prefill(prefill_pb2_grpc.PrefillServicer):
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        done = prefill_pb2.PrefillDone()
        for choice in request.choice_indexes:
            first = done.first_tokens.add(choice_index=choice)
            first.token.token_id = TOKEN
            if request.sampling.max_tokens == 1:
                first.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillEvent(done=done)

    async def Abandon(
        self, request: prefill_pb2.AbandonRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.AbandonResponse:
        return prefill_pb2.AbandonResponse()


class _FakeSequence:
    """One sequence of the batch; `left` tokens are to come."""

    def __init__(self, output: decode_pb2.SequenceOutput, left: int) -> None:
        self.output = output
        self.left = left


class Decode(decode_pb2_grpc.DecodeServicer):
    """The batch; each session has a queue that a step's message is put into."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._batches: dict[asyncio.Queue[decode_pb2.SessionDown], dict[str, _FakeSequence]] = {}

    async def run(self) -> None:
        """Take steps until cancelled; one that is late does not make the next one early."""
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            due = max(due + self._step_s, now())
            await asyncio.sleep(due - now())
            for queue, batch in self._batches.items():
                if batch:
                    queue.put_nowait(_message(batch))

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.SessionDown]:
        queue: asyncio.Queue[decode_pb2.SessionDown] = asyncio.Queue()
        batch = self._batches[queue] = {}
        reading = asyncio.create_task(_read(requests, queue, batch))
        try:
            while True:
                yield await queue.get()
        finally:
            del self._batches[queue]
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _message(batch: dict[str, _FakeSequence]) -> decode_pb2.SessionDown:
    """The message of a step for the sequences of one router."""
    down = decode_pb2.SessionDown()
    for name, sequence in list(batch.items()):
        sequence.left -= 1
        output = sequence.output
        if not sequence.left:
            output.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            del batch[name]
        down.outputs.append(output)
        output.output_index += 1
        output.ClearField("timings")
    return down


async def _read(
    requests: AsyncIterator[decode_pb2.SessionUp],
    queue: asyncio.Queue[decode_pb2.SessionDown],
    batch: dict[str, _FakeSequence],
) -> None:
    reserved: dict[str, decode_pb2.Reserve] = {}
    async for up in requests:
        down = decode_pb2.SessionDown()
        match up.WhichOneof("message"):
            case "reserve":
                reserved[up.reserve.key.request_id] = up.reserve
                down.reserved.add(key=up.reserve.key, granted=True)
            case "start":
                name = up.start.key.request_id
                output = decode_pb2.SequenceOutput(key=up.start.key, output_index=1)
                output.tokens.add(token_id=TOKEN)
                output.timings.fetch_ms = 0.0
                batch[name] = _FakeSequence(output, reserved[name].max_new_tokens - 1)
                continue
            case "cancel":
                reserved.pop(up.cancel.key.request_id, None)
                batch.pop(up.cancel.key.request_id, None)
                continue
            case "heartbeat":
                down.heartbeat.live.extend(up.heartbeat.live)
            case _:
                continue
        queue.put_nowait(down)


def identity(folder: Path, role: WorkerRole, number: int, kv_format: KvFormat, max_model_len: int) -> WorkerIdentity:
    """Identity of a simulated worker, whose model is the checkpoint in `folder`."""
    return WorkerIdentity(
        worker_id=f"{role.value}-{number}",
        role=role,
        incarnation=f"incarnation-{role.value}-{number}",
        model=folder.name,
        fingerprint="f" * 64,
        kv_format=kv_format,
        converts_kv=False,
        tokenizer_digest=tokenizer_digest(folder),
        max_model_len=max_model_len,
        shards=(replace(kv_format.whole, kv_address=":7001"),),
    )


@contextlib.asynccontextmanager
async def _listening(role: WorkerRole, add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    load = WorkerLoad(
        pages_total=1 << 24,
        page_size=16,
        slots_total=_SEQUENCES if role is WorkerRole.DECODE else 0,
        tokens_per_second=1e6,
    )
    kv_format = KvFormat(attention_parts("float32", 1, 8), layers=1, block_size=16)
    status = StatusHub(identity(bundled.path(), role, 0, kv_format, MAX_MODEL_LEN), lambda: load)

    def add_all(server: grpc.aio.Server) -> None:
        add_WorkerServicer_to_server(WorkerServicer(status), server)
        add(server)

    async with listen("127.0.0.1:0", insecure=False, add=add_all, services=[], grace=0) as listener:
        try:
            yield listener.address
        finally:
            status.close()


async def _serve(step_s: float) -> None:
    decode = Decode(step_s)

    def add_decode(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)

    def add_prefill(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(), server)

    async with _listening(WorkerRole.PREFILL, add_prefill) as prefill, _listening(WorkerRole.DECODE, add_decode) as at:
        print(f"listening prefill={prefill} decode={at}", flush=True)
        await decode.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, required=True)
    asyncio.run(_serve(parser.parse_args().step_ms / 1e3))


if __name__ == "__main__":
    main()
