"""Placement of attempts: an assignment at a prefill worker, and pages at a decode worker.

1. `place` makes a `Waiter` of the request, and `PlacementScheduler.push` adds it to the queue.
2. `_give_turn` takes a `Turn` from `next_turn`, which selects workers for the first waiter that finds room, and makes
   a `PrefillAssignment`: the prompt counts at the prefill worker.
3. `_wait_for_turn` receives the assignment in the task of the request.
4. `_reserve` asks the selected decode workers for pages. If one grants them, the result is a `Placement`.
5. If all refuse, the waiter is in the queue again, with a `Refusal`, and step 2 follows.

`placement/scheduler.py` decides which request is placed and where; this module waits, and asks the workers. Changes
of workers and released assignments cause step 2.

Requests also wait in the queue while a role has no workers, each for at most `worker_wait_s` seconds; then it fails
with Unavailable.

A request that is suspected of killing workers waits outside the queue for workers of its own (`isolation.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

from baton.config.router import RouterConfig
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.kv.format import Shard
from baton.lifecycle import State
from baton.request import ReserveResult
from baton.telemetry.logs import about
from baton.telemetry.metrics import BREAKERS_OPEN
from router.isolation import Isolation, IsolationGrant
from router.placement.policy import SelectionCriteria, WorkerSelection, can_serve
from router.placement.scheduler import PlacementScheduler, selection_criteria
from router.placement.waiter import PlacementRequest, Refusal, Waiter
from router.workers.decode_session import DecodeCall
from router.workers.failures import AttemptBreakers, Breakers, Deliver, Suspicion
from router.workers.link import WorkerLink
from router.workers.pool import WorkerPool
from router.workers.prefill_call import PrefillAssignment

_logger = logging.getLogger(__name__)


class _TooLarge(Exception):
    """The request is too large for every decode worker that is there."""


class Dispatcher:
    """Gives placements to attempts. Use it on the event loop only."""

    def __init__(self, pool: WorkerPool, config: RouterConfig) -> None:
        self._pool = pool
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.scheduler = PlacementScheduler(
            pool.prefixes,
            capacity=config.queue_capacity,
            prefill_limit=config.prefill_limit,
            max_wait_s=config.queue_wait_s,
        )
        self._turn_futures: dict[Waiter, asyncio.Future[tuple[PrefillAssignment, WorkerSelection]]] = {}
        """The next turn of each waiter, as a future of its assignment and the selected workers."""
        self._assignment_tenants: dict[PrefillAssignment, str] = {}
        """Tenant of each assignment at a prefill worker that came from the queue."""
        self._breakers = Breakers(self._loop.time)
        self._changed = asyncio.Event()
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._reserver = DecodeReserver(pool, self._breakers, config.reserve_timeout_s)
        self._isolation = Isolation(
            pool,
            self._breakers,
            self._changed,
            lambda: self.scheduler.fleet_epoch,
            wait_s=config.isolation_wait_s,
            worker_wait_s=config.worker_wait_s,
        )
        pool.subscribe(self._on_update)

    def check_admission(self, tenant: str, *, needs_decode: bool) -> None:
        """Raise Overloaded if the queue is full for the tenant.

        Raises Unavailable if no worker can serve the request and `worker_wait_s` is 0.
        """
        self._check_workers(needs_decode=needs_decode)
        self.scheduler.check_capacity(tenant)

    def _check_workers(self, *, needs_decode: bool) -> None:
        if not self._config.worker_wait_s and not can_serve(self._pool.fleet, needs_decode=needs_decode):
            raise Unavailable(self._pool.describe_missing())

    def close(self) -> None:
        """Fail all requests in the queue with Unavailable."""
        for waiter in self.scheduler:
            self._fail_waiter(waiter, Unavailable("the router is stopping"))
        self._arm_overdue_timer()

    @contextlib.asynccontextmanager
    async def place(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion] = lambda: Suspicion.NONE
    ) -> AsyncIterator[Placement]:
        """Wait for a placement and hold it until the block ends, which releases the assignment and the pages.

        `deliver` gets the events of the attempt. While `suspicion` returns more than NONE, the request gets workers of
        its own. Raises Overloaded at once if the queue is full or the deadline can't be met, Unavailable if no worker
        that can serve the request came in time, and InvalidRequest if no decode worker can ever hold it.
        """
        try:
            placement = await self._isolate(request, deliver, suspicion) if suspicion() else None
            if placement is None:
                placement = await self._wait_in_queue(request, deliver)
        finally:
            self._reserver.cancel_claims(request)
        try:
            yield placement
        finally:
            placement.breakers.end()
            self.release(placement.prefill)
            if placement.decode is not None:
                placement.decode.close()
            if placement.isolation is not None:
                placement.isolation.release()
            self._on_update()

    def release(self, assignment: PrefillAssignment) -> None:
        """Release the assignment, since the prompt is computed; idempotent."""
        if self._free(assignment):
            self._give_turns()

    def _free(self, assignment: PrefillAssignment) -> bool:
        if not assignment.release():
            return False
        if (tenant := self._assignment_tenants.pop(assignment, None)) is not None:
            self.scheduler.release_prefill(tenant)
        return True

    async def _isolate(
        self, request: PlacementRequest, deliver: Deliver, suspicion: Callable[[], Suspicion]
    ) -> Placement | None:
        """A placement on workers of its own; None if the request may run among others."""
        request = replace(request, isolated=True)

        async def reserve(
            criteria: SelectionCriteria, selection: WorkerSelection, too_small_reasons: Mapping[str, str]
        ) -> Placement | Refusal:
            assignment, answer = self._assign(selection, criteria), None
            try:
                answer = await self._reserver.reserve(request, assignment, selection, deliver, too_small_reasons)
            finally:
                if not isinstance(answer, Placement):
                    assignment.release()
            return answer

        placed = await self._isolation.place(request, reserve, suspicion)
        return placed and replace(placed[0], isolation=placed[1])

    async def _wait_in_queue(self, request: PlacementRequest, deliver: Deliver) -> Placement:
        """Wait in the queue until a turn brings a placement."""
        now = self._loop.time()
        waiter = Waiter(request, now)
        if not request.is_retry:
            self._check_workers(needs_decode=request.needs_decode)
        self.scheduler.push(waiter, self._pool.fleet, now)
        self._turn_futures[waiter] = self._loop.create_future()
        self._give_turns()
        try:
            while True:
                try:
                    assignment, selection = await self._wait_for_turn(waiter)
                except _TooLarge:
                    await self._wait_for_larger_worker(waiter)
                else:
                    if (placement := await self._reserve(waiter, assignment, selection, deliver)) is not None:
                        return placement
        finally:
            # A waiter in the queue must have a future for its turn, also after an error.
            self.scheduler.remove(waiter)
            del self._turn_futures[waiter]
            self.scheduler.forget(waiter)

    async def _wait_for_turn(self, waiter: Waiter) -> tuple[PrefillAssignment, WorkerSelection]:
        """Wait for a turn. Raises _TooLarge if no decode worker can ever hold the request."""
        future = self._turn_futures[waiter]
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._end_turn(waiter, future.result()[0])
            raise
        finally:
            if self.scheduler.remove(waiter):
                self._give_turns()

    async def _reserve(
        self, waiter: Waiter, assignment: PrefillAssignment, selection: WorkerSelection, deliver: Deliver
    ) -> Placement | None:
        """Ask the selected decode workers; None if all refuse, and the waiter is back in the queue."""
        answer = None
        try:
            too_small_reasons = waiter.refusal.too_small_reasons
            answer = await self._reserver.reserve(waiter.request, assignment, selection, deliver, too_small_reasons)
            if isinstance(answer, Placement):
                self.scheduler.record_grant(waiter, self._loop.time())
                return answer
            self._turn_futures[waiter] = self._loop.create_future()
            self.scheduler.record_refusal(waiter, answer, self._loop.time())
            if self.scheduler.is_too_large(waiter, self._pool.fleet):
                # Its next turn may come only after a change of a worker.
                self._fail_waiter(waiter, _TooLarge())
            return None
        finally:
            self._end_turn(waiter, None if isinstance(answer, Placement) else assignment)

    def _end_turn(self, waiter: Waiter, unused: PrefillAssignment | None) -> None:
        """End a turn; `unused` is its assignment if it brought no placement."""
        self.scheduler.end_turn(waiter)
        if unused is not None:
            self._free(unused)
        self._give_turns()

    async def _wait_for_larger_worker(self, waiter: Waiter) -> None:
        """Wait until a decode worker joins that is large enough, and return to the queue.

        Only retries wait, because they ran on such a worker before. Raises InvalidRequest for a new request, and
        Unavailable after `worker_wait_s` seconds.
        """
        request, reasons = waiter.request, "; ".join(waiter.refusal.too_small_reasons.values())
        problem = (
            f"{request.context_tokens} tokens of context and {request.max_new_tokens} of output need more than any "
            f"decode worker can hold (--kv-memory, --max-model-len): {reasons}"
        )
        if not request.is_retry:
            raise InvalidRequest("max_tokens", problem)
        try:
            async with asyncio.timeout(self._config.worker_wait_s):
                while self.scheduler.is_too_large(waiter, self._pool.fleet):
                    self._changed.clear()
                    await self._changed.wait()
                    self.scheduler.forget_departed(waiter, self._pool.fleet)
        except TimeoutError:
            waited = f"after a wait of {self._config.worker_wait_s:g} s"
            message = f"no decode worker is left that could hold the request, {waited}: {problem}"
            raise Unavailable(message) from None
        self._turn_futures[waiter] = self._loop.create_future()
        self.scheduler.requeue(waiter, self._loop.time(), as_head=True)
        self._give_turns()

    def _on_update(self) -> None:
        self.scheduler.begin_epoch()
        self._breakers.retain(self._pool.fleet)
        workers, pairs = self._breakers.count_open()
        BREAKERS_OPEN.labels("worker").set(workers)
        BREAKERS_OPEN.labels("pair").set(pairs)
        self._give_turns()

    def _give_turns(self) -> None:
        """Give turns in the order of the queue while prefill workers have room."""
        self._changed.set()
        without_prefill_room: set[Waiter] = set()
        while self._give_turn(without_prefill_room):
            pass
        self._arm_overdue_timer()

    def _give_turn(self, without_prefill_room: set[Waiter]) -> bool:
        """Give the next waiter its turn; False if no waiter can use one."""
        breakers = self._breakers.open_breakers()
        turn = self.scheduler.next_turn(self._pool.fleet, breakers, self._loop.time(), without_prefill_room)
        if turn is None:
            return False
        waiter, future = turn.waiter, self._turn_futures[turn.waiter]
        if future.done():
            # The waiter was cancelled, but its task has not run since.
            self.scheduler.remove(waiter)
        elif turn.selection is None:
            self._fail_waiter(waiter, _TooLarge())
        else:
            assignment = self._assign(turn.selection, turn.criteria)
            self.scheduler.begin_turn(waiter)
            self._assignment_tenants[assignment] = waiter.request.tenant
            future.set_result((assignment, turn.selection))
        return True

    def _arm_overdue_timer(self) -> None:
        """Start the timer for waiters while no workers can serve; stop it when some can."""
        self.scheduler.record_fleet(self._pool.fleet, self._loop.time())
        missing = self.scheduler.lacks_workers
        if missing and self._overdue_timer is None:
            self._overdue_timer = self._loop.call_later(self._config.worker_wait_s, self._fail_overdue)
        elif not missing and self._overdue_timer is not None:
            self._overdue_timer.cancel()
            self._overdue_timer = None

    def _fail_overdue(self) -> None:
        """Fail waiters that have waited `worker_wait_s` seconds for a worker."""
        self._overdue_timer, wait_s = None, self._config.worker_wait_s
        self.scheduler.record_fleet(self._pool.fleet, self._loop.time())
        late, next_at = self.scheduler.overdue(self._pool.fleet, self._loop.time(), wait_s)
        for waiter in late:
            self._fail_waiter(waiter, Unavailable(self._pool.describe_missing(wait_s)))
        if math.isfinite(next_at):
            self._overdue_timer = self._loop.call_at(next_at, self._fail_overdue)

    def _fail_waiter(self, waiter: Waiter, error: Exception) -> None:
        self.scheduler.remove(waiter)
        if not (future := self._turn_futures[waiter]).done():
            future.set_exception(error)

    def _assign(self, selection: WorkerSelection, criteria: SelectionCriteria) -> PrefillAssignment:
        """An assignment at the selected prefill worker."""
        cached = min(criteria.prefill_match.tokens(selection.prefill), criteria.tokens)
        return self._pool.prefill_link(selection.prefill).assign(criteria.tokens, cached)


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker from which prefill can fetch KV: its shards with KV addresses, and its incarnation."""

    shards: tuple[Shard, ...]
    incarnation: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt; `decode` is None if the attempt needs no decode worker.

    `consumer` is the decode worker's name in KV tickets. `breakers` count faults and successes of the
    workers. The decode worker has pinned the KV of the first `pinned_tokens` tokens; prefill can fetch it from `peer`,
    unless that is None.
    """

    prefill: PrefillAssignment
    breakers: AttemptBreakers
    decode: DecodeCall | None = None
    decode_address: str | None = None
    decode_incarnation: str = ""
    consumer: str = ""
    pinned_tokens: int = 0
    peer: Peer | None = None
    isolation: IsolationGrant | None = None
    """The grant of the attempt, if its request runs isolated."""

    def describe(self) -> str:
        """The workers, for the ledger's reader."""
        decode = f", decode at {self.decode_address}" if self.decode else ""
        return f"prefill {self.prefill.link.name}{decode}"


