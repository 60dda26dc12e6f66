"""One request's life, from its arrival to its last token: one attempt, or several when workers fail.

    run ── _serve_choices ── Attempt.run ── output.close
                 ▲               └─ failure: a new attempt, elsewhere, with the output ids that the client has had
                 └───────────────── while `RetryHistory` and `RetryBudget` allow; then the last failure is the answer

A request has no state but its prompt and output ids, so a new attempt prefills both and continues the stream. Before
the first token one attempt serves all choices; a retry after it makes one attempt for each choice. An attempt:

    QUEUED ── place ── RESERVING ── PREFILLING ── first token ── TRANSFERRING ── decode's first ── DECODING ── ENDED
                                    prefill call and Start at once       tokens may come before the first token

Events come from the prefill call and from the decode session. Each is handled where it arrives, and does not wake the
attempt's task, which waits only for the end. However an attempt ends, each holder releases in its own `finally` block:

    `Attempt._serve_placed`   the prefill call, and the export if nobody fetched it
    `Dispatcher.place`        the assignment, and the decode worker's pages
    `Attempt.run`             the attempt's state

The rules for retries are in `retries.py`.
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
    unexpected,
)
from baton.ledger import Ledger, LedgerEntry
from baton.lifecycle import Lifecycle, State
from baton.rates import DecayingAverage
from baton.request import Output, Prefilled, PrefillProgress, PrefixSource, PromptLogprobs, RemoteExport
from baton.telemetry.logs import about
from baton.telemetry.metrics import ATTEMPTS_FAILED, PLACED_TOKENS, REPLAYS, RETRIES_REFUSED, WASTED_PREFILL_TOKENS
from baton.transfer.tickets import TicketSigner
from router.dispatcher import Dispatcher, Placement
from router.output import OutputProcessor
from router.placement.prefix_directory import BlockHasher
from router.placement.queue import PlacementRequest
from router.request import Request
from router.retries import RetryBudget, RetryHistory
from router.serving.threads import TenantThreads
from router.workers.failures import (
    AvoidedWorker,
    Blame,
    Cause,
    DecodeEnded,
    Event,
    FailureEvent,
)
from router.workers.pool import WorkerPool
from router.workers.prefill_call import (
    LARGE_REQUEST,
    LOSS_GRACE_S,
    ExportAbandoner,
    PrefillMessage,
    call_prefill,
    prefill_message,
)

_TIME_WEIGHT = 0.1

DEATH_WAIT_S = 15.0
"""Seconds after which a lost worker counts as dead, if a request may have killed it."""

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
    """Serves requests, each in a task of its own; `router_id` is the router's name in the ledger.

    `signer` signs the tickets with which workers fetch KV; None if the fleet has no ticket keys.
    """

    def __init__(
        self,
        pool: WorkerPool,
        dispatcher: Dispatcher,
        config: RouterConfig,
        threads: TenantThreads,
        *,
        router_id: str = "router",
        signer: TicketSigner | None = None,
    ) -> None:
        self._router_id = router_id
        self._abandoner = ExportAbandoner()
        self._deps = AttemptDeps(pool, dispatcher, config, self._abandoner, signer, threads)
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._budget = RetryBudget(self._loop.time())
        self._running: dict[asyncio.Task[Any], OutputProcessor] = {}
        self._attempts: dict[Attempt, None] = {}
        """Attempts that hold workers or wait for them; the values are not used."""
        self._stopped = False
        self.decode_s = DecayingAverage(_TIME_WEIGHT)
        """Mean time in decode of requests that have ended, in seconds."""

    @property
    def placed_attempts(self) -> int:
        """Number of attempts that workers serve."""
        return sum(attempt.is_placed for attempt in self._attempts)

    async def run(self, request: Request, output: OutputProcessor) -> None:
        """Serve a request to its end. Its output and its error go to the output queue; nothing is raised."""
        self._budget.record_request()
        self._running[_this_task()] = output
        try:
            if self._stopped:
                # `stop` ran while the request was tokenized.
                raise Unavailable(_STOPPED)
            run = self._deps.threads.for_tenant(request.tenant)
            hasher = BlockHasher(request.prompt_ids, request.salt, run) if request.reads_cache else None
            await self._serve_choices(
                RequestState(request, output, hasher), range(request.params.n), RetryHistory(), 0.0
            )
            self.decode_s.add(output.close().decode / 1e3)
        except BatonError as error:
            output.queue.fail(error)
        except Exception as error:
            _logger.exception("request %s failed", request.id, extra=about(request.id))
            output.queue.fail(unexpected(error, "the router"))
        finally:
            output.count_rest()
            del self._running[_this_task()]

    async def ledger(self) -> Ledger:
        """A ledger with one entry for each attempt that has not yet released all that it held."""
        now = self._loop.time()
        entries = tuple(attempt.ledger_entry(now) for attempt in self._attempts)
        return Ledger(self._router_id, "router", entries=entries)

    def stop(self) -> None:
        """Cancel all requests and refuse new ones; clients get Unavailable."""
        self._stopped = True
        for task, output in self._running.items():
            output.queue.fail(Unavailable(_STOPPED))
            task.cancel()

    async def wait_stopped(self) -> None:
        """Wait until the cancelled requests and all background calls have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._abandoner.finish()

    async def _serve_choices(
        self, state: RequestState, choices: Sequence[int], history: RetryHistory, delay_s: float
    ) -> None:
        """Make attempts until the choices have ended; raises the last failure if no other attempt is allowed."""
        output = state.output
        while choices := output.unserved(choices):
            if len(choices) > 1 and any(output.output_ids(choice) for choice in choices):
                await _run_all(self._serve_choices(state, (choice,), history.fork(), delay_s) for choice in choices)
                return
            before = output.count_emitted(choices)
            try:
                await self._run_attempt(Attempt(self._deps, state, choices, history), delay_s)
            except AttemptFailed as failure:
                if (tokens := output.count_emitted(choices) - before) > 0:
                    history.record_progress(tokens // len(choices))
                await self._check_worker_deaths(state.request, history, failure)
                delay_s = self._retry_delay_s(state.request, history, failure)

    async def _run_attempt(self, attempt: Attempt, delay_s: float) -> None:
        self._attempts[attempt] = None
        try:
            await attempt.run(delay_s)
        finally:
            del self._attempts[attempt]

    async def _check_worker_deaths(self, request: Request, history: RetryHistory, failure: AttemptFailed) -> None:
        """Raise EngineError if the request has killed workers; waits up to DEATH_WAIT_S to know whether they died."""
        loss, losses = failure.event.loss, self._deps.pool.losses
        if loss is None:
            return
        history.record_loss(loss, at_decode=failure.event.blame is Blame.DECODE, isolated=failure.isolated)
        if not history.has_killed_workers(losses.count_others(history.losses)):
            return
        settled, until = asyncio.Event(), min(self._loop.time() + DEATH_WAIT_S, request.deadline)
        loss.on_settled(settled.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await settled.wait()
        if history.has_killed_workers(losses.count_others(history.losses)):
            deaths = sum(loss.death for loss in history.losses)
            message = f"the request was present at {deaths} worker deaths, at the last one alone"
            _logger.warning(
                "request %s ends: %s: %s", request.id, message, failure.event.error, extra=about(request.id)
            )
            raise EngineError(f"{message}: {failure.event.error}")

    def _retry_delay_s(self, request: Request, history: RetryHistory, failure: AttemptFailed) -> float:
        """Seconds until the next attempt; raises the failure if no other attempt is allowed."""
        event, now = failure.event, self._loop.time()
        ATTEMPTS_FAILED.labels(type(event.error).__name__).inc()
        if now >= request.deadline:
            raise _deadline_exceeded(request, now, f"; the last attempt failed: {event.error}")

        def charge() -> bool:
            granted = self._budget.charge(now, blamed=failure.blamed, first=history.faults == 1)
            RETRIES_REFUSED.inc(not granted)
            return granted

        level = logging.WARNING if event.cause in (Cause.FAULT, Cause.LOST) else logging.INFO
        described, extra = describe_failure(event, failure.blamed), about(request.id)
        try:
            delay_s = history.next_delay_s(
                event,
                max_attempts=self._config.max_attempts,
                charge=charge,
                elsewhere=len(self._deps.pool.fleet.usable_prefills) > 1,
            )
        except BatonError:
            _logger.warning("request %s ends: %s", request.id, described, extra=extra)
            raise
        _logger.log(level, "request %s is tried again: %s", request.id, described, extra=extra)
        REPLAYS.labels(event.cause.value).inc()
        return delay_s


def describe_failure(event: FailureEvent, blamed: str) -> str:
    """The failure of an attempt for the log, with the worker or pair at fault."""
    error = str(event.error)
    # The error of a broken call does not name the worker; other errors do.
    where = error if blamed in error else f"worker {blamed}: {error}"
    return f"{_CAUSE_TEXTS[event.cause]} {where}"


def _this_task() -> asyncio.Task[Any]:
    """The running task. Raises RuntimeError outside a task."""
    if (task := asyncio.current_task()) is None:
        raise RuntimeError("a request is served in a task")
    return task


async def _run_all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; the first error cancels the others and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_FINAL = (InvalidRequest, NotFound, DeadlineExceeded)
"""Errors after which no other attempt is made, because it would fail in the same way."""


class AttemptFailed(Exception):
    """A failed attempt that may be followed by another; `blamed` is the address of the worker or pair at fault.

    `isolated` tells whether no other request ran at the worker.
    """

    def __init__(self, event: FailureEvent, blamed: str, *, isolated: bool) -> None:
        super().__init__(str(event.error))
        self.event = event
        self.blamed = blamed
        self.isolated = isolated


@dataclass(frozen=True, slots=True)
class AttemptDeps:
    """Dependencies of an attempt."""

    pool: WorkerPool
    dispatcher: Dispatcher
    config: RouterConfig
    abandoner: ExportAbandoner
    signer: TicketSigner | None
    threads: TenantThreads


@dataclass(slots=True)
class RequestState:
    """A request and its output so far; `hasher` is None if the request may not read the prefix cache."""

    request: Request
    output: OutputProcessor
    hasher: BlockHasher | None = None
    fingerprint: str = ""
    """The fingerprint of the workers that the output comes from."""

    def pin_fingerprint(self, fingerprint: str) -> None:
        """Raise Unavailable if workers with this fingerprint would continue the output of others."""
        if not self.output.has_output:
            self.fingerprint = fingerprint
        elif self.fingerprint != fingerprint:
            # The rest would be the output of another model.
            raise Unavailable("the workers of the checkpoint that began this output have left; send the request again")


class Attempt:
    """One attempt to serve choices that all have the same output ids so far."""

    def __init__(self, deps: AttemptDeps, state: RequestState, choices: tuple[int, ...], history: RetryHistory) -> None:
        self._deps = deps
        self._state = state
        self._hasher = state.hasher
        self._request = request = state.request
        self._output = state.output
        self._choices = choices
        self._history = history
        self._number = next(history.attempt_numbers)
        self._output_ids = list(state.output.output_ids(choices[0]))
        if not state.output.unfinished(choices):
            # Only prompt log-probabilities are missing. Prefill always samples, so it repeats the last token.
            self._output_ids.pop()
        self._loop = asyncio.get_running_loop()
        self._run_on_thread = deps.threads.for_tenant(request.tenant)
        self._lifecycle = Lifecycle(State.QUEUED, self._loop.time(), request_deadline=request.deadline)
        self._placement: Placement | None = None
        self._ended: asyncio.Future[FailureEvent | Exception | None] = self._loop.create_future()
        """The failure of a worker, an error of this router, or None if all choices have ended."""
        self._ended_choices: set[int] = set()
        """Choices for which the workers will send nothing more."""
        self._prefilled = self._has_decode_output = self._prefill_failed = False
        self._computed_tokens = 0
        """Tokens that prefill has computed, without cached ones."""

    async def run(self, delay_s: float) -> None:
        """Serve the choices after a pause of `delay_s` seconds; raises AttemptFailed if another attempt may succeed."""
        self._output.drop_out_of_order(self._choices)
        try:
            async with self._place(delay_s) as (placement, message):
                await self._serve_placed(placement, message)
        finally:
            self._lifecycle.end(self._loop.time())
            # The placement refers to this attempt: the cycle would keep the prompt until the garbage collector runs.
            self._placement = None

    @property
    def is_placed(self) -> bool:
        """Whether workers serve it."""
        return self._placement is not None

    def ledger_entry(self, now: float) -> LedgerEntry:
        """The attempt's entry in the router's ledger; `now` is in seconds on the event loop's clock."""
        return LedgerEntry(
            owner=f"{self._request.id}/{self._number}",
            kind="request",
            state=self._lifecycle.state.value,
            age_s=now - self._lifecycle.since,
            deadline_s=self._lifecycle.deadline - now,
            tenant=self._request.tenant,
            detail=self._placement.describe() if self._placement else "",
        )

    @contextlib.asynccontextmanager
    async def _place(self, delay_s: float) -> AsyncIterator[tuple[Placement, PrefillMessage]]:
        """Wait for a placement until the deadline; the message for its prefill worker is made before."""
        dispatcher, began = self._deps.dispatcher, self._loop.time()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(self._request.deadline):
                    await asyncio.sleep(delay_s)
                    request, message = await self._placement_request(), await self._message()
                    placing = dispatcher.place(request, self._deliver, lambda: self._history.suspicion)
                    self._placement = await stack.enter_async_context(placing)
            except TimeoutError:
                pool, now = self._deps.pool, self._loop.time()
                where = "" if pool.serving else f", {now - began:.1f} s of it in the queue: {pool.describe_missing()}"
                raise _deadline_exceeded(self._request, now, where) from None
            yield self._placement, message

    async def _placement_request(self) -> PlacementRequest:
        """The request to the dispatcher. If one token is missing, prefill samples it without decode."""
        request, history = self._request, self._history
        context, left = len(request.prompt_ids) + len(self._output_ids), request.max_tokens - len(self._output_ids)
        digests = await self._hasher.hash(self._deps.pool.namespaces, self._output_ids) if self._hasher else {}
        return PlacementRequest(
            request_id=request.id,
            attempt_number=self._number,
            tenant=request.tenant,
            lifecycle=self._lifecycle,
            context_tokens=context,
            max_new_tokens=left,
            choices=self._choices,
            is_retry=self._number > 0,
            # A reservation waits for pages, which a mixed worker did not have for a prompt without one.
            needs_decode=left > 1 or bool(history.in_place_only),
            digests=digests,
            salt=request.salt,
            cache=request.cache,
            avoided_workers=history.avoided_workers,
            avoided_pairs=history.avoided_pairs,
            in_place_only=history.in_place_only,
        )

    async def _message(self) -> PrefillMessage:
        """The message to the prefill worker.

        It is made before there is a placement, because the tenant's threads may be busy for long, and the worker would
        be idle meanwhile.
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
        self._state.pin_fingerprint(placement.prefill.fingerprint)
        self._output.account.on_placed(self._loop.time())
        self._lifecycle.enter(State.PREFILLING, self._loop.time())
        transfer_id = secrets.token_hex(16) if placement.decode else ""
        source = self._prefix_source(placement)
        placement.prefill.add_suspect(self._request.id, self._deliver)
        prefilling = asyncio.create_task(self._prefill(placement, message, transfer_id, source))
        try:
            self._start_decode(placement, transfer_id, source)
            await self._wait_for_end(placement)
        finally:
            self._end(None)
            placement.prefill.remove_suspect()
            prefilling.cancel()
            # After the cancellation: an export that it came too late for must be abandoned.
            is_export = transfer_id and not placement.in_place
            if is_export and not self._has_decode_output and not self._prefill_failed:
                self._deps.abandoner.abandon(placement.prefill, transfer_id, self._request.id)
            await asyncio.gather(prefilling, return_exceptions=True)

    def _prefix_source(self, placement: Placement) -> PrefixSource | None:
        """The decode worker's cached prefix for prefill to fetch; None unless it has a block more than prefill has."""
        peer = placement.peer
        namespace = placement.prefill.link.namespace if peer else None
        if peer is None or namespace is None:
            return None
        if placement.pinned_tokens - placement.prefill.cached_tokens < namespace.block_size:
            return None
        transfer_id = secrets.token_hex(16)
        kv_ticket = self._kv_ticket(transfer_id, peer.incarnation, placement.prefill.consumer)
        shards = peer.shards_at(placement.decode_address)
        export = RemoteExport(transfer_id, peer.incarnation, shards, kv_ticket)
        return PrefixSource(export, placement.pinned_tokens)

    def _kv_ticket(self, transfer_id: str, incarnation: str, consumer: str) -> bytes:
        """A ticket that lets `consumer` fetch KV until the deadline; empty if the fleet has no ticket keys."""
        if (signer := self._deps.signer) is None:
            return b""
        expires = time.time() + self._remaining()
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
                in_place=placement.in_place,
                timeout=self._remaining(),
                silence_s=self._deps.config.prefill_silence_s,
                deliver=self._deliver,
            )
        except Exception as error:
            # Nothing awaits this task: without this, the attempt would wait until its deadline.
            self._end(error)

    def _start_decode(self, placement: Placement, transfer_id: str, source: PrefixSource | None) -> None:
        """Tell the decode worker where to fetch the KV."""
        if placement.decode is None:
            self._ended_choices.update(self._choices)
            return
        prefill = placement.prefill
        kv_ticket = self._kv_ticket(transfer_id, prefill.incarnation, placement.consumer)
        placement.decode.start(
            source=RemoteExport(transfer_id, prefill.incarnation, prefill.shards, kv_ticket),
            deadline_ms=math.ceil(1e3 * self._remaining()),
            prefix_transfer_id=source.export.transfer_id if source else "",
        )

    async def _wait_for_end(self, placement: Placement) -> None:
        """Wait until all choices have ended; raises the failure if the attempt ends before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._request.deadline):
                await asyncio.shield(self._ended)
        if not self._ended.done():
            # Messages that have arrived, but were not handled yet, may still end the attempt.
            await asyncio.sleep(0)
        if not self._ended.done():
            raise _deadline_exceeded(self._request, self._loop.time())
        match self._ended.result():
            case FailureEvent() as event:
                raise await self._classify_failure(placement, event)
            case Exception() as error:
                raise error
        if self._has_decode_output:
            placement.breakers.record_success(placement.breakers.decode)

    def _deliver(self, event: Event) -> None:
        """Handle an event of the prefill call or of the decode session."""
        placement = self._placement
        if self._ended.done():
            # Events may follow a failure, or the end of a choice at the router.
            return
        try:
            match event:
                case Output() if placement is not None:
                    self._on_output(placement, event)
                case FailureEvent():
                    self._end(event)
                case Prefilled() if placement is not None:
                    self._on_prefilled(placement, event)
                case PrefillProgress():
                    self._output.report_progress(event)
                case PromptLogprobs() if placement is not None:
                    self._output.add_prompt_logprobs(event.start, event.tokens)
                    self._check_end(placement)
                case DecodeEnded() if placement is not None:
                    self._ended_choices.update(self._choices)
                    self._check_end(placement)
        except Exception as error:
            # The error must end this attempt, and not the whole session.
            self._end(error)

    def _end(self, result: FailureEvent | Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(result)

    def _on_prefilled(self, placement: Placement, event: Prefilled) -> None:
        self._prefilled = True
        self._computed_tokens = len(self._request.prompt_ids) + len(self._output_ids) - event.cached_tokens
        placement.breakers.record_success(placement.breakers.prefill)
        self._deps.dispatcher.release(placement.prefill)
        if placement.decode is not None and self._lifecycle.state is State.PREFILLING:
            self._lifecycle.enter(State.TRANSFERRING, self._loop.time())
        if self._hasher is not None:
            PLACED_TOKENS.labels("expected").inc(placement.prefill.cached_tokens)
            PLACED_TOKENS.labels("found").inc(event.cached_tokens)
        cached = replace(event.cached, decode=placement.pinned_tokens)
        self._output.add_first_tokens(replace(event, cached=cached))
        self._check_end(placement, *(first.choice_index for first in event.first_tokens))

    def _on_output(self, placement: Placement, event: Output) -> None:
        if not self._has_decode_output:
            self._on_first_output(placement)
        unfinished = self._output.add(event)
        if event.finish is not None:
            self._ended_choices.add(event.choice_index)
        elif unfinished:
            return
        self._check_end(placement, event.choice_index)

    def _on_first_output(self, placement: Placement) -> None:
        self._has_decode_output = True
        self._history.clear_losses()
        placement.prefill.remove_suspect()
        if placement.isolation is not None:
            placement.isolation.release()
        placement.breakers.record_success(placement.breakers.pair)
        placement.breakers.pass_trial(placement.breakers.decode)
        self._lifecycle.enter(State.DECODING, self._loop.time())

    def _check_end(self, placement: Placement, *changed: int) -> None:
        """End the attempt if all choices have ended, or if the workers will send nothing more for an unfinished one.

        If the attempt goes on, the choices in `changed` that the router has ended are cancelled at the decode worker.
        """
        unfinished = self._output.unfinished(self._choices)
        if not unfinished:
            if self._output.prompt_logprobs_complete:
                self._end(None)
        elif self._prefilled and self._ended_choices.intersection(unfinished):
            error = EngineError("the workers ended the request without all of its tokens")
            self._end(FailureEvent(error, Blame.DECODE if placement.decode else Blame.PREFILL))
        elif placement.decode is not None:
            for choice in set(changed).difference(unfinished):
                placement.decode.cancel_choice(choice)

    async def _classify_failure(self, placement: Placement, event: FailureEvent) -> Exception:
        """The exception for a failure, after the worker at fault was recorded."""
        if isinstance(event.error, _FINAL) and event.cause is not Cause.REFUSED:
            return event.error
        if placement.in_place and event.blame is Blame.PAIR:
            event = replace(event, blame=Blame.DECODE)
        # The prefill worker may be lost, and decode may notice this before the watch does.
        grace_s = LOSS_GRACE_S if isinstance(event.error, SourceUnreachable) else 0.0
        if event.blame is Blame.PAIR and await placement.prefill.wait_for_loss(grace_s):
            event = replace(event, blame=Blame.PREFILL, cause=Cause.LOST, loss=placement.prefill.loss)
        self._prefill_failed = event.blame is Blame.PREFILL and not self._prefilled
        if not self._has_decode_output and placement.decode is not None:
            WASTED_PREFILL_TOKENS.inc(self._computed_tokens)
        grant = placement.isolation
        isolated = grant is not None and not grant.released and (event.blame is Blame.PREFILL or grant.isolates_decode)
        return AttemptFailed(event, self._record_blame(placement, event), isolated=isolated)

    def _record_blame(self, placement: Placement, event: FailureEvent) -> str:
        """Let the next attempts avoid the worker or pair at fault. Returns its address, or both addresses."""
        breakers, history, decode = placement.breakers, self._history, placement.decode_address
        prefill, fleet = placement.prefill.link.address, self._deps.pool.fleet
        if event.cause is Cause.REFUSED and event.blame is Blame.PREFILL and prefill in fleet.decode:
            # It may still compute the prompt in the pages of a reservation there.
            history.in_place_only |= fleet.prefill.keys() & fleet.decode.keys()
            return prefill
        if event.blame is Blame.PAIR and decode:
            key, name = breakers.pair, f"{prefill} {decode}"
            history.avoided_pairs |= {(prefill, decode)}
        else:
            of_decode = event.blame is Blame.DECODE and bool(decode)
            key, name = (breakers.decode, decode) if of_decode else (breakers.prefill, prefill)
            if event.cause is not Cause.PREEMPTED:
                incarnation = placement.decode_incarnation if of_decode else placement.prefill.incarnation
                loss = self._deps.pool.losses.latest(incarnation) if event.cause is Cause.LOST else None
                history.avoided_workers |= {AvoidedWorker(name, incarnation, loss)}
        if event.cause is Cause.FAULT:
            breakers.record_fault(key)
        return name

    def _remaining(self) -> float:
        """Seconds until the deadline, at least 0.001."""
        return max(self._request.deadline - self._loop.time(), 0.001)


def _deadline_exceeded(request: Request, now: float, more: str = "") -> DeadlineExceeded:
    """The error of a request whose deadline has passed at `now`; `more` ends its message."""
    return DeadlineExceeded(f"the request's deadline passed after {now - request.arrived:.1f} s{more}")
