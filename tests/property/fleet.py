"""A router's fleet without a network: workers behind channels that keep their calls in memory, in simulated time.

The workers are honest or not as a test says: they die, come back, fall silent, refuse, fail, forget, repeat themselves,
and say things late or in another order. Their tokens are those of the fake engine.

A mixed worker computes prompts of its own reservations in their pages. For the prompt of another worker it has pages at
once, until they were fetched or LEASE_S has passed, or it refuses.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from baton.engine.fake import expected_tokens
from baton.kv.format import KvFormat, KvPart
from baton.pb import decode_pb2, inference_pb2, prefill_pb2
from baton.rpc.convert import sampling_from_proto
from baton.worker.status import WorkerIdentity, WorkerLoad, WorkerRole, WorkerStatus, status_to_proto

PAGE_TOKENS = 16
KV = KvFormat((KvPart("k", "float32", (2, 4)),), layers=2, block_size=PAGE_TOKENS)
BEAT_S = 1.0
LEASE_S = 5.0
_END = object()


class Call:
    """The client's side of a call, and the stub's handle on it."""

    def __init__(self, on_write: Callable[[Any], None] = lambda message: None) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._on_write = on_write
        self.over = False
        self.on_over: list[Callable[[], None]] = []

    async def read(self) -> Any:
        item = await self._items.get()
        if isinstance(item, BaseException) or item is _END:
            self._items.put_nowait(item)
            if item is not _END:
                raise item
            return grpc.aio.EOF
        return item

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if (item := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return item

    def __await__(self) -> Any:
        return self.read().__await__()

    async def write(self, message: Any) -> None:
        if self.over:
            raise asyncio.InvalidStateError("the call is over")
        self._on_write(message)

    def cancel(self) -> None:
        self._finish(asyncio.CancelledError())

    def say(self, message: Any) -> None:
        if not self.over:
            self._items.put_nowait(message)

    def end(self) -> None:
        self._finish(_END)

    def fail(self, code: grpc.StatusCode, details: str = "by the test") -> None:
        self._finish(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))

    def _finish(self, how: Any) -> None:
        if not self.over:
            self.over = True
            self._items.put_nowait(how)
            for each in self.on_over:
                each()


@dataclass(eq=False)
class Job:
    call: Call
    request: prefill_pb2.PrefillRequest
    computed: bool = False

    @property
    def pages(self) -> int:
        """Pages that it needs of its own."""
        context = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        return 0 if self.request.in_place else -(-context // PAGE_TOKENS)


@dataclass(eq=False)
class Held:
    """An attempt on a decode worker; `told` are the tokens said of each choice, the first included."""

    key: decode_pb2.AttemptKey
    session: Call
    pages: int = 0
    start: decode_pb2.Start | None = None
    said: dict[int, int] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Worker:
    """One worker, whatever it does just now."""

    fleet: SimulatedFleet
    role: WorkerRole
    address: str
    born: int = 0
    up: bool = True
    silent: bool = False
    draining: bool = False
    full: bool = False
    pages: int = 64
    calls: list[Call] = field(default_factory=list)
    watches: list[Call] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    held: dict[tuple[str, int], Held] = field(default_factory=dict)
    waiting: dict[tuple[str, int], Held] = field(default_factory=dict)
    """Reservations that wait until it is not full, and has the pages."""
    refused: int = 0
    """Number of prompts of other workers that it had no pages for; `prompts` are those that it took."""
    prompts: int = 0
    in_place: int = 0
    exports: dict[str, int] = field(default_factory=dict)
    """Pages of computed prompts of other workers, by transfer id, at a mixed worker."""

    @property
    def mixed(self) -> bool:
        return self.role is WorkerRole.MIXED

    @property
    def free_pages(self) -> int:
        used = sum(held.pages for held in self.held.values())
        if self.mixed:
            used += sum(self.exports.values()) + sum(job.pages for job in self.jobs if not job.computed)
        return self.pages - used

    @property
    def status(self) -> WorkerStatus:
        identity = WorkerIdentity(
            worker_id=self.address,
            role=self.role,
            incarnation=f"{self.address}#{self.born}",
            model="m",
            fingerprint="f" * 64,
            kv_format=KV,
            converts_kv=False,
            tokenizer_digest="t",
            max_model_len=64,
            shards=(replace(KV.whole, kv_address=":7001"),),
        )
        requests_without_token = sum(not held.said for held in self.held.values())
        # A prompt in place counts as an attempt.
        requests_without_token += sum(not job.computed and not job.request.in_place for job in self.jobs)
        load = WorkerLoad(
            pages_total=self.pages,
            pages_used=self.pages - self.free_pages,
            page_size=PAGE_TOKENS,
            slots_total=8,
            slots_used=min(len(self.held), 8) if self.mixed else 0,
            pending_tokens=sum(len(job.request.prompt_token_ids) for job in self.jobs) if self.mixed else 0,
            tokens_per_second=1000,
            requests_without_token=requests_without_token,
        )
        return WorkerStatus(identity, load, self.draining)

    def changed(self) -> None:
        """Tell the watches at once, as workers do."""
        for call in self.watches if self.up and not self.silent else ():
            call.say(status_to_proto(self.status))

    def open(self, method: str, request: Any, timeout: float | None) -> Call:
        call = Call(lambda message: None if self.silent else self._heard(call, message))
        if not self.up:
            call.fail(grpc.StatusCode.UNAVAILABLE)
            return call
        self.calls.append(call)
        call.on_over.append(lambda: self._gone(call))
        loop = asyncio.get_running_loop()
        if timeout is not None:
            timer = loop.call_later(timeout, call.fail, grpc.StatusCode.DEADLINE_EXCEEDED)
            call.on_over.append(timer.cancel)
        match method.rpartition("/")[2]:
            case "Watch":
                self.watches.append(call)
                call.on_over.append(lambda: self.watches.remove(call))
                self._beat(call, lambda: status_to_proto(self.status))
            case "Prefill":
                self._take(Job(call, prefill_pb2.PrefillRequest.FromString(request)))
            case "Abandon":
                self._free_export(request.transfer_id)
                call.say(prefill_pb2.AbandonResponse())
            case "Session":
                self._beat(call, lambda: decode_pb2.SessionDown(heartbeat=decode_pb2.Heartbeat(live=self._live(call))))
        return call

    def _take(self, job: Job) -> None:
        if self.mixed and not job.request.in_place and (self.full or job.pages > self.free_pages):
            self.refused += 1
            job.call.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pages are not free")
            return
        if job.request.in_place and not self._reserved(job):
            job.call.fail(grpc.StatusCode.ABORTED, "the transfer ended with its reservation")
            return
        self.prompts += 1
        self.in_place += job.request.in_place
        self.jobs.append(job)
        self.changed()
        self._beat(job.call, prefill_pb2.PrefillEvent)

    def _free_export(self, transfer_id: str) -> None:
        if self.exports.pop(transfer_id, 0):
            self.grant()
            self.changed()

    def _end_in_place(self) -> None:
        """End the prompts in place whose reservations have ended, and grant what waited for the pages."""
        for job in list(self.jobs) if not self.silent else ():
            if job.request.in_place and not job.computed and not self._reserved(job):
                job.call.fail(grpc.StatusCode.ABORTED, "the transfer ended with its reservation")
        if self.mixed:
            self.grant()

    def _reserved(self, job: Job) -> bool:
        return (job.request.request_id, job.request.attempt) in self.held

    def _beat(self, call: Call, message: Callable[[], Any]) -> None:
        if not call.over:
            if not self.silent:
                call.say(message())
            timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat, call, message)
            call.on_over.append(timer.cancel)

    def _live(self, call: Call) -> list[decode_pb2.AttemptKey]:
        attempts = [*self.held.values(), *self.waiting.values()]
        return [held.key for held in attempts if held.session is call]

    def _gone(self, call: Call) -> None:
        self.calls.remove(call)
        self.jobs = [job for job in self.jobs if job.call is not call]
        self.held = {key: held for key, held in self.held.items() if held.session is not call}
        self.waiting = {key: held for key, held in self.waiting.items() if held.session is not call}
        if call not in self.watches:
            self._end_in_place()
            self.changed()

    def _heard(self, call: Call, up: decode_pb2.SessionUp) -> None:
        match up.WhichOneof("message"):
            case "reserve":
                key = up.reserve.key
                if self.draining:
                    refusal = decode_pb2.ReserveResult(key=key, reason="drains")
                    call.say(decode_pb2.SessionDown(reserved=[refusal]))
                    return
                tokens = up.reserve.context_tokens + up.reserve.max_new_tokens
                pages = -(-tokens // PAGE_TOKENS) * up.reserve.choices if self.mixed else 0
                self.waiting[key.request_id, key.attempt] = Held(key, call, pages)
                self.grant()
                if (key.request_id, key.attempt) in self.waiting:
                    call.say(decode_pb2.SessionDown(reserved=[decode_pb2.ReserveResult(key=key, waiting=True)]))
            case "start":
                if held := self.held.get((up.start.key.request_id, up.start.key.attempt)):
                    held.start = up.start
            case "cancel":
                name = up.cancel.key.request_id, up.cancel.key.attempt
                self.waiting.pop(name, None)
                if held := self.held.get(name):
                    if up.cancel.HasField("choice_index"):
                        held.cancelled.add(up.cancel.choice_index)
                    else:
                        del self.held[name]
                        self._end_in_place()
                        self.changed()
            case "heartbeat":
                live = {(key.request_id, key.attempt) for key in up.heartbeat.live}
                for name in [name for name, held in self.held.items() if held.session is call and name not in live]:
                    del self.held[name]
                for name in [name for name, held in self.waiting.items() if held.session is call and name not in live]:
                    del self.waiting[name]
                self._end_in_place()

    def grant(self) -> None:
        """Grant the reservations that wait, as long as there are pages, unless it is full."""
        while self.up and not self.silent and not self.full and self.waiting:
            name = next(iter(self.waiting))
            if self.mixed and self.waiting[name].pages > self.free_pages:
                return
            held = self.held[name] = self.waiting.pop(name)
            held.session.say(decode_pb2.SessionDown(reserved=[decode_pb2.ReserveResult(key=held.key, granted=True)]))
            self.changed()

    def die(self) -> None:
        self.up = False
        self.exports.clear()
        for call in list(self.calls):
            call.fail(grpc.StatusCode.UNAVAILABLE)

    def live(self) -> None:
        """Up and honest; another incarnation if it had died."""
        self.born += not self.up
        self.up, self.silent, self.draining, self.full = True, False, False, False
        self.grant()

    def compute(self, job: Job) -> None:
        """Prefill is done, and its KV can be fetched; nothing is said of it yet."""
        job.computed = True
        if transfer_id := job.request.transfer_id:
            self.fleet.prefilled[transfer_id] = job.request
            if self.mixed and job.pages and transfer_id not in self.exports:
                self.exports[transfer_id] = job.pages
                asyncio.get_running_loop().call_later(LEASE_S, self._free_export, transfer_id)

    def finish(self, job: Job) -> None:
        if self.silent:
            return
        self.compute(job)
        done = prefill_pb2.PrefillDone()
        for choice in job.request.choice_indexes:
            tokens = truth(job.request, choice)
            index = len(job.request.output_token_ids)
            first = done.first_tokens.add(choice_index=choice)
            first.token.token_id = tokens[index]
            if index + 1 == len(tokens):
                first.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        job.call.say(prefill_pb2.PrefillEvent(done=done))
        job.call.end()

    def step(self, held: Held, *, count: int = 1, again: bool = False, swapped: bool = False) -> bool:
        """Say the next tokens of each choice of an attempt, perhaps in two messages of the wrong order, or twice."""
        request = self.fleet.prefilled.get(held.start.source.transfer_id) if held.start else None
        if request is None or self.silent:
            return False
        messages, without_token = [], not held.said
        for worker in self.fleet.workers.values() if without_token and held.start else ():
            worker._free_export(held.start.source.transfer_id)
        for choice in request.choice_indexes:
            tokens, first = truth(request, choice), len(request.output_token_ids) + 1
            begin = held.said.get(choice, first)
            end = min(begin + count, len(tokens))
            if choice in held.cancelled or begin >= end:
                continue
            held.said[choice] = end
            for at in range(begin, end):
                output = decode_pb2.SequenceOutput(key=held.key, choice_index=choice, output_index=at)
                output.tokens.add(token_id=tokens[at])
                if at + 1 == len(tokens):
                    output.finish_reason = inference_pb2.FINISH_REASON_LENGTH
                messages.append(output)
        if swapped:
            messages.reverse()
        for message in messages * (2 if again else 1):
            held.session.say(decode_pb2.SessionDown(outputs=[message]))
        going = [
            choice
            for choice in request.choice_indexes
            if choice not in held.cancelled
            and held.said.get(choice, len(request.output_token_ids) + 1) < len(truth(request, choice))
        ]
        if not going:
            self.held.pop((held.key.request_id, held.key.attempt), None)
            self._end_in_place()
        if without_token or not going:
            self.changed()
        return bool(messages)

    def fail_attempt(self, held: Held, kind: int) -> None:
        if not self.silent:
            self.held.pop((held.key.request_id, held.key.attempt), None)
            failure = decode_pb2.AttemptFailure(key=held.key, kind=kind, message="by the test")
            held.session.say(decode_pb2.SessionDown(failures=[failure]))
            self._end_in_place()


def truth(request: prefill_pb2.PrefillRequest, choice: int) -> list[int]:
    return _truth(tuple(request.prompt_token_ids), request.sampling.SerializeToString(deterministic=True), choice)


@functools.lru_cache(1024)
def _truth(prompt_ids: tuple[int, ...], sampling: bytes, choice: int) -> list[int]:
    params = replace(sampling_from_proto(inference_pb2.SamplingParams.FromString(sampling)), n=1)
    return expected_tokens(prompt_ids, params.max_tokens or 0, params=params, choice_index=choice)


class SimulatedFleet:
    """The workers by address; `channel` stands for `control_channel`."""

    def __init__(self, prefills: int, decodes: int, mixed: int = 0) -> None:
        self.prefilled: dict[str, prefill_pb2.PrefillRequest] = {}
        self.mixed = [Worker(self, WorkerRole.MIXED, f"10.0.2.{i}:1") for i in range(mixed)]
        self.prefills = [*(Worker(self, WorkerRole.PREFILL, f"10.0.0.{i}:1") for i in range(prefills)), *self.mixed]
        self.decodes = [*(Worker(self, WorkerRole.DECODE, f"10.0.1.{i}:1") for i in range(decodes)), *self.mixed]
        self.workers = {worker.address: worker for worker in (*self.prefills, *self.decodes)}

    def addresses(self, role: WorkerRole) -> tuple[str, ...]:
        """Addresses of the workers of exactly this role."""
        return tuple(worker.address for worker in self.workers.values() if worker.role is role)

    def channel(self, address: str, *rest: object) -> _Channel:
        return _Channel(self.workers[address])


class _Channel:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def unary_unary(self, method: str, **rest: object) -> Callable[..., Call]:
        return lambda request=None, timeout=None: self._worker.open(method, request, timeout)

    unary_stream = stream_stream = unary_unary

    async def close(self) -> None:
        return
