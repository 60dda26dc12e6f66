"""One request's life, from its arrival to its last token.

    serve ── attempt: line · place · reserve · prefill and start · first token · tokens ── finish
      ▲         └─ fault: a new attempt, elsewhere, with the output ids that the client has had
      └─────────── at most `max_attempts` for each choice; then the last fault is the answer

Prompt and output ids are all the state there is, so an attempt that continues a stream is an ordinary prefill. Before
the first token an attempt serves all choices together; after it, each choice goes on by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, DeadlineExceeded, EngineError, InvalidRequest, NotFound
from baton.telemetry.metrics import ATTEMPTS_FAILED
from router.config import RouterConfig
from router.dispatcher import Application, Dispatcher, Place
from router.emission import Emission
from router.events import Blame, Event, Failed, Output, Prefilled
from router.policy import Demand
from router.prefill import message, prefill
from router.request import Request

_FINAL = (InvalidRequest, NotFound, DeadlineExceeded)
"""Faults that another attempt would only repeat."""

_logger = logging.getLogger(__name__)


class _Fault(Exception):
    """An attempt failed, and another may succeed."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class _History:
    """What was tried for some choices of a request; attempts are numbered over all of them."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    faults: int = 0
    avoid: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()

    def fork(self) -> _History:
        """The history of one of the choices from here on."""
        return _History(self.numbers, self.faults, self.avoid, self.avoid_pairs)

    def blame(self, place: Place, blame: Blame) -> None:
        """Avoid what failed."""
        if blame is Blame.PAIR and place.decode_name is not None:
            self.avoid_pairs |= {(place.prefill.address, place.decode_name)}
        elif blame is Blame.DECODE and place.decode_name is not None:
            self.avoid |= {place.decode_name}
        else:
            self.avoid |= {place.prefill.address}


class Pipeline:
    """Serves requests, each in a task of its own."""

    def __init__(self, dispatcher: Dispatcher, config: RouterConfig) -> None:
        self._dispatcher = dispatcher
        self._max_attempts = config.max_attempts

    async def run(self, request: Request, emission: Emission) -> None:
        """Serve a request to its end; what it yields goes to the emission's outbox, and so does the error."""
        try:
            async with asyncio.timeout_at(request.deadline):
                await self._serve(request, emission, range(request.params.n), _History())
            emission.close()
        except TimeoutError:
            emission.outbox.fail(DeadlineExceeded("the request's deadline passed"))
        except BatonError as error:
            emission.outbox.fail(error)
        except Exception as error:
            _logger.exception("request %s failed", request.id)
            emission.outbox.fail(error)

    async def _serve(self, request: Request, emission: Emission, choices: Iterable[int], history: _History) -> None:
        """Make attempts until the choices have ended; raises the last fault when there were too many."""
        while choices := emission.unfinished(choices):
            if len(choices) > 1 and any(emission.output_ids(choice) for choice in choices):
                await _all(self._serve(request, emission, (choice,), history.fork()) for choice in choices)
                return
            try:
                await self._attempt(request, emission, choices, history)
            except _Fault as fault:
                history.faults += 1
                ATTEMPTS_FAILED.labels(type(fault.error).__name__).inc()
                _logger.warning("request %s, fault %d: %s", request.id, history.faults, fault)
                if history.faults >= self._max_attempts:
                    raise fault.error from None

    async def _attempt(self, request: Request, emission: Emission, choices: tuple[int, ...], history: _History) -> None:
        """One try at the choices, which have the same output so far. Raises _Fault when another may succeed."""
        number, output_ids = next(history.numbers), list(emission.output_ids(choices[0]))
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        emission.begin(choices)
        asked = _application(request, choices, number, output_ids, history)
        async with self._dispatcher.place(asked, inbox.put_nowait) as place:
            emission.account.on_dispatch(asyncio.get_running_loop().time())
            transfer_id = secrets.token_hex(16) if place.decode else ""
            to_prefill = message(
                request_id=request.id,
                attempt=number,
                transfer_id=transfer_id,
                prompt_ids=request.prompt_ids,
                output_ids=output_ids,
                choices=choices,
                params=request.params,
            )
            place.seat.watch(inbox.put_nowait)
            prefilling = asyncio.create_task(prefill(place.prefill, to_prefill, _remaining(request), inbox.put_nowait))
            try:
                if place.decode is not None:
                    place.decode.start(
                        transfer_id=transfer_id,
                        source=place.seat.kv_address,
                        incarnation=place.seat.incarnation,
                        deadline_ms=math.ceil(1e3 * (_remaining(request) or 0)),
                    )
                ends = set() if place.decode else set(choices)
                prefilled = False
                while going := emission.unfinished(choices):
                    match await inbox.get():
                        case Prefilled() as event:
                            self._dispatcher.leave(place.seat)
                            emission.first_tokens(event)
                            prefilled = True
                        case Output() as event:
                            emission.output(event)
                            ends |= {event.choice_index} if event.finish else set()
                        case Failed(error, blame):
                            history.blame(place, blame)
                            raise error if isinstance(error, _FINAL) else _Fault(error)
                    rest = emission.unfinished(choices)
                    if prefilled and ends.intersection(rest):
                        raise _Fault(EngineError("the workers ended the request without all of its tokens"))
                    _cancel_stopped(place, going, rest)
            finally:
                prefilling.cancel()
                await asyncio.gather(prefilling, return_exceptions=True)


def _application(
    request: Request, choices: tuple[int, ...], number: int, output_ids: list[int], history: _History
) -> Application:
    """What the attempt asks of the dispatcher; with one token to go, prefill samples it, and nothing is decoded."""
    context, left = len(request.prompt_ids) + len(output_ids), request.max_tokens - len(output_ids)
    return Application(
        request_id=request.id,
        attempt=number,
        tenant=request.tenant,
        deadline=math.inf if request.deadline is None else request.deadline,
        demand=Demand(context, left > 1, history.avoid, history.avoid_pairs),
        context_tokens=context,
        max_new_tokens=left,
        choices=choices,
        again=number > 0,
    )


def _remaining(request: Request) -> float | None:
    """Seconds until the deadline."""
    if request.deadline is None:
        return None
    return max(request.deadline - asyncio.get_running_loop().time(), 0.001)


def _cancel_stopped(place: Place, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """End at decode the choices that the router ended, while others go on; closing the place ends them all."""
    if place.decode is not None and after:
        for choice in set(before).difference(after):
            place.decode.cancel_choice(choice)


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error ends the others and is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
