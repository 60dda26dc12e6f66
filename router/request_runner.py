"""One request's life, from its arrival to its last token: one attempt, or several when workers fail.

    serve ── attempt ── finish
      ▲         └─ failure: a new attempt, elsewhere, with the output ids that the client has had
      └─────────── as long as `RetryHistory` and `RetryBudget` allow; then the last failure is the answer

Prompt and output ids are all the state there is, so an attempt that continues a stream is an ordinary prefill. Before
the first token an attempt serves all choices together; after it, each choice goes on by itself. An attempt:

    QUEUED ── place ── RESERVING ── PREFILLING ── first token ── TRANSFERRING ── decode's first ── DECODING ── ENDED
                                    prefill call and Start at once       tokens may come before the first token

Events come from the prefill call and from the decode session, and each is handled at once, where it arrives: a token
costs no turn of the attempt's task, which waits only for the end. However it ends (served, failed, cancelled, too
late), `Attempt.run` gives back all of it in one place: the prefill call and its assignment, the decode attempt, and the
exported KV that was not fetched. `workers/failures.py` has the rules for retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.config.router import RouterConfig
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    SourceUnreachable,
    Unavailable,
)
from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import Lifecycle, State
from baton.request import Output, Prefilled, PrefillProgress, PrefixSource, PromptReport, RemoteExport
from baton.telemetry.metrics import ATTEMPTS_FAILED, PLACED_TOKENS, REPLAYS, RETRIES_REFUSED, WASTED_PREFILL_TOKENS
from baton.transfer.tickets import TicketSigner
from router.dispatcher import Dispatcher, Placement
from router.output import OutputProcessor
from router.placement.prefix_directory import BlockHasher
from router.placement.waiter import PlacementRequest
from router.serving.threads import TenantThreads
from router.serving.validator import Request
from router.workers.calls import (
    LARGE_REQUEST,
    LOSS_GRACE_S,
    AbandonCalls,
    DecodeEnded,
    Event,
    PrefillMessage,
    call_prefill,
    prefill_message,
)
from router.workers.failures import AvoidedWorker, Blame, Cause, Failed, RetryBudget, RetryHistory
from router.workers.pool import Pool

DEATH_WAIT_S = 15.0
"""Seconds to wait for a worker that a request may have killed, before it counts as dead."""

_STOPPED = "the router is stopping, and the request has not ended"

_CAUSE_TEXTS = {
    Cause.FAULT: "fault of",
    Cause.LOST: "lost connection to",
    Cause.DRAIN: "moved away from",
    Cause.PREEMPTED: "preempted at",
    Cause.REFUSED: "refused by",
}

_logger = logging.getLogger(__name__)


class RequestRunner:
    """Serves requests, each in a task of its own; `router_id` is its name in the ledger.

    `signer` signs the tickets with which workers fetch KV, where the fleet has keys for them.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        config: RouterConfig,
        threads: TenantThreads,
        *,
        router_id: str = "router",
        signer: TicketSigner | None = None,
    ) -> None:
        self._router_id = router_id
        self._abandon_calls = AbandonCalls()
        self._deps = AttemptDeps(pool, dispatcher, config, self._abandon_calls, signer, threads)
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._budget = RetryBudget(self._loop.time())
        self._running: dict[asyncio.Task[Any], OutputProcessor] = {}
        self._attempts: dict[Attempt, None] = {}
        """Requests that hold, or wait for, anything; none means that nothing is left of any request."""
        self._stopped = False

    async def run(self, request: Request, output: OutputProcessor) -> None:
        """Serve a request to its end; its output and its error go to the output queue."""
        if request.deadline is None:
            request = replace(request, deadline=request.arrived + self._config.request_timeout_s)
        self._budget.record_request()
        self._running[_this_task()] = output
        try:
            if self._stopped:
                # It was still being tokenized when the others were ended.
                raise Unavailable(_STOPPED)
            run = self._deps.threads.of(request.tenant)
            hasher = BlockHasher(request.prompt_ids, request.salt, run) if request.reads_cache else None
            await self._serve_choices(
                RequestState(request, output, hasher), range(request.params.n), RetryHistory(), 0.0
            )
            output.close()
        except BatonError as error:
            output.queue.fail(error)
        except Exception as error:
            _logger.exception("request %s failed", request.id)
            output.queue.fail(error)
        finally:
            del self._running[_this_task()]

    async def ledger(self) -> Ledger:
        """Every attempt that lives, from its birth until all that it held was given back."""
        now = self._loop.time()
        entries = tuple(attempt.ledger_entry(now) for attempt in self._attempts)
        return Ledger(self._router_id, "router", entries=entries)

    def stop(self) -> None:
        """End all requests and begin none any more; clients are told that the router is gone."""
        self._stopped = True
        for task, output in self._running.items():
            output.queue.fail(Unavailable(_STOPPED))
            task.cancel()

    async def finish(self) -> None:
        """Wait until stopped requests hold nothing, and nothing goes on in the background."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._abandon_calls.finish()

    async def _serve_choices(
        self, state: RequestState, choices: Sequence[int], history: RetryHistory, delay_s: float
    ) -> None:
        """Make attempts until the choices have ended; raises the last failure when there may be no more."""
        output = state.output
        while choices := output.unserved(choices):
            if len(choices) > 1 and any(output.output_ids(choice) for choice in choices):
                await _run_all(self._serve_choices(state, (choice,), history.fork(), delay_s) for choice in choices)
                return
            before = output.count_emitted(choices)
            try:
                await self._run_attempt(Attempt(self._deps, state, choices, history), delay_s)
            except AttemptFailed as attempt:
                if (tokens := output.count_emitted(choices) - before) > 0:
                    history.record_progress(tokens // len(choices))
                await self._check_worker_deaths(state.request, history, attempt)
                delay_s = self._retry(state.request, history, attempt)

    async def _run_attempt(self, attempt: Attempt, delay_s: float) -> None:
        self._attempts[attempt] = None
        try:
            await attempt.run(delay_s)
        finally:
            del self._attempts[attempt]

    async def _check_worker_deaths(self, request: Request, history: RetryHistory, attempt: AttemptFailed) -> None:
        """Raise EngineError if the request kills workers, once a death was seen or must be presumed."""
        loss, losses = attempt.failed.loss, self._deps.pool.losses
        if loss is None:
            return
        history.record_loss(loss, at_decode=attempt.failed.blame is Blame.DECODE, alone=attempt.alone)
        if not history.has_killed_workers(losses.count_others(history.losses)):
            return
        settled, until = asyncio.Event(), self._loop.time() + DEATH_WAIT_S
        loss.on_settled(settled.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until if request.deadline is None else min(until, request.deadline)):
                await settled.wait()
        if history.has_killed_workers(losses.count_others(history.losses)):
            deaths = sum(loss.death for loss in history.losses)
            message = f"the request was present at {deaths} worker deaths, at the last one alone"
            _logger.warning("request %s ends: %s: %s", request.id, message, attempt.failed.error)
            raise EngineError(f"{message}: {attempt.failed.error}")

    def _retry(self, request: Request, history: RetryHistory, attempt: AttemptFailed) -> float:
        """Seconds until the next attempt; raises the failure when there is to be none."""
        failed, now = attempt.failed, self._loop.time()
        ATTEMPTS_FAILED.labels(type(failed.error).__name__).inc()
        if request.deadline is not None and now >= request.deadline:
            raise DeadlineExceeded(f"the request's deadline passed; the last attempt failed: {failed.error}")

        def charge() -> bool:
            granted = self._budget.charge(now, blamed=attempt.blamed, first=history.faults == 1)
            RETRIES_REFUSED.inc(not granted)
            return granted

        level = logging.WARNING if failed.cause in (Cause.FAULT, Cause.LOST) else logging.INFO
        try:
            delay_s = history.retry(failed, max_attempts=self._config.max_attempts, charge=charge)
        except BatonError:
            _logger.warning("request %s ends: %s", request.id, describe_failure(failed, attempt.blamed))
            raise
        _logger.log(level, "request %s is tried again: %s", request.id, describe_failure(failed, attempt.blamed))
        REPLAYS.labels(failed.cause.value).inc()
        return delay_s


def describe_failure(failed: Failed, blamed: str) -> str:
    """The outcome of an attempt, and its worker or pair."""
    error = str(failed.error)
    # Workers name themselves in their errors, but for those of a call that broke.
    where = error if blamed in error else f"worker {blamed}: {error}"
    return f"{_CAUSE_TEXTS[failed.cause]} {where}"


def _this_task() -> asyncio.Task[Any]:
    """The task that runs; a request that knew it would be part of a cycle, and wait for the garbage collector."""
    if (task := asyncio.current_task()) is None:
        raise RuntimeError("a request is served in a task")
    return task


async def _run_all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error ends the others and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_FINAL = (InvalidRequest, NotFound, DeadlineExceeded)
"""Faults that another attempt would only repeat."""


class AttemptFailed(Exception):
    """An attempt failed, and another may succeed; `blamed` names the worker or pair at fault.

    `alone`: nothing else ran at the worker.
    """

    def __init__(self, failed: Failed, blamed: str, *, alone: bool) -> None:
        super().__init__(str(failed.error))
        self.failed = failed
        self.blamed = blamed
        self.alone = alone


@dataclass(frozen=True, slots=True)
class AttemptDeps:
    """Dependencies of an attempt."""

    pool: Pool
    dispatcher: Dispatcher
    config: RouterConfig
    abandon_calls: AbandonCalls
    signer: TicketSigner | None
    threads: TenantThreads


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request in service; `hasher` is None for one that may not read the prefix cache."""

    request: Request
    output: OutputProcessor
    hasher: BlockHasher | None = None


