"""The whole router in simulated time, between clients and a fleet that misbehaves in any order.

Whatever happens: each client gets each token once, in order, and the right one; each request ends once, served or with
a typed error, by its deadline; and once all have ended, no assignment, attempt, waiting entry or task is left.
"""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import grpc
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.config.router import RouterConfig
from baton.engine.fake import expected_tokens
from baton.errors import BatonError
from baton.pb import decode_pb2
from baton.request import SamplingParams, Usage
from baton.worker.status import WorkerRole
from router.dispatcher import Dispatcher
from router.output import OutputProcessor
from router.request import Request
from router.request_runner import RequestRunner
from router.serving.threads import TenantThreads
from router.workers import link as link_module
from router.workers.pool import WorkerPool
from tests.effort import machine_test
from tests.property.fleet import LEASE_S, Held, Job, SimulatedFleet, Worker
from tests.property.virtual import Hung, VirtualLoop

LATE_S = 1.0
PICK = st.integers(0, 99)
KINDS = st.sampled_from(sorted(decode_pb2.AttemptFailure.Kind.values()))
CODES = st.sampled_from(
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ]
)


@dataclass(eq=False)
class Client:
    request: Request
    task: Any = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    usage: Usage | None = None
    error: BaseException | None = None
    ends: int = 0
    left: bool = False


