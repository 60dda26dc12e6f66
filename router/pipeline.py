"""One request's life, from its arrival to its last token.

    serve ── attempt ── finish
      ▲         └─ failure: a new attempt, elsewhere, with the output ids that the client has had
      └─────────── as long as `retries` allows; then the last failure is the answer

Prompt and output ids are all the state there is, so an attempt that continues a stream is an ordinary prefill. Before
the first token an attempt serves all choices together; after it, each choice goes on by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from baton.config.router import RouterConfig
from baton.errors import BatonError, DeadlineExceeded, EngineError, Unavailable
from baton.ledger import Ledger
from baton.telemetry.metrics import ATTEMPTS_FAILED, REPLAYS, RETRIES_REFUSED
from baton.transfer.tickets import TicketSigner
from router.attempt import Attempt, AttemptDeps, AttemptFailed, RequestState
from router.dispatcher import Dispatcher
from router.output.processor import OutputProcessor
from router.placement.prefix_directory import BlockHasher
from router.request import Blame, Cause, Failed, Request
from router.retries import History, RetryBudget
from router.serving.tenants import Threads
from router.workers.pool import Pool
from router.workers.prefill import Abandoner

VERDICT_S = 15.0
"""Seconds to wait for a worker that a request may have killed, before it counts as dead."""

_STOPPED = "the router is stopping, and the request has not ended"

_HAPPENED = {
    Cause.FAULT: "fault of",
    Cause.LOST: "lost connection to",
    Cause.DRAIN: "moved away from",
    Cause.PREEMPTED: "preempted at",
    Cause.REFUSED: "refused by",
}

_logger = logging.getLogger(__name__)


class Pipeline:
    """Serves requests, each in a task of its own; `router_id` is its name in the ledger.

    `signer` signs the tickets with which workers fetch KV, where the fleet has keys for them.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        config: RouterConfig,
        threads: Threads,
        *,
        router_id: str = "router",
        signer: TicketSigner | None = None,
    ) -> None:
        self._router_id = router_id
        self._abandoner = Abandoner()
        self._deps = AttemptDeps(pool, dispatcher, config, self._abandoner, signer, threads)
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._budget = RetryBudget(self._loop.time())
        self._running: dict[asyncio.Task[Any], OutputProcessor] = {}
        self._attempts: dict[Attempt, None] = {}
        """Requests that hold, or wait for, anything; none means that nothing is left of any request."""
        self._stopped = False

    async def run(self, request: Request, output: OutputProcessor) -> None:
        """Serve a request to its end; what it yields goes to the output queue, and so does the error."""
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
            await self._serve(RequestState(request, output, hasher), range(request.params.n), History(), 0.0)
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
        """End what still runs, and begin nothing any more; clients are told that the router is gone."""
        self._stopped = True
        for task, output in self._running.items():
            output.queue.fail(Unavailable(_STOPPED))
            task.cancel()

    async def finish(self) -> None:
        """Wait until all that was stopped has given back what it held, and nothing goes on in the background."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._abandoner.finish()

    async def _serve(self, state: RequestState, choices: Sequence[int], history: History, delay_s: float) -> None:
        """Make attempts until the choices have ended; raises the last failure when there may be no more."""
        output = state.output
        while choices := output.unserved(choices):
            if len(choices) > 1 and any(output.output_ids(choice) for choice in choices):
                await _all(self._serve(state, (choice,), history.fork(), delay_s) for choice in choices)
                return
            before = output.count_emitted(choices)
            try:
                await self._attempt(Attempt(self._deps, state, choices, history), delay_s)
            except AttemptFailed as attempt:
                if (tokens := output.count_emitted(choices) - before) > 0:
                    history.record_progress(tokens // len(choices))
                await self._judge(state.request, history, attempt)
                delay_s = self._retry(state.request, history, attempt)

    async def _attempt(self, attempt: Attempt, delay_s: float) -> None:
        self._attempts[attempt] = None
        try:
            await attempt.run(delay_s)
        finally:
            del self._attempts[attempt]

    async def _judge(self, request: Request, history: History, attempt: AttemptFailed) -> None:
        """Raise EngineError if the request is what kills workers, once it is seen or must be presumed that one died."""
        loss, losses = attempt.failed.loss, self._deps.pool.losses
        if loss is None:
            return
        history.record_loss(loss, at_decode=attempt.failed.blame is Blame.DECODE, alone=attempt.alone)
        if not history.is_guilty(losses.count_others(history.losses)):
            return
        settled, until = asyncio.Event(), self._loop.time() + VERDICT_S
        loss.on_settled(settled.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until if request.deadline is None else min(until, request.deadline)):
                await settled.wait()
        if history.is_guilty(losses.count_others(history.losses)):
            deaths = sum(loss.death for loss in history.losses)
            message = f"the request was present at {deaths} worker deaths, at the last one alone"
            _logger.warning("request %s ends: %s: %s", request.id, message, attempt.failed.error)
            raise EngineError(f"{message}: {attempt.failed.error}")

    def _retry(self, request: Request, history: History, attempt: AttemptFailed) -> float:
        """Seconds until the next attempt; raises the failure when there is to be none."""
        failed, now = attempt.failed, self._loop.time()
        ATTEMPTS_FAILED.labels(type(failed.error).__name__).inc()
        if request.deadline is not None and now >= request.deadline:
            raise DeadlineExceeded(f"the request's deadline passed; the last attempt failed: {failed.error}")

        def charge() -> bool:
            granted = self._budget.charge(now, culprit=attempt.culprit, first=history.faults == 1)
            RETRIES_REFUSED.inc(not granted)
            return granted

        level = logging.WARNING if failed.cause in (Cause.FAULT, Cause.LOST) else logging.INFO
        try:
            delay_s = history.retry(failed, max_attempts=self._config.max_attempts, charge=charge)
        except BatonError:
            _logger.warning("request %s ends: %s", request.id, words(failed, attempt.culprit))
            raise
        _logger.log(level, "request %s is tried again: %s", request.id, words(failed, attempt.culprit))
        REPLAYS.labels(failed.cause.value).inc()
        return delay_s


def words(failed: Failed, culprit: str) -> str:
    """The outcome of an attempt, and its worker or pair."""
    error = str(failed.error)
    # Workers name themselves in their errors, but for those of a call that broke.
    where = error if culprit in error else f"worker {culprit}: {error}"
    return f"{_HAPPENED[failed.cause]} {where}"


def _this_task() -> asyncio.Task[Any]:
    """The task that runs; a request that knew it would be part of a cycle, and wait for the garbage collector."""
    if (task := asyncio.current_task()) is None:
        raise RuntimeError("a request is served in a task")
    return task


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error ends the others and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
