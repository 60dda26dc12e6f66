"""The placement of an attempt: an assignment at a prefill worker, and pages on a decode worker."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.errors import BatonError
from baton.kv.format import Shard
from baton.lifecycle import State
from baton.request import ReserveResult
from router.placement.policy import PlacementQuery, Selection
from router.placement.scheduler import PlacementRequest, Refusal, make_query
from router.request import Deliver
from router.workers.failures import AttemptHealth, Breakers
from router.workers.link import WorkerLink
from router.workers.pool import Pool
from router.workers.prefill import PrefillAssignment, complete_shards
from router.workers.session import DecodeAttempt, Prefix

_logger = logging.getLogger(__name__)


class IsolationGrant:
    """The right of an attempt to run where no other request does, until `release`; `of_pair`: also on decode."""

    def __init__(self, on_release: Callable[[], None], *, of_pair: bool) -> None:
        self._on_release = on_release
        self.of_pair = of_pair
        self.released = False

    def release(self) -> None:
        """Let others use the workers; idempotent."""
        if not self.released:
            self.released = True
            self._on_release()


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that can give KV: where, and of which incarnation."""

    shards: tuple[Shard, ...]
    incarnation: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of an attempt; `decode` is None when nothing is to be decoded.

    `consumer` is whom a KV ticket is made out to; what the attempt learns of its workers goes to `health`.
    `pinned_tokens` are the leading ones that the decode worker has already, and `peer` is where prefill can fetch them.
    """

    prefill: PrefillAssignment
    health: AttemptHealth
    decode: DecodeAttempt | None = None
    decode_name: str | None = None
    decode_incarnation: str = ""
    consumer: str = ""
    pinned_tokens: int = 0
    peer: Peer | None = None
    isolation: IsolationGrant | None = None
    """Set for a request that has workers for itself."""

    def describe(self) -> str:
        """The workers, for people."""
        decode = f", decode at {self.decode_name}" if self.decode else ""
        return f"prefill {self.prefill.link.name}{decode}"


class Reserver:
    """Opens assignments at prefill workers, and asks decode workers for pages."""

    def __init__(self, pool: Pool, breakers: Breakers, timeout_s: float) -> None:
        self._pool = pool
        self._breakers = breakers
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._refused: dict[tuple[str, int], dict[str, DecodeAttempt]] = {}
        """Attempts of requests that wait, by the decode worker that refused them."""

    def query(self, request: PlacementRequest, never: Mapping[str, str]) -> PlacementQuery:
        """The request to place, by the facts that are known now."""
        return make_query(request, never, self._pool.fleet, self._pool.prefixes)

    def assign(self, selection: Selection, query: PlacementQuery) -> PrefillAssignment:
        """An assignment at the selected prefill worker."""
        cached = min(query.prefill_match.tokens(selection.prefill), query.tokens)
        return self._pool.prefill_link(selection.prefill).assign(query.tokens, cached)

    async def reserve(
        self,
        request: PlacementRequest,
        assignment: PrefillAssignment,
        selection: Selection,
        deliver: Deliver,
        never: Mapping[str, str],
    ) -> Placement | Refusal:
        """Ask the decode workers in turn. The assignment stays the caller's until there is a placement."""
        if not request.query.decodes:
            self._dispatch(request, assignment, selection)
            return Placement(assignment, self._breakers.begin(selection.prefill, None))
        names = (*selection.decode, *self._last_resort(request, selection, never))
        request.life.enter(State.RESERVING, self._loop.time(), self._timeout_s * len(names))
        answers: dict[str, ReserveResult] = {}
        refused = self._refused.setdefault((request.request_id, request.attempt), {})
        for name in names:
            link = self._pool.decode_link(name)
            if link is None or link.session is None or not link.session.open:
                continue
            # The selection may have been made before the worker was kept for another request.
            if name in self._pool.fleet.kept and not request.query.alone:
                continue
            attempt, consumer = link.session.attempt(request.request_id, request.attempt, deliver), link.consumer
            incarnation = link.status.identity.incarnation if link.status else ""
            digests = self._pool.prefixes.digests_to_pin(name, link.namespace, request.digests)
            answer = answers[name] = await self._ask(attempt, request, Prefix(digests, request.salt, request.cache))
            if not answer.granted:
                refused[name] = attempt
            else:
                refused.pop(name, None)
                link.subtract_room(request.context_tokens - answer.cached_tokens, len(request.choices))
                health = self._breakers.begin(selection.prefill, name)
                self._dispatch(request, assignment, selection)
                peer = self._peer(assignment, link) if answer.cached_tokens else None
                return Placement(assignment, health, attempt, name, incarnation, consumer, answer.cached_tokens, peer)
        request.life.enter(State.QUEUED, self._loop.time())
        return self._refusal(request, selection, answers, never)

    def withdraw(self, request: PlacementRequest) -> None:
        """The request does not ask again: workers that refused it need not set pages aside for it."""
        for attempt in self._refused.pop((request.request_id, request.attempt), {}).values():
            attempt.withdraw()

    def _refusal(
        self,
        request: PlacementRequest,
        selection: Selection,
        answers: Mapping[str, ReserveResult],
        never: Mapping[str, str],
    ) -> Refusal:
        never = {**never}
        for name, answer in answers.items():
            if answer.never:
                link = self._pool.decode_link(name)
                never[name] = f"decode worker {link.name if link else name}: {answer.reason}"
        room = max((answer.room_tokens for answer in answers.values()), default=0)
        paired = {decode for prefill, decode in request.query.avoid_pairs if prefill == selection.prefill}
        closed = never.keys() | self._pool.fleet.kept | paired
        return Refusal(
            never,
            min((each.retry_after_s for each in answers.values() if each.retry_after_s), default=math.inf),
            room,
            closed=frozenset(name for name in closed if name in self._pool.fleet.decode),
            lacks_forks=len(request.choices) > 1 and room >= request.context_tokens,
        )

    def _last_resort(self, request: PlacementRequest, selection: Selection, never: Mapping[str, str]) -> list[str]:
        """Decode workers that the request avoids: better one of these than to wait for the others.

        One that must run alone has no others but the worker that is kept for it.
        """
        fleet = self._pool.fleet
        prefill = fleet.prefill.get(selection.prefill)
        if request.query.alone or not request.avoided or prefill is None:
            return []
        query = self.query(request, never)
        closed = {decode for prefill, decode in query.avoid_pairs if prefill == selection.prefill}
        closed.update(query.never, selection.decode)
        return [view.name for view in fleet.followers(prefill) if view.name in query.avoid and view.name not in closed]

    def _dispatch(self, request: PlacementRequest, assignment: PrefillAssignment, selection: Selection) -> None:
        """The prompt goes to its prefill worker at once."""
        writes = request.cache.writes
        self._pool.prefixes.dispatch(selection.prefill, request.digests, assignment.cached_tokens, writes=writes)

    def _peer(self, assignment: PrefillAssignment, decode: WorkerLink) -> Peer | None:
        """The decode worker, if the prefill worker can fetch KV from it: in its own format and with our KV tickets."""
        status = decode.status
        if status is None or decode.namespace != assignment.link.namespace or not self._pool.signs_for(status.identity):
            return None
        return Peer(complete_shards(status.identity.shards, decode.address), status.identity.incarnation)

    async def _ask(self, attempt: DecodeAttempt, request: PlacementRequest, prefix: Prefix) -> ReserveResult:
        """One worker's answer; one that doesn't come in time, or for a lost session, is a refusal."""
        answer = ReserveResult(False, "no answer", False)
        left = request.deadline - self._loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await attempt.reserve(
                    context_tokens=request.context_tokens,
                    max_new_tokens=request.max_new_tokens,
                    choices=request.choices,
                    deadline_ms=0 if math.isinf(left) else max(math.ceil(1e3 * left), 1),
                    prefix=prefix,
                )
        except (TimeoutError, BatonError) as error:
            _logger.warning("reservation %s/%d failed: %r", request.request_id, request.attempt, error)
        finally:
            if not answer.granted:
                attempt.close()
        return answer
