"""What an attempt asks of its workers and is given: a prefill worker's seat, and pages on a decode worker."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.errors import BatonError
from baton.kv.format import Shard
from baton.lifecycle import Lifecycle, State
from baton.request import CachePolicy
from baton.worker.messages import Reserved
from baton.worker.status import WorkerRole
from router.events import Deliver
from router.placement.chains import Digests
from router.placement.demand import Choice, Demand
from router.retries import Avoided
from router.workers.breaker import Breakers, Course
from router.workers.discovery import addressed
from router.workers.link import Seat, WorkerLink
from router.workers.pool import Pool
from router.workers.session import DecodeAttempt, Prefix

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Application:
    """What one attempt asks for. `again` is set when the request was accepted before and goes to the head.

    `life` goes from LINE to RESERVING when decode workers are asked, and back when all refuse. `digests` are empty for
    a request that must not read the prefix cache.
    """

    request_id: str
    attempt: int
    tenant: str
    life: Lifecycle
    demand: Demand
    context_tokens: int
    max_new_tokens: int
    choices: tuple[int, ...]
    again: bool
    digests: Digests = field(default_factory=dict)
    salt: bytes = b""
    cache: CachePolicy = CachePolicy.READ_WRITE
    avoided: frozenset[Avoided] = frozenset()
    """What failed the request before."""

    @property
    def deadline(self) -> float:
        """The request's own, on the event loop's clock."""
        return self.life.request_deadline


@dataclass(frozen=True, slots=True)
class Place:
    """What an attempt was given; `decode` is None when nothing is to be decoded.

    `consumer` is whom a ticket for the KV is made out to; what the attempt learns of its workers goes to `course`.
    `pinned_tokens` are the leading ones that the decode worker has already, and `peer` is where prefill can fetch them.
    `turn` is set for a request that runs where nothing else does.
    """

    seat: Seat
    course: Course
    decode: DecodeAttempt | None = None
    decode_name: str | None = None
    decode_incarnation: str = ""
    consumer: str = ""
    pinned_tokens: int = 0
    peer: Peer | None = None
    turn: Turn | None = None

    @property
    def prefill(self) -> WorkerLink:
        """The prefill worker."""
        return self.seat.link

    @property
    def words(self) -> str:
        """The workers, for people."""
        decode = f", decode at {self.decode_name}" if self.decode else ""
        return f"prefill {self.prefill.name}{decode}"


class Turn:
    """The right of an attempt to run where no other request does, until `end`."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.over = False

    def end(self) -> None:
        """Let others use the workers; idempotent."""
        if not self.over:
            self.over = True
            self._leave()


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that can give KV: where, and of which incarnation."""

    shards: tuple[Shard, ...]
    incarnation: str


@dataclass(slots=True)
class Answers:
    """What decode workers said to one application: who can never hold it and why, and when to ask again.

    `room_tokens` are the largest context that another request could have now.
    """

    never: dict[str, str] = field(default_factory=dict)
    retry_after_s: float = math.inf
    room_tokens: int = 0


class Reserver:
    """Takes seats, and asks decode workers for pages."""

    def __init__(self, pool: Pool, breakers: Breakers, timeout_s: float) -> None:
        self._pool = pool
        self._breakers = breakers
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.held: frozenset[str] = frozenset()
        """Workers that are kept for a request that runs alone."""

    def located(self, asked: Application, answers: Answers) -> Demand:
        """What to place, with what the answers have told, and with who is avoided and holds which prefixes now."""
        demand = asked.demand
        if not answers.never and not asked.digests and not asked.avoided:
            return demand
        find, fleet = self._pool.prefixes.find, self._pool.fleet()
        views = ((each, fleet.prefill.get(each.worker) or fleet.decode.get(each.worker)) for each in asked.avoided)
        return replace(
            demand,
            avoid=frozenset(each.worker for each, view in views if view is not None and each.holds(view.incarnation)),
            never=frozenset(answers.never),
            held=find(WorkerRole.PREFILL, asked.digests),
            pinnable=find(WorkerRole.DECODE, asked.digests),
        )

    def seat(self, choice: Choice, demand: Demand) -> Seat:
        """A seat at the chosen prefill worker."""
        cached = min(demand.held.tokens(choice.prefill), demand.tokens)
        return self._pool.prefill(choice.prefill).seat(demand.tokens, cached)

    async def reserve(
        self, asked: Application, seat: Seat, choice: Choice, deliver: Deliver, answers: Answers
    ) -> Place | None:
        """Ask the decode workers in turn; None when all refuse. The seat stays the caller's until it has a place."""
        if not asked.demand.decodes:
            self._send(asked, seat, choice)
            return Place(seat, self._breakers.begin(choice.prefill, None, self._loop.time()))
        names = (*choice.decode, *self._last_resort(asked, choice, answers))
        asked.life.enter(State.RESERVING, self._loop.time(), self._timeout_s * len(names))
        answers.retry_after_s, answers.room_tokens = math.inf, 0
        for name in names:
            link = self._pool.decode(name)
            if link is None or link.session is None or not link.session.open:
                continue
            # A choice may have been made before the worker was kept for another request.
            if name in self.held and not asked.demand.alone:
                continue
            attempt, consumer = link.session.attempt(asked.request_id, asked.attempt, deliver), link.consumer
            incarnation = link.status.identity.incarnation if link.status else ""
            digests = self._pool.prefixes.pinnable(name, link.form, asked.digests)
            answer = await self._ask(attempt, asked, Prefix(digests, asked.salt, asked.cache))
            if answer.granted:
                link.granted(asked.context_tokens - answer.cached_tokens, len(asked.choices))
                course = self._breakers.begin(choice.prefill, name, self._loop.time())
                self._send(asked, seat, choice)
                peer = self._peer(seat, link) if answer.cached_tokens else None
                return Place(seat, course, attempt, name, incarnation, consumer, answer.cached_tokens, peer)
            answers.room_tokens = max(answers.room_tokens, answer.room_tokens)
            if answer.never:
                answers.never[name] = f"decode worker {link.name}: {answer.reason}"
            elif answer.retry_after_s:
                answers.retry_after_s = min(answers.retry_after_s, answer.retry_after_s)
        asked.life.enter(State.LINE, self._loop.time())
        return None

    def narrowed(self, asked: Application, choice: Choice, answers: Answers) -> bool:
        """Whether a decode worker that others may ask is closed to this request: its refusal says nothing to them."""
        return bool(self.closed(asked, choice, answers))

    def closed(self, asked: Application, choice: Choice, answers: Answers) -> frozenset[str]:
        """Decode workers that are there, and that the request could not ask."""
        fleet = self._pool.fleet()
        paired = {decode for prefill, decode in asked.demand.avoid_pairs if prefill == choice.prefill}
        closed = answers.never.keys() | self.held | paired
        return frozenset(name for name in closed if fleet.decode.get(name) is not None)

    def lacks_forks(self, asked: Application, answers: Answers) -> bool:
        """Whether it is for its choices that workers refuse it, which would have room for its context."""
        return len(asked.choices) > 1 and answers.room_tokens >= asked.context_tokens

    def _last_resort(self, asked: Application, choice: Choice, answers: Answers) -> list[str]:
        """Decode workers that the request avoids: better one of these than to wait for the others.

        One that must run alone has no others but the worker that is kept for it.
        """
        fleet = self._pool.fleet()
        if asked.demand.alone or not asked.avoided or choice.prefill not in fleet.prefill:
            return []
        demand = self.located(asked, answers)
        closed = {decode for prefill, decode in demand.avoid_pairs if prefill == choice.prefill}
        closed.update(demand.never, choice.decode)
        rows = fleet.rows_after(fleet.prefill.kind(choice.prefill))
        return [view.name for row in rows for view in row if view.name in demand.avoid and view.name not in closed]

    def _send(self, asked: Application, seat: Seat, choice: Choice) -> None:
        """The prompt goes to its prefill worker at once."""
        stays = asked.cache.writes
        self._pool.prefixes.sent(choice.prefill, asked.digests, seat.cached_tokens, stays=stays)

    def _peer(self, seat: Seat, decode: WorkerLink) -> Peer | None:
        """The decode worker, if the prefill worker can fetch KV from it: in its own format and with our tickets."""
        status = decode.status
        if status is None or decode.form != seat.link.form or not self._pool.signs_for(status.identity):
            return None
        return Peer(addressed(status.identity.shards, decode.address), status.identity.incarnation)

    async def _ask(self, attempt: DecodeAttempt, asked: Application, prefix: Prefix) -> Reserved:
        """One worker's answer; one that doesn't come in time, or for a lost session, is a refusal."""
        answer = Reserved(False, "no answer", False)
        left = asked.deadline - self._loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await attempt.reserve(
                    context_tokens=asked.context_tokens,
                    max_new_tokens=asked.max_new_tokens,
                    choices=asked.choices,
                    deadline_ms=0 if math.isinf(left) else max(math.ceil(1e3 * left), 1),
                    prefix=prefix,
                )
        except (TimeoutError, BatonError) as error:
            _logger.warning("reservation %s/%d failed: %r", asked.request_id, asked.attempt, error)
        finally:
            if not answer.granted:
                attempt.close()
        return answer
