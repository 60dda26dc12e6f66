"""One try at serving some choices of a request, from the queue to the last token or the first failure.

    QUEUED ── place ── RESERVING ── PREFILLING ── first token ── TRANSFERRING ── decode's first ── DECODING ── ENDED
                                    prefill call and Start at once       tokens may come before the first token

Events come from the prefill call and from the decode session, and each is handled at once, where it arrives: a token
costs no turn of the attempt's task, which waits only for the end. However it ends (served, failed, cancelled, too
late), `run` gives back all of it in one place: the prefill call and its assignment, the decode attempt, and the
exported KV that nobody has fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

from baton.config.router import RouterConfig
from baton.errors import DeadlineExceeded, EngineError, InvalidRequest, NotFound, SourceUnreachable
from baton.ledger import LedgerEntry
from baton.lifecycle import Lifecycle, State
from baton.request import PrefillProgress
from baton.telemetry.metrics import PLACED_TOKENS, WASTED_PREFILL_TOKENS
from baton.transfer.remote import PrefixSource, RemoteExport
from baton.transfer.tickets import TicketSigner
from baton.worker.messages import Output
from router.dispatcher import Dispatcher
from router.output.processor import OutputProcessor
from router.placement.policy import PlacementQuery
from router.placement.prefix_directory import BlockHasher
from router.placement.scheduler import PlacementRequest
from router.request import Blame, Cause, DecodeEnded, Event, Failed, Prefilled, PromptReport, Request
from router.retries import AvoidedWorker, History
from router.serving.tenants import Threads
from router.workers.pool import Pool
from router.workers.prefill import (
    LARGE_REQUEST,
    LOSS_GRACE_S,
    Abandoner,
    PrefillMessage,
    call_prefill,
    prefill_message,
)
from router.workers.reservation import Placement

_FINAL = (InvalidRequest, NotFound, DeadlineExceeded)
"""Faults that another attempt would only repeat."""


class AttemptFailed(Exception):
    """An attempt failed, and another may succeed; `culprit` names the worker or pair that it lies in.

    `alone` tells that nothing else ran at the worker that it lies in.
    """

    def __init__(self, failed: Failed, culprit: str, *, alone: bool) -> None:
        super().__init__(str(failed.error))
        self.failed = failed
        self.culprit = culprit
        self.alone = alone


@dataclass(frozen=True, slots=True)
class AttemptDeps:
    """Dependencies of an attempt."""

    pool: Pool
    dispatcher: Dispatcher
    config: RouterConfig
    abandoner: Abandoner
    signer: TicketSigner | None
    threads: Threads


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request in service; `hasher` is None for one that may not read the prefix cache."""

    request: Request
    output: OutputProcessor
    hasher: BlockHasher | None = None


class Attempt:
    """One try; the choices have the same output so far."""

    def __init__(self, deps: AttemptDeps, state: RequestState, choices: tuple[int, ...], history: History) -> None:
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
        """Choices of which the workers will say nothing more."""
        self._prefilled = self._fetched = self._prefill_failed = False

    async def run(self, delay_s: float) -> None:
        """Serve the choices, after a pause; raises AttemptFailed when another attempt may succeed."""
        self._output.begin(self._choices)
        try:
            async with self._place(delay_s) as (placement, message):
                await self._serve(placement, message)
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
        """A placement, waited for until the deadline, and what its prefill worker is asked for."""
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
            query=PlacementQuery(context, left > 1, avoid_pairs=history.avoid_pairs),
            context_tokens=context,
            max_new_tokens=left,
            choices=self._choices,
            again=self._number > 0,
            digests=digests,
            salt=request.salt,
            cache=request.cache,
            avoided=history.avoid,
        )

    async def _message(self) -> PrefillMessage:
        """The order to the prefill worker.

        It is made before there is a placement: the tenant's work may keep its threads busy for long, and a worker that
        waits for them serves nobody.
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

    async def _serve(self, placement: Placement, message: PrefillMessage) -> None:
        self._output.account.on_dispatch(self._loop.time())
        self._life.enter(State.PREFILLING, self._loop.time())
        transfer_id = secrets.token_hex(16) if placement.decode else ""
        source = self._source(placement)
        placement.prefill.attach(self._request.id, self._deliver)
        prefilling = asyncio.create_task(self._prefill(placement, message, transfer_id, source))
        try:
            self._start_decode(placement, transfer_id, source)
            await self._follow(placement)
        finally:
            self._end(None)
            placement.prefill.detach()
            prefilling.cancel()
            # In this order: the cancellation is sent first, and what it came too late for is abandoned.
            if transfer_id and not self._fetched and not self._prefill_failed:
                self._deps.abandoner.abandon(placement.prefill, transfer_id)
            await asyncio.gather(prefilling, return_exceptions=True)

    def _source(self, placement: Placement) -> PrefixSource | None:
        """The decode worker, if it holds a block more than prefill is thought to; prefill weighs what that is worth."""
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

    async def _follow(self, placement: Placement) -> None:
        """Wait until all choices have ended; raise what ended the attempt before."""
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
                raise await self._judge(placement, failed)
            case Exception() as error:
                raise error
        if self._fetched:
            placement.health.record_success(placement.health.decode)

    def _deliver(self, event: Event) -> None:
        """Handle what happens, at once."""
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
        placement.health.record_success(placement.health.prefill)
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
        placement.health.record_success(placement.health.pair)
        placement.health.pass_trial(placement.health.decode)
        self._life.enter(State.DECODING, self._loop.time())

    def _check_end(self, placement: Placement, *changed: int) -> None:
        """End when all choices have, or when the workers say nothing more of one that has not.

        Of those that have changed, those that the router ended are ended at decode while others go on; closing the
        placement ends them all.
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

    async def _judge(self, placement: Placement, failed: Failed) -> Exception:
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
        return AttemptFailed(failed, self._blame(placement, failed), alone=alone)

    def _blame(self, placement: Placement, failed: Failed) -> str:
        """Have the next attempts avoid what failed, and say its name."""
        health, history, decode = placement.health, self._history, placement.decode_name
        prefill = placement.prefill.link.address
        if failed.blame is Blame.PAIR and decode is not None:
            key, name = health.pair, f"{prefill} {decode}"
            history.avoid_pairs |= {(prefill, decode)}
        else:
            of_decode = failed.blame is Blame.DECODE and decode is not None
            key, name = (health.decode, decode or "") if of_decode else (health.prefill, prefill)
            if failed.cause is not Cause.PREEMPTED:
                incarnation = placement.decode_incarnation if of_decode else placement.prefill.incarnation
                loss = self._deps.pool.losses.latest(incarnation) if failed.cause is Cause.LOST else None
                history.avoid |= {AvoidedWorker(name, incarnation, loss)}
        if failed.cause is Cause.FAULT:
            health.record_fault(key)
        return name

    def _remaining(self) -> float | None:
        """Seconds until the deadline."""
        left = self._life.request_deadline - self._loop.time()
        return None if math.isinf(left) else max(left, 0.001)


def _until(deadline: float) -> float | None:
    return None if math.isinf(deadline) else deadline


def _too_late(where: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(f"the request's deadline passed{where}")