class RouterMachine(RuleBasedStateMachine):
    workers = 2, 2, 0
    """Numbers of prefill, decode and mixed workers."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.fleet = SimulatedFleet(*self.workers)
        self.clients: list[Client] = []
        self.numbers = itertools.count()
        self._channel, link_module.control_channel = link_module.control_channel, self.fleet.channel
        self.running = contextlib.AsyncExitStack()
        self.loop.run_until_complete(self._made())
        self.loop.advance(1.0)

    async def _made(self) -> None:
        config = RouterConfig(
            prefill=self.fleet.addresses(WorkerRole.PREFILL),
            decode=self.fleet.addresses(WorkerRole.DECODE),
            mixed=self.fleet.addresses(WorkerRole.MIXED),
            served_model_name="m",
            queue_capacity=6,
            prefill_limit=2,
        )
        self.pool = WorkerPool(config, "router", "t")
        await self.running.enter_async_context(self.pool.run())
        self.dispatcher = Dispatcher(self.pool, config)
        self.request_runner = RequestRunner(self.pool, self.dispatcher, config, TenantThreads(1))

    async def _serve(self, client: Client) -> None:
        """Serve requests as the servicer does."""
        request = client.request
        output = OutputProcessor(request, self.loop.time)
        serving = asyncio.create_task(self.request_runner.run(request, output))
        try:
            while client.usage is None:
                news = await output.queue.take()
                for choice, delta in news.deltas.items():
                    client.tokens[choice] += [token.token_id for token in delta.tokens]
                client.usage = news.usage
        except BatonError as error:
            client.error = error
        finally:
            client.ends += 1
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    @rule(
        max_tokens=st.integers(1, 6),
        n=st.sampled_from([1, 1, 2]),
        patience=st.sampled_from([3600.0, 3.0, 20.0]),
        tenant=st.sampled_from("ab"),
    )
    def arrive(self, max_tokens: int, n: int, patience: float, tenant: str) -> None:
        number, now = next(self.numbers), self.loop.now
        params = SamplingParams(max_tokens=max_tokens, seed=7, n=n)
        deadline = now + patience
        request = Request(f"r{number}", [number + 1, 2, 3], params, max_tokens, now, deadline, tenant)
        client = Client(request, tokens={choice: [] for choice in range(n)})
        client.task = self.loop.spawn(self._serve(client))
        self.clients.append(client)

    @precondition(lambda self: self.clients)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        client = self.clients[pick % len(self.clients)]
        if not client.ends:
            client.left = True
            client.task.cancel()
            self.loop.settle()

    def _job(self, pick: int) -> tuple[Worker, Job] | None:
        found = [(worker, job) for worker in self.fleet.prefills for job in worker.jobs]
        return found[pick % len(found)] if found else None

    def _held(self, pick: int) -> tuple[Worker, Held] | None:
        found = [(worker, held) for worker in self.fleet.decodes for held in worker.held.values()]
        return found[pick % len(found)] if found else None

    @rule(pick=PICK, said=st.sampled_from([True, True, False]))
    def prefill(self, pick: int, said: bool) -> None:
        """A prefill is computed; it may be said later, so that decode's tokens come before the first."""
        if found := self._job(pick):
            worker, job = found
            self.loop.call(worker.finish if said else worker.compute, job)

    @rule(pick=PICK, code=CODES)
    def fail_prefill(self, pick: int, code: grpc.StatusCode) -> None:
        if found := self._job(pick):
            self.loop.call(found[1].call.fail, code)

    @rule(pick=PICK, count=st.integers(1, 3), again=st.booleans(), swapped=st.booleans())
    def step(self, pick: int, count: int, again: bool, swapped: bool) -> None:
        if found := self._held(pick):
            worker, held = found
            self.loop.call(lambda: worker.step(held, count=count, again=again, swapped=swapped))

    @rule(pick=PICK, kind=KINDS)
    def fail_attempt(self, pick: int, kind: int) -> None:
        if found := self._held(pick):
            self.loop.call(found[0].fail_attempt, found[1], kind)

    @rule(pick=PICK)
    def forget_attempt(self, pick: int) -> None:
        """A message is lost, or a worker has a fault: only heartbeats tell."""
        if found := self._held(pick):
            found[0].held.pop((found[1].key.request_id, found[1].key.attempt))

    @rule(pick=PICK, what=st.sampled_from(["die", "live", "live", "silent", "draining", "full"]))
    def change_worker(self, pick: int, what: str) -> None:
        worker = list(self.fleet.workers.values())[pick % len(self.fleet.workers)]
        if what in ("die", "live"):
            self.loop.call(worker.die if what == "die" else worker.live)
        else:
            setattr(worker, what, True)

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 7.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(rounds=st.integers(1, 6), count=st.integers(1, 3), again=st.booleans(), swapped=st.booleans())
    def work(self, rounds: int, count: int = 1, again: bool = False, swapped: bool = False) -> None:
        """All workers that can do all they have to, in the order that is asked for."""
        for _ in range(rounds):
            for worker in self.fleet.workers.values():
                for job in list(worker.jobs):
                    self.loop.call(worker.finish, job)
                for held in list(worker.held.values()):
                    self.loop.call(lambda: worker.step(held, count=count, again=again, swapped=swapped))  # noqa: B023
            self.loop.advance(0.05)

    @invariant()
    def clients_have_what_they_should(self) -> None:
        for client in self.clients:
            request = client.request
            complete = True
            for choice, tokens in client.tokens.items():
                expected = expected_tokens(
                    request.prompt_ids, request.max_tokens, params=request.params, choice_index=choice
                )
                assert tokens == expected[: len(tokens)], f"{request.id}: {tokens}, not {expected}"
                complete &= tokens == expected
            assert client.ends <= 1
            if client.usage is not None:
                assert complete, f"{request.id} ended as if it were whole"
                assert client.error is None
            if client.ends:
                assert client.usage or client.error or client.left
            else:
                assert self.loop.now <= request.deadline + LATE_S, f"{request.id} outlives its deadline"

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            link_module.control_channel = self._channel
            self.loop.close()

    def _finish(self) -> None:
        for worker in self.fleet.workers.values():
            self.loop.call(worker.live)
        for _ in range(200):
            self.work(1)
            if all(client.ends for client in self.clients):
                break
            self.loop.advance(1.0)
        self.clients_have_what_they_should()
        if hung := [client.request.id for client in self.clients if not client.ends]:
            raise Hung(f"{hung} never end")
        for client in self.clients:
            assert client.left or client.usage or isinstance(client.error, BatonError)
        self.loop.advance(LEASE_S)
        assert len(self.dispatcher.queue) == 0
        assert not self.loop.run_until_complete(self.request_runner.ledger()).entries
        fleet = self.pool.fleet
        assert len(fleet.prefill) == len(self.fleet.prefills)
        assert len(fleet.decode) == len(self.fleet.decodes)
        assert all(view.open_requests == 0 for view in (*fleet.prefill.values(), *fleet.decode.values()))
        for worker in self.fleet.workers.values():
            assert not any((worker.held, worker.waiting, worker.jobs, worker.exports))
        self.dispatcher.close()
        self.loop.run_until_complete(self.request_runner.wait_stopped())
        self.loop.run_until_complete(self.running.aclose())
        self.loop.finish()


class MixedRouterMachine(RouterMachine):
    workers = 0, 0, 2


class AllRolesMachine(RouterMachine):
    workers = 1, 1, 1


TestRouter = machine_test(RouterMachine, 70, 40)
TestMixedRouter = machine_test(MixedRouterMachine, 40, 40)
TestAllRoles = machine_test(AllRolesMachine, 30, 40)