class Attempt:
    """One attempt at choices that have the same output so far."""

    def __init__(self, deps: AttemptDeps, state: RequestState, choices: tuple[int, ...], history: RetryHistory) -> None:
        self._deps = deps
        self._hasher = state.hasher
        self._request = request = state.request
        self._output = state.output
        self._choices = choices
        self._history = history
        self._number = next(history.numbers)
        self._output_ids = list(state.output.output_ids(choices[0]))
        if not state.output.unfinished(choices):
            # Only the report on the prompt is missing; prefill samples the last token again.
            self._output_ids.pop()
        self._loop = asyncio.get_running_loop()
        self._run_on_thread = deps.threads.of(request.tenant)
        deadline = math.inf if request.deadline is None else request.deadline
        self._life = Lifecycle(State.QUEUED, self._loop.time(), request_deadline=deadline)
        self._placement: Placement | None = None
        self._ended: asyncio.Future[Failed | Exception | None] = self._loop.create_future()
        """The failure that ended it, an error of our own, or None when all choices have ended."""
        self._finished: set[int] = set()
        """Choices of which the workers will send nothing more."""
        self._prefilled = self._fetched = self._prefill_failed = False

    async def run(self, delay_s: float) -> None:
        """Serve the choices, after a pause; raises AttemptFailed when another attempt may succeed."""
        self._output.begin(self._choices)
        try:
            async with self._place(delay_s) as (placement, message):
                await self._serve_placed(placement, message)
        finally:
            self._life.end(self._loop.time())
            # It delivers to this attempt: the cycle would keep the prompt until the garbage collector runs.
            self._placement = None

    def ledger_entry(self, now: float) -> LedgerEntry:
        """Its line in the router's ledger, at `now` on the event loop's clock."""
        deadline = self._life.deadline
        return LedgerEntry(
            owner=f"{self._request.id}/{self._number}",
            kind="request",
            state=self._life.state.value,
            age_s=now - self._life.since,
            deadline_s=None if math.isinf(deadline) else deadline - now,
            tenant=self._request.tenant,
            detail=self._placement.describe() if self._placement else "",
        )

    @contextlib.asynccontextmanager
    async def _place(self, delay_s: float) -> AsyncIterator[tuple[Placement, PrefillMessage]]:
        """A placement, waited for until the deadline, and the message for its prefill worker."""
        dispatcher, began = self._deps.dispatcher, self._loop.time()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(_until(self._life.request_deadline)):
                    await asyncio.sleep(delay_s)
                    request, message = await self._placement_request(), await self._message()
                    placing = dispatcher.place(request, self._deliver, lambda: self._history.suspicion)
                    self._placement = await stack.enter_async_context(placing)
            except TimeoutError:
                pool, waited_s = self._deps.pool, self._loop.time() - began
                where = "" if pool.serving else f" after {waited_s:.1f} s in the queue: {pool.describe_missing()}"
                raise _too_late(where) from None
            yield self._placement, message

    async def _placement_request(self) -> PlacementRequest:
        """The request to the dispatcher; with one token to go, prefill samples it, and nothing is decoded."""
        request, history = self._request, self._history
        context, left = len(request.prompt_ids) + len(self._output_ids), request.max_tokens - len(self._output_ids)
        digests = await self._hasher.hash(self._deps.pool.namespaces, self._output_ids) if self._hasher else {}
        return PlacementRequest(
            request_id=request.id,
            attempt=self._number,
            tenant=request.tenant,
            life=self._life,
            context_tokens=context,
            max_new_tokens=left,
            choices=self._choices,
            is_retry=self._number > 0,
            decodes=left > 1,
            digests=digests,
            salt=request.salt,
            cache=request.cache,
            avoided=history.avoid,
            avoid_pairs=history.avoid_pairs,
        )

    async def _message(self) -> PrefillMessage:
        """The order to the prefill worker.

        It is made before there is a placement: the tenant's work may keep its threads busy for long, and a worker that
        waits for them serves no request.
        """
        request = self._request
        make = partial(
            prefill_message,
            request_id=request.id,
            attempt=self._number,
            prompt_ids=request.prompt_ids,
            output_ids=self._output_ids,
            choices=self._choices,
            params=request.params,
            tenant=request.tenant,
            cache_salt=request.salt,
            cache=request.cache,
            report_progress=request.report_progress,
        )
        sizes = map(len, (request.prompt_ids, self._output_ids, request.params.allowed_token_ids))
        return await self._run_on_thread(make) if sum(sizes) > LARGE_REQUEST else make()

    async def _serve_placed(self, placement: Placement, message: PrefillMessage) -> None:
        self._output.account.on_placed(self._loop.time())
        self._life.enter(State.PREFILLING, self._loop.time())
        transfer_id = secrets.token_hex(16) if placement.decode else ""
        source = self._source(placement)
        placement.prefill.attach(self._request.id, self._deliver)
        prefilling = asyncio.create_task(self._prefill(placement, message, transfer_id, source))
        try:
            self._start_decode(placement, transfer_id, source)
            await self._wait_for_end(placement)
        finally:
            self._end(None)
            placement.prefill.detach()
            prefilling.cancel()
            # In this order: the cancellation is sent first, and what it came too late for is abandoned.
            if transfer_id and not self._fetched and not self._prefill_failed:
                self._deps.abandon_calls.abandon(placement.prefill, transfer_id)
            await asyncio.gather(prefilling, return_exceptions=True)

    def _source(self, placement: Placement) -> PrefixSource | None:
        """The decode worker, if it holds a block more than prefill is thought to; prefill may fetch it."""
        peer = placement.peer
        namespace = placement.prefill.link.namespace if peer else None
        if peer is None or namespace is None:
            return None
        if placement.pinned_tokens - placement.prefill.cached_tokens < namespace.block_size:
            return None
        transfer_id = secrets.token_hex(16)
        kv_ticket = self._kv_ticket(transfer_id, peer.incarnation, placement.prefill.consumer)
        export = RemoteExport(transfer_id, peer.incarnation, peer.shards, kv_ticket)
        return PrefixSource(export, placement.pinned_tokens)

    def _kv_ticket(self, transfer_id: str, incarnation: str, consumer: str) -> bytes:
        """The ticket that lets `consumer` fetch KV until the deadline; empty where the fleet has no keys."""
        if (signer := self._deps.signer) is None:
            return b""
        expires = time.time() + (self._remaining() or 0.0)
        return signer.sign(transfer_id=transfer_id, incarnation=incarnation, consumer=consumer, expires_unix_s=expires)

    async def _prefill(
        self, placement: Placement, message: PrefillMessage, transfer_id: str, source: PrefixSource | None
    ) -> None:
        try:
            await call_prefill(
                placement.prefill,
                message,
                transfer_id=transfer_id,
                source=source,
                timeout=self._remaining(),
                silence_s=self._deps.config.prefill_silence_s,
                deliver=self._deliver,
            )
        except Exception as error:
            # Nobody waits for this task, and the attempt would wait until its deadline.
            self._end(error)

    def _start_decode(self, placement: Placement, transfer_id: str, source: PrefixSource | None) -> None:
        """Tell decode where to fetch the KV."""
        if placement.decode is None:
            self._finished.update(self._choices)
            return
        prefill = placement.prefill
        kv_ticket = self._kv_ticket(transfer_id, prefill.incarnation, placement.consumer)
        placement.decode.start(
            source=RemoteExport(transfer_id, prefill.incarnation, prefill.shards, kv_ticket),
            deadline_ms=math.ceil(1e3 * (self._remaining() or 0.0)),
            prefix_transfer_id=source.export.transfer_id if source else "",
        )

    async def _wait_for_end(self, placement: Placement) -> None:
        """Wait until all choices have ended; raise the failure that ended the attempt before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(_until(self._life.request_deadline)):
                await asyncio.shield(self._ended)
        if not self._ended.done():
            # Messages that are ready in the loop have arrived as well, and all that has arrived counts.
            await asyncio.sleep(0)
        if not self._ended.done():
            raise _too_late()
        match self._ended.result():
            case Failed() as failed:
                raise await self._classify_failure(placement, failed)
            case Exception() as error:
                raise error
        if self._fetched:
            placement.breakers.record_success(placement.breakers.decode)

    def _deliver(self, event: Event) -> None:
        """Handle an event at once."""
        placement = self._placement
        if self._ended.done():
            # Messages after the end come from a failed attempt, or from choices that the router has ended.
            return
        try:
            match event:
                case Output() if placement is not None:
                    self._on_output(placement, event)
                case Failed():
                    self._end(event)
                case Prefilled() if placement is not None:
                    self._on_prefilled(placement, event)
                case PrefillProgress():
                    self._output.report_progress(event)
                case PromptReport() if placement is not None:
                    self._output.add_report(event.start, event.tokens)
                    self._check_end(placement)
                case DecodeEnded() if placement is not None:
                    self._finished.update(self._choices)
                    self._check_end(placement)
        except Exception as error:
            # It is this request's, and not its whole session's.
            self._end(error)

    def _end(self, result: Failed | Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(result)

    def _on_prefilled(self, placement: Placement, event: Prefilled) -> None:
        self._prefilled = True
        placement.breakers.record_success(placement.breakers.prefill)
        self._deps.dispatcher.release(placement.prefill)
        if placement.decode is not None and self._life.state is State.PREFILLING:
            self._life.enter(State.TRANSFERRING, self._loop.time())
        if self._hasher is not None:
            PLACED_TOKENS.labels("expected").inc(placement.prefill.cached_tokens)
            PLACED_TOKENS.labels("found").inc(event.cached_tokens)
        cached = replace(event.cached, decode=placement.pinned_tokens)
        self._output.add_first_tokens(replace(event, cached=cached))
        self._check_end(placement, *(first.choice_index for first in event.first_tokens))

    def _on_output(self, placement: Placement, event: Output) -> None:
        if not self._fetched:
            self._on_first_output(placement)
        goes_on = self._output.add(event)
        if event.finish is not None:
            self._finished.add(event.choice_index)
        elif goes_on:
            return
        self._check_end(placement, event.choice_index)

    def _on_first_output(self, placement: Placement) -> None:
        self._fetched = True
        self._history.clear_losses()
        placement.prefill.detach()
        if placement.isolation is not None:
            placement.isolation.release()
        placement.breakers.record_success(placement.breakers.pair)
        placement.breakers.pass_trial(placement.breakers.decode)
        self._life.enter(State.DECODING, self._loop.time())

    def _check_end(self, placement: Placement, *changed: int) -> None:
        """End when all choices have, or when the workers say nothing more of one that has not.

        A changed choice that the router has ended is ended at decode too while others go on; closing the placement ends
        them all.
        """
        unfinished = self._output.unfinished(self._choices)
        if not unfinished:
            if self._output.report_complete:
                self._end(None)
        elif self._prefilled and self._finished.intersection(unfinished):
            error = EngineError("the workers ended the request without all of its tokens")
            self._end(Failed(error, Blame.DECODE if placement.decode else Blame.PREFILL))
        elif placement.decode is not None:
            for choice in set(changed).difference(unfinished):
                placement.decode.cancel_choice(choice)

    async def _classify_failure(self, placement: Placement, failed: Failed) -> Exception:
        """The meaning of a failure for the request, and for its workers."""
        if isinstance(failed.error, _FINAL) and failed.cause is not Cause.REFUSED:
            return failed.error
        # Decode may notice before the watch does that it can't fetch KV because the prefill worker is lost.
        grace_s = LOSS_GRACE_S if isinstance(failed.error, SourceUnreachable) else 0.0
        if failed.blame is Blame.PAIR and await placement.prefill.wait_for_loss(grace_s):
            failed = replace(failed, blame=Blame.PREFILL, cause=Cause.LOST, loss=placement.prefill.loss)
        self._prefill_failed = failed.blame is Blame.PREFILL and not self._prefilled
        if self._prefilled and not self._fetched and placement.decode is not None:
            WASTED_PREFILL_TOKENS.inc(len(self._request.prompt_ids) + len(self._output_ids))
        grant = placement.isolation
        alone = grant is not None and not grant.released and (failed.blame is Blame.PREFILL or grant.of_pair)
        return AttemptFailed(failed, self._record_blame(placement, failed), alone=alone)

    def _record_blame(self, placement: Placement, failed: Failed) -> str:
        """Have the next attempts avoid the worker or pair that failed; its name."""
        breakers, history, decode = placement.breakers, self._history, placement.decode_address
        prefill = placement.prefill.link.address
        if failed.blame is Blame.PAIR and decode is not None:
            key, name = breakers.pair, f"{prefill} {decode}"
            history.avoid_pairs |= {(prefill, decode)}
        else:
            of_decode = failed.blame is Blame.DECODE and decode is not None
            key, name = (breakers.decode, decode or "") if of_decode else (breakers.prefill, prefill)
            if failed.cause is not Cause.PREEMPTED:
                incarnation = placement.decode_incarnation if of_decode else placement.prefill.incarnation
                loss = self._deps.pool.losses.latest(incarnation) if failed.cause is Cause.LOST else None
                history.avoid |= {AvoidedWorker(name, incarnation, loss)}
        if failed.cause is Cause.FAULT:
            breakers.record_fault(key)
        return name

    def _remaining(self) -> float | None:
        """Seconds until the deadline."""
        left = self._life.request_deadline - self._loop.time()
        return None if math.isinf(left) else max(left, 0.001)


def _until(deadline: float) -> float | None:
    return None if math.isinf(deadline) else deadline


def _too_late(where: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(f"the request's deadline passed{where}")