class DecodeReserver:
    """Asks decode workers for pages, one after the other; waits at most `timeout_s` seconds for each."""

    def __init__(self, pool: WorkerPool, breakers: Breakers, timeout_s: float) -> None:
        self._pool = pool
        self._breakers = breakers
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._refused: dict[tuple[str, int], dict[str, DecodeCall]] = {}
        """Refused calls by (request id, attempt number), then by the address of the decode worker."""

    async def reserve(
        self,
        request: PlacementRequest,
        assignment: PrefillAssignment,
        selection: WorkerSelection,
        deliver: Deliver,
        too_small_reasons: Mapping[str, str],
    ) -> Placement | Refusal:
        """Ask the decode workers, one after the other, until one grants pages.

        The caller must release the assignment if the result is a Refusal.
        """
        if not request.needs_decode:
            self._record_expected_blocks(request, assignment, selection)
            return Placement(assignment, self._breakers.begin_attempt(selection.prefill, None))
        addresses = (*selection.decode, *self._avoided_decodes(request, selection, too_small_reasons))
        request.lifecycle.enter(State.RESERVING, self._loop.time(), self._timeout_s * len(addresses))
        answers: dict[str, ReserveResult] = {}
        refused = self._refused.setdefault((request.request_id, request.attempt_number), {})
        for address in addresses:
            link = self._pool.decode_link(address)
            if link is None or link.session is None or not link.session.open:
                continue
            # The selection may have been made before the worker was isolated for another request.
            if address in self._pool.fleet.isolated and not request.isolated:
                continue
            # A worker with another checkpoint may have taken the address since.
            if link.fingerprint != assignment.fingerprint:
                continue
            call, consumer = link.session.begin_call(request.request_id, request.attempt_number, deliver), link.consumer
            incarnation = link.status.identity.incarnation if link.status else ""
            digests = self._pool.prefixes.digests_to_pin(address, link.namespace, request.digests)
            answer = answers[address] = await self._ask(call, request, digests)
            if not answer.granted:
                refused[address] = call
            else:
                refused.pop(address, None)
                link.subtract_free(request.context_tokens - answer.cached_tokens, len(request.choices))
                breakers = self._breakers.begin_attempt(selection.prefill, address)
                self._record_expected_blocks(request, assignment, selection)
                peer = self._peer(assignment, link) if answer.cached_tokens else None
                cached = answer.cached_tokens
                return Placement(assignment, breakers, call, address, incarnation, consumer, cached, peer)
        request.lifecycle.enter(State.QUEUED, self._loop.time())
        return self._refusal(request, selection, answers, too_small_reasons)

    def cancel_claims(self, request: PlacementRequest) -> None:
        """End the claims of the request at decode workers that have refused it."""
        for call in self._refused.pop((request.request_id, request.attempt_number), {}).values():
            call.cancel_claim()

    def _refusal(
        self,
        request: PlacementRequest,
        selection: WorkerSelection,
        answers: Mapping[str, ReserveResult],
        too_small_reasons: Mapping[str, str],
    ) -> Refusal:
        too_small_reasons = {**too_small_reasons}
        for address, answer in answers.items():
            if answer.too_small:
                link = self._pool.decode_link(address)
                too_small_reasons[address] = f"decode worker {link.name if link else address}: {answer.reason}"
        reservable_tokens = max((answer.reservable_tokens for answer in answers.values()), default=0)
        paired = {second for first, second in request.avoided_pairs if first == selection.prefill}
        excluded = too_small_reasons.keys() | self._pool.fleet.isolated | paired
        return Refusal(
            too_small_reasons,
            min((each.retry_after_s for each in answers.values() if each.retry_after_s), default=math.inf),
            reservable_tokens,
            excluded_workers=frozenset(address for address in excluded if address in self._pool.fleet.decode),
            refused_for_choices=len(request.choices) > 1 and reservable_tokens >= request.context_tokens,
        )

    def _avoided_decodes(
        self, request: PlacementRequest, selection: WorkerSelection, too_small_reasons: Mapping[str, str]
    ) -> list[str]:
        """Addresses of decode workers that the request avoids, to ask after all others: that is better than to wait.

        Empty for a request that must run isolated.
        """
        fleet = self._pool.fleet
        prefill = fleet.prefill.get(selection.prefill)
        if request.isolated or not request.avoided_workers or prefill is None:
            return []
        criteria = selection_criteria(request, too_small_reasons, fleet, self._pool.prefixes)
        excluded = {second for first, second in criteria.avoided_pairs if first == selection.prefill}
        excluded.update(criteria.too_small_workers, selection.decode)
        addresses = (view.address for view in fleet.compatible_decodes(prefill))
        return [address for address in addresses if address in criteria.avoided_workers and address not in excluded]

    def _record_expected_blocks(
        self, request: PlacementRequest, assignment: PrefillAssignment, selection: WorkerSelection
    ) -> None:
        """Record that the prefill worker will soon hold the blocks: the prompt goes there at once."""
        writes = request.cache.writes
        self._pool.prefixes.expect(selection.prefill, request.digests, assignment.cached_tokens, writes=writes)

    def _peer(self, assignment: PrefillAssignment, decode: WorkerLink) -> Peer | None:
        """The decode worker as a source of KV; None if its block namespace differs, or if it refuses our KV tickets."""
        status = decode.status
        if status is None or decode.namespace != assignment.link.namespace or not self._pool.signs_for(status.identity):
            return None
        return Peer(status.identity.shards_at(decode.address), status.identity.incarnation)

    async def _ask(self, call: DecodeCall, request: PlacementRequest, digests: bytes) -> ReserveResult:
        """The answer of one worker; a refusal if none comes in time or the session is lost."""
        answer = ReserveResult(False, "no answer", False)
        left = request.deadline - self._loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call.reserve(
                    context_tokens=request.context_tokens,
                    max_new_tokens=request.max_new_tokens,
                    choices=request.choices,
                    deadline_ms=0 if math.isinf(left) else max(math.ceil(1e3 * left), 1),
                    salt=request.salt,
                    cache=request.cache,
                    prefix_digests=digests,
                )
        except (TimeoutError, BatonError) as error:
            name = f"{request.request_id}/{request.attempt_number}"
            _logger.warning("reservation %s failed: %r", name, error, extra=about(name))
        finally:
            if not answer.granted:
                call.close()
        return answer
