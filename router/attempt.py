"""One try at serving some choices of a request, from the line to the last token or the first failure.

    LINE ── place ── RESERVING ── PREFILLING ── first token ── TRANSFERRING ── decode's first ── DECODING ── ENDED
                                  prefill call and Start at once       tokens may come before the first token

However it ends (served, failed, cancelled, too late), `run` gives back all of it in one place: the prefill call, the
seat, the decode attempt, and the exported KV that nobody has fetched. What has arrived counts: a deadline is judged
only when nothing is left to be read.
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
from random import randrange
from typing import Protocol

from baton.errors import DeadlineExceeded, EngineError, InvalidRequest, NotFound, SourceUnreachable
from baton.lifecycle import Lifecycle, State
from baton.telemetry.metrics import PLACED_TOKENS, WASTED_PREFILL_TOKENS
from baton.transfer.remote import PrefixSource, RemoteExport
from baton.worker.messages import Output
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.events import Blame, Cause, Event, Failed, Prefilled
from router.output.processor import Emission
from router.placement.chains import Chains
from router.placement.demand import Demand
from router.registry import Live, Registry
from router.request import Request
from router.retries import Avoided, History
from router.serving.threads import Threads
from router.workers.abandon import Abandoner
from router.workers.prefill import LARGE_REQUEST, LOSS_GRACE_S, PrefillMessage, message, prefill
from router.workers.reservation import Application, Place

_FINAL = (InvalidRequest, NotFound, DeadlineExceeded)
"""Faults that another attempt would only repeat."""


class Signer(Protocol):
    """Signs tickets for KV."""

    def sign(self, *, transfer_id: str, incarnation: str, consumer: str, expires_unix_s: float) -> bytes:
        """A ticket that lets `consumer` fetch the KV until then."""


class AttemptFailed(Exception):
    """An attempt failed, and another may succeed; `culprit` names the worker or pair that it lies in.

    `alone` tells that nothing else ran there.
    """

    def __init__(self, failed: Failed, culprit: str, *, alone: bool) -> None:
        super().__init__(str(failed.error))
        self.failed = failed
        self.culprit = culprit
        self.alone = alone


@dataclass(frozen=True, slots=True)
class Means:
    """What attempts are made with."""

    dispatcher: Dispatcher
    config: RouterConfig
    registry: Registry
    abandoner: Abandoner
    signer: Signer | None
    threads: Threads


@dataclass(frozen=True, slots=True)
class Work:
    """A request in service; `chains` is None for one that may not read the prefix cache."""

    request: Request
    emission: Emission
    chains: Chains | None = None


@dataclass(frozen=True, slots=True)
class _Emitted:
    """Tokens were emitted as they came, and ended a choice by a stop string; or what came can't be handled."""

    error: Exception | None = None


class Attempt:
    """One try; the choices have the same output so far."""

    def __init__(self, means: Means, work: Work, choices: tuple[int, ...], history: History) -> None:
        self._means = means
        self._chains = work.chains
        self._request = request = work.request
        self._emission = emission = work.emission
        self._choices = choices
        self._history = history
        self._number = next(history.numbers)
        self._output_ids = list(emission.output_ids(choices[0]))
        # Holds at most the tokens of one attempt, since it is read without waiting for anybody.
        self._inbox: asyncio.Queue[Event | _Emitted] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._run = means.threads.of(request.tenant)
        deadline = math.inf if request.deadline is None else request.deadline
        self._life = Lifecycle(State.LINE, self._loop.time(), request_deadline=deadline)
        self._ends: set[int] = set()
        self._prefilled = self._fetched = self._prefill_failed = False
        self._streaming = False

    async def run(self, delay_s: float) -> None:
        """Serve the choices, after a pause; raises AttemptFailed when another attempt may succeed."""
        self._emission.begin(self._choices)
        live = Live(self._request.id, self._number, self._request.tenant, self._life)
        with self._means.registry.entered(live):
            try:
                async with self._placed(delay_s) as (place, asked):
                    live.detail = place.words
                    await self._serve(place, asked)
            finally:
                self._life.end(self._loop.time())

    @contextlib.asynccontextmanager
    async def _placed(self, delay_s: float) -> AsyncIterator[tuple[Place, PrefillMessage]]:
        """A place, waited for until the deadline, and what its prefill worker is asked for."""
        dispatcher, began = self._means.dispatcher, self._loop.time()
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(_until(self._life.request_deadline)):
                    await asyncio.sleep(delay_s)
                    application, asked = await self._application(), await self._message()
                    placing = dispatcher.place(application, self._deliver, lambda: self._history.alone)
                    place = await stack.enter_async_context(placing)
            except TimeoutError:
                lacking, waited_s = dispatcher.lacking(), self._loop.time() - began
                raise _too_late(f" after {waited_s:.1f} s in the queue: {lacking}" if lacking else "") from None
            yield place, asked

    async def _application(self) -> Application:
        """What is asked of the dispatcher; with one token to go, prefill samples it, and nothing is decoded."""
        request, history = self._request, self._history
        context, left = len(request.prompt_ids) + len(self._output_ids), request.max_tokens - len(self._output_ids)
        digests = await self._chains.of(self._means.dispatcher.forms, self._output_ids) if self._chains else {}
        return Application(
            request_id=request.id,
            attempt=self._number,
            tenant=request.tenant,
            life=self._life,
            demand=Demand(context, left > 1, avoid_pairs=history.avoid_pairs, number=randrange(2**16)),
            context_tokens=context,
            max_new_tokens=left,
            choices=self._choices,
            again=self._number > 0,
            digests=digests,
            salt=request.salt,
            cache=request.cache,
            avoided=history.avoid,
        )

    async def _serve(self, place: Place, asked: PrefillMessage) -> None:
        self._emission.account.on_dispatch(self._loop.time())
        self._life.enter(State.PREFILLING, self._loop.time())
        transfer_id = secrets.token_hex(16) if place.decode else ""
        source = self._source(place)
        place.seat.enter(self._request.id, self._deliver)
        prefilling = asyncio.create_task(self._prefill(place, asked, transfer_id, source))
        try:
            self._start(place, transfer_id, source)
            await self._follow(place)
        finally:
            self._streaming = False
            place.seat.leave()
            prefilling.cancel()
            # In this order: the cancellation is sent first, and what it came too late for is abandoned.
            if transfer_id and not self._fetched and not self._prefill_failed:
                self._means.abandoner.abandon(place.seat, transfer_id)
            await asyncio.gather(prefilling, return_exceptions=True)

    def _source(self, place: Place) -> PrefixSource | None:
        """The decode worker, if it holds a block more than prefill is thought to; prefill weighs what that is worth."""
        form = place.seat.link.form if place.peer else None
        if place.peer is None or form is None:
            return None
        if place.pinned_tokens - place.seat.cached_tokens < form.block_size:
            return None
        transfer_id, peer = secrets.token_hex(16), place.peer
        ticket = self._ticket(transfer_id, peer.incarnation, place.seat.consumer)
        return PrefixSource(RemoteExport(transfer_id, peer.incarnation, peer.shards, ticket), place.pinned_tokens)

    def _ticket(self, transfer_id: str, incarnation: str, consumer: str) -> bytes:
        """What lets `consumer` fetch KV until the deadline; empty where the fleet has no keys."""
        if self._means.signer is None:
            return b""
        return self._means.signer.sign(
            transfer_id=transfer_id,
            incarnation=incarnation,
            consumer=consumer,
            expires_unix_s=time.time() + (self._remaining() or 0.0),
        )

    async def _message(self) -> PrefillMessage:
        """What prefill is asked for.

        It is made before there is a place: the tenant's work may keep its threads busy for long, and a place that waits
        for them serves nobody.
        """
        request = self._request
        make = partial(
            message,
            request_id=request.id,
            attempt=self._number,
            prompt_ids=request.prompt_ids,
            output_ids=self._output_ids,
            choices=self._choices,
            params=request.params,
            cache_salt=request.salt,
            cache=request.cache,
        )
        sizes = map(len, (request.prompt_ids, self._output_ids, request.params.allowed_token_ids))
        return await self._run(make) if sum(sizes) > LARGE_REQUEST else make()

    async def _prefill(
        self, place: Place, asked: PrefillMessage, transfer_id: str, source: PrefixSource | None
    ) -> None:
        try:
            await prefill(
                place.seat,
                asked,
                transfer_id=transfer_id,
                source=source,
                timeout=self._remaining(),
                silence_s=self._means.config.prefill_silence_s,
                deliver=self._deliver,
                run=self._run,
            )
        except Exception as error:
            # Nobody waits for this task, and the attempt would wait until its deadline.
            self._inbox.put_nowait(_Emitted(error))

    def _start(self, place: Place, transfer_id: str, source: PrefixSource | None) -> None:
        """Tell decode where to fetch the KV."""
        if place.decode is None:
            self._ends.update(self._choices)
            return
        ticket = self._ticket(transfer_id, place.seat.incarnation, place.consumer)
        place.decode.start(
            source=RemoteExport(transfer_id, place.seat.incarnation, place.seat.shards, ticket),
            deadline_ms=math.ceil(1e3 * (self._remaining() or 0.0)),
            prefix_transfer_id=source.export.transfer_id if source else "",
        )

    async def _follow(self, place: Place) -> None:
        """Take events until all choices have ended."""
        while going := self._emission.unfinished(self._choices):
            match await self._next():
                case Prefilled() as event:
                    self._on_prefilled(place, event)
                case Output() as event:
                    self._on_output(place, event)
                case Failed() as event:
                    raise await self._judge(place, event)
                case _Emitted(error=Exception() as error):
                    raise error
            rest = self._emission.unfinished(self._choices)
            if self._prefilled and self._ends.intersection(rest):
                error = EngineError("the workers ended the request without all of its tokens")
                raise await self._judge(place, Failed(error, Blame.DECODE if place.decode else Blame.PREFILL))
            _cancel_stopped(place, going, rest)
        if self._fetched:
            place.course.succeeded(place.course.decode)

    def _deliver(self, event: Event) -> None:
        """Take what happens. Tokens that end nothing are emitted here, so that one costs no turn of the task."""
        if isinstance(event, Failed):
            # What comes after it is the word of a failed attempt.
            self._streaming = False
        if not (self._streaming and isinstance(event, Output) and event.finish is None and self._inbox.empty()):
            self._inbox.put_nowait(event)
            return
        try:
            if not self._emission.output(event):
                self._inbox.put_nowait(_Emitted())
        except Exception as error:
            # It is this request's, and not its whole session's.
            self._inbox.put_nowait(_Emitted(error))

    async def _next(self) -> Event | _Emitted:
        """The next event; a deadline that has passed is judged only when there is none."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(_until(self._life.deadline)):
                return await self._inbox.get()
        # What is ready in the loop has arrived as well.
        await asyncio.sleep(0)
        if self._inbox.empty():
            raise _too_late()
        return self._inbox.get_nowait()

    def _on_prefilled(self, place: Place, event: Prefilled) -> None:
        self._prefilled = True
        place.course.succeeded(place.course.prefill)
        self._means.dispatcher.leave(place.seat)
        if place.decode is not None and self._life.state is State.PREFILLING:
            self._life.enter(State.TRANSFERRING, self._loop.time())
        if self._chains is not None:
            PLACED_TOKENS.labels("expected").inc(place.seat.cached_tokens)
            PLACED_TOKENS.labels("found").inc(event.cached_tokens)
        cached = replace(event.cached, decode=place.pinned_tokens)
        self._emission.first_tokens(replace(event, cached=cached))

    def _on_output(self, place: Place, event: Output) -> None:
        if not self._fetched:
            self._fetched = self._streaming = True
            self._history.passed()
            place.seat.leave()
            if place.turn is not None:
                place.turn.end()
            place.course.succeeded(place.course.pair)
            place.course.passed(place.course.decode)
            self._life.enter(State.DECODING, self._loop.time())
        self._emission.output(event)
        if event.finish is not None:
            self._ends.add(event.choice_index)

    async def _judge(self, place: Place, failed: Failed) -> Exception:
        """What a failure means for the request, and for its workers."""
        if isinstance(failed.error, _FINAL) and failed.cause is not Cause.REFUSED:
            return failed.error
        if failed.blame is Blame.PAIR and await self._exporter_lost(place, failed):
            failed = replace(failed, blame=Blame.PREFILL, cause=Cause.LOST, loss=place.seat.loss)
        self._prefill_failed = failed.blame is Blame.PREFILL and not self._prefilled
        if self._prefilled and not self._fetched and place.decode is not None:
            WASTED_PREFILL_TOKENS.inc(len(self._request.prompt_ids) + len(self._output_ids))
        alone = place.turn is not None and not place.turn.over
        return AttemptFailed(failed, self._blame(place, failed), alone=alone)

    async def _exporter_lost(self, place: Place, failed: Failed) -> bool:
        """Whether KV can't be fetched because its worker is lost; decode may notice before the watch does."""
        return await place.seat.lost_within(LOSS_GRACE_S if isinstance(failed.error, SourceUnreachable) else 0.0)

    def _blame(self, place: Place, failed: Failed) -> str:
        """Have the next attempts avoid what failed, and say its name."""
        course, history, decode = place.course, self._history, place.decode_name
        if failed.blame is Blame.PAIR and decode is not None:
            key, name = course.pair, f"{place.prefill.address} {decode}"
            history.avoid_pairs |= {(place.prefill.address, decode)}
        else:
            of_decode = failed.blame is Blame.DECODE and decode is not None
            key, name = (course.decode, decode or "") if of_decode else (course.prefill, place.prefill.address)
            if failed.cause is not Cause.PREEMPTED:
                incarnation = place.decode_incarnation if of_decode else place.seat.incarnation
                loss = self._means.dispatcher.losses.of(incarnation) if failed.cause is Cause.LOST else None
                history.avoid |= {Avoided(name, incarnation, loss)}
        if failed.cause is Cause.FAULT:
            course.failed(key, self._loop.time())
        return name

    def _remaining(self) -> float | None:
        """Seconds until the deadline."""
        left = self._life.request_deadline - self._loop.time()
        return None if math.isinf(left) else max(left, 0.001)


def _until(deadline: float) -> float | None:
    return None if math.isinf(deadline) else deadline


def _too_late(where: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(f"the request's deadline passed{where}")


def _cancel_stopped(place: Place, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """End at decode the choices that the router ended, while others go on; closing the place ends them all."""
    if place.decode is not None and after:
        for choice in set(before).difference(after):
            place.decode.cancel_choice(choice)
