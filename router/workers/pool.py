"""All workers of a router: watches, checks that workers match, and the view of the fleet for placement.

Each address that discovery finds has a `WorkerLink`: its channel, its watch, and the requests of this router there.

    run:  dial ── Watch ── status … status ── silence, end or error ── lost ── wait, longer each time ── dial …

A worker sends its status on the watch at least every second. If the watch is silent for `SILENCE_S` seconds, the worker
is stopped or cut off: it is lost, and all attempts there fail at once. A worker that reports that it makes no progress
is lost too, until it reports progress. A draining worker leaves when its watch ends, without a warning in the log. A
new worker is listed before it listens, since it loads its model first; the log warns if it does not listen for long.

A worker is accepted if it matches the router (role, model name, tokenizer) and the workers accepted before it
(fingerprint; KV format between the two roles). If not, it is refused: the log names it once, with both values. It is
checked again at each of its statuses, because the other worker may have gone. A status of an accepted worker changes
only its own view, so the cost does not depend on the size of the fleet.

All new requests go to workers with one fingerprint, so a request never gets KV or tokens from two checkpoints. It
changes when the workers with it are no longer a pair that takes new requests (they drain, or are lost), and those with
another are one. Workers with the old fingerprint then get no new requests, and finish those that they have:

    old:  P P D D   P P D drains         . . D drains        (the streams there end)
    new:  refused   P and D refused      P D accepted        P P D D

A prefill worker is also refused if this router can't sign the tickets that it asks for. Because keys can be replaced at
any time, accepted workers are checked for this at each status as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from functools import partial

import grpc

from baton.config.router import RouterConfig
from baton.errors import BatonError, Unavailable
from baton.kv.format import KvFormat
from baton.pb import worker_pb2, worker_pb2_grpc
from baton.rates import DecayingSum
from baton.rpc.channel import SILENCE_S, SilenceTimer, control_channel
from baton.rpc.tls import Tls
from baton.transfer.tickets import TicketSigner
from baton.worker.status import (
    WIRE_VERSION,
    PrefixChange,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerStatus,
    status_from_proto,
)
from router.placement.policy import RECENT_S, DecodeView, FleetView, PrefillView, can_pair, can_serve
from router.placement.prefix_directory import BlockNamespace, PrefixDirectory
from router.workers.decode_session import DecodeSession, SessionEnd
from router.workers.discovery import Discovery
from router.workers.failures import Cause, WorkerLoss, WorkerLosses
from router.workers.prefill_call import PrefillAssignment

_AGAIN_S = 5.0
"""Seconds until a worker is dialled again if its watch failed because of a bug in this router."""

REASON_CHARACTERS = 400
"""Most characters of a refusal or loss in an error for clients."""

_logger = logging.getLogger(__name__)


class WorkerPool:
    """The workers of a router; use as `async with pool.run():`."""

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        tokenizer_digest: str,
        tls: Tls | None = None,
        signer: TicketSigner | None = None,
    ) -> None:
        self._model_name = config.model_name
        self._max_model_len = config.max_model_len
        self._lengths: list[int] = []
        """`max_model_len` of each worker; the last known values while there are no workers."""
        self._tokenizer_digest = tokenizer_digest
        self._router_id = router_id
        self._tls = tls
        self._signer = signer
        self._links: dict[tuple[WorkerRole, str], tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._accepted: dict[str, WorkerLink] = {}
        self._refusals: dict[str, str] = {}
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self.losses = WorkerLosses()
        self.fleet = FleetView()
        """The accepted workers as they are now."""
        self._fingerprint = ""
        """The fingerprint of the workers that take new requests; empty before the first worker."""
        self._namespaces: Counter[BlockNamespace] = Counter()
        self.prefixes = PrefixDirectory()
        self._discoveries = [
            Discovery(f"--{role.value}", targets, config.resolve_s, self._finder(role))
            for role, targets in ((WorkerRole.PREFILL, config.prefill), (WorkerRole.DECODE, config.decode))
        ]

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[WorkerPool]:
        """Find and watch workers until the block ends."""
        searches = [asyncio.create_task(discovery.run()) for discovery in self._discoveries]
        try:
            yield self
        finally:
            self._closed = True
            await _cancel_all(searches)
            await _cancel_all([task for _, task in self._links.values()])

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of workers that may matter to a waiting request."""
        self._listeners.append(listener)

    def isolate(self, addresses: frozenset[str]) -> None:
        """Isolate the workers at these addresses, and no others: placement gives them no new requests."""
        if addresses != self.fleet.isolated:
            self.fleet.isolated = addresses
            self._notify()

    @property
    def namespaces(self) -> Collection[BlockNamespace]:
        """The block namespaces of the accepted workers."""
        return self._namespaces.keys()

    @property
    def serving(self) -> bool:
        """Whether at least one pair of workers can serve."""
        return can_serve(self.fleet, needs_decode=True)

    def prefill_link(self, address: str) -> WorkerLink:
        """The prefill worker at `address`. Raises KeyError if it is gone."""
        return self._links[WorkerRole.PREFILL, address][0]

    def decode_link(self, address: str) -> WorkerLink | None:
        """The decode worker at `address`; None if it is gone."""
        found = self._links.get((WorkerRole.DECODE, address))
        return found[0] if found else None

    @property
    def identities(self) -> list[WorkerIdentity]:
        """Identities of the accepted workers with the present fingerprint."""
        accepted = [link for link in self._accepted.values() if link.fingerprint == self._fingerprint]
        return [link.status.identity for link in accepted if link.status]

    def max_model_len(self, longest: int) -> int:
        """Most tokens of prompt and output together; `longest` is the limit of the checkpoint."""
        # While all workers are gone, their last limits count, because requests wait for similar workers.
        self._lengths = [identity.max_model_len for identity in self.identities] or self._lengths
        least = min(self._lengths or [longest])
        return min(least, self._max_model_len or least)

    def capacity(self, role: WorkerRole) -> int:
        """Number of tokens that the KV memory of the largest worker of `role` holds; 0 while there is none."""
        return max((load.pages_total * load.page_size for load in self.loads(role)), default=0)

    def loads(self, role: WorkerRole) -> list[WorkerLoad]:
        """The loads of the accepted workers of `role`, as they have reported them."""
        return [link.status.load for link in self._accepted.values() if link.status is not None and link.role is role]

    def signs_for(self, identity: WorkerIdentity) -> bool:
        """Whether a worker accepts this router's tickets, or needs none."""
        taken = identity.ticket_key_ids
        return not taken or (self._signer is not None and self._signer.key_id in taken)

    def describe_missing(self, waited_s: float = 0.0) -> str:
        """An error text for clients if no worker can serve: the missing roles, and the first refusal or loss.

        `waited_s` is the number of seconds that the request has waited. The log names all refused and lost workers.
        """
        missing = [
            role
            for role, draining in (
                ("prefill", all(view.draining for view in self.fleet.prefill.values())),
                ("decode", all(view.draining for view in self.fleet.decode.values())),
            )
            if draining
        ]
        what = f"no {' and no '.join(missing)} worker is there" if missing else "no workers match each other"
        parts = [f"{what} after a wait of {waited_s:g} s" if waited_s else what]
        links = (link for link, _ in self._links.values())
        lost = [f"{link.role.value} worker {link.name}: {link.problem}" for link in links if link.problem]
        reasons = [*self._refusals.values(), *lost]
        if len(reasons) > 1:
            parts.append(f"workers refused: {len(self._refusals)}, lost: {len(lost)}; the first")
        return ": ".join(["; ".join(parts), *map(_truncate, reasons[:1])])

    def _finder(self, role: WorkerRole) -> Callable[[set[str]], None]:
        def found(addresses: set[str]) -> None:
            for (known_role, address), (link, _) in self._links.items():
                if known_role is role:
                    link.listed = address in addresses
            for address in addresses:
                if (role, address) not in self._links:
                    self._dial(role, address)

        return found

    def _dial(self, role: WorkerRole, address: str) -> None:
        link = WorkerLink(address, role, self._router_id, self, self.losses, self._tls)
        task = asyncio.create_task(link.run(), name=f"worker {address}")
        self._links[role, address] = (link, task)
        task.add_done_callback(partial(self._on_end, link))

    def _on_end(self, link: WorkerLink, task: asyncio.Task[None]) -> None:
        del self._links[link.role, link.address]
        if task.cancelled() or self._closed or not link.listed:
            return
        if error := task.exception():
            _logger.error("%s worker %s: its watch failed", link.role.value, link.address, exc_info=error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._dial_again, link.role, link.address)
        else:
            # The address was listed again while its link ended.
            self._dial(link.role, link.address)

    def _dial_again(self, role: WorkerRole, address: str) -> None:
        if not self._closed and (role, address) not in self._links:
            self._dial(role, address)

    def update_worker(self, link: WorkerLink) -> None:
        """Handle a new status or session of a worker: it may join or leave the fleet, and its view is updated."""
        key, accepted = link.label, link.label in self._accepted
        removed = accepted and (link.status is None or self._ticket_problem(link.status.identity) is not None)
        if removed:
            self._remove_accepted(key)
        if self._choose_fingerprint(link, joins=not accepted) or removed:
            # Workers that did not match before may join now.
            for other, _ in list(self._links.values()):
                self._accept_or_refuse(other)
                self.update_view(other)
        elif not accepted:
            self._accept_or_refuse(link)
        self.update_view(link)
        self._notify()

    def update_view(self, link: WorkerLink) -> None:
        """Update the worker's view in the fleet."""
        accepted = link.label in self._accepted
        retired = link.fingerprint != self._fingerprint
        if link.role is WorkerRole.PREFILL:
            prefill = link.prefill_view(retired=retired) if accepted else None
            self.fleet.put_prefill(prefill) if prefill else self.fleet.remove_prefill(link.address)
        else:
            decode = link.decode_view(retired=retired) if accepted else None
            self.fleet.put_decode(decode) if decode else self.fleet.remove_decode(link.address)

    def update_prefixes(self, link: WorkerLink, change: PrefixChange) -> None:
        """Record a change of the prefixes that a worker holds."""
        self.prefixes.update(link.role, link.address, change)

    async def forget_prefixes(self, link: WorkerLink) -> None:
        """Forget the prefixes of a lost worker, in parts, so that the event loop is not held up."""
        more = True
        while more:
            more = self.prefixes.forget(link.role, link.address)
            await asyncio.sleep(0)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _remove_accepted(self, key: str) -> None:
        link = self._accepted.pop(key)
        if link.namespace is not None:
            self._namespaces -= Counter((link.namespace,))

    def _choose_fingerprint(self, changed: WorkerLink, *, joins: bool) -> bool:
        """Choose the fingerprint of new requests after a change of a worker; returns whether it is another one now.

        `joins` tells that the worker was not accepted before.
        """
        if not (joins or changed.draining or changed.status is None):
            return False
        known: dict[str, set[WorkerRole]] = {}
        for link, _ in self._links.values():
            if link.status is not None and self._mismatch(link, link.status.identity) is None:
                takes_new = known.setdefault(link.fingerprint, set())
                if not link.status.draining:
                    takes_new.add(link.role)
        pairs = [fingerprint for fingerprint, takes_new in known.items() if len(takes_new) == len(WorkerRole)]
        old = self._fingerprint
        if old in pairs or (old in known and not pairs):
            return False
        self._fingerprint = next(iter(pairs or known), old)
        if old and self._fingerprint != old:
            _logger.info("new requests go to workers with fingerprint %s, no longer %s", self._fingerprint, old)
        return self._fingerprint != old

    def _accept_or_refuse(self, link: WorkerLink) -> None:
        """Accept a worker, or refuse it and log the reason once."""
        key = link.label
        if key in self._accepted:
            return
        if link.status is None:
            self._refusals.pop(key, None)
            return
        problem = self._problem(link, link.status.identity)
        if problem is not None:
            refusal = f"{link.role.value} worker {link.name} is refused: {problem}"
            if self._refusals.get(key) != refusal:
                _logger.error("%s", refusal)
            self._refusals[key] = refusal
            return
        self._refusals.pop(key, None)
        self._accepted[key] = link
        if link.namespace is not None:
            self._namespaces[link.namespace] += 1
        link.accept()
        self.update_view(link)
        _logger.info("%s worker %s joined", link.role.value, link.name)

    def _problem(self, link: WorkerLink, identity: WorkerIdentity) -> str | None:
        """The reason to refuse the worker; None if it matches the router and the other workers."""
        if (problem := self._mismatch(link, identity)) is not None:
            return problem
        if identity.fingerprint != self._fingerprint:
            names = (other.name for other in self._accepted.values() if other.fingerprint == self._fingerprint)
            return _differs("fingerprint", identity.fingerprint, self._fingerprint, next(names, "the fleet"))
        for other in self._accepted.values():
            if other.status is None:
                continue
            theirs = other.status.identity
            if theirs.incarnation == identity.incarnation:
                return f"it is the same worker as that at {other.address}"
            if (
                theirs.role is not identity.role
                and theirs.fingerprint == identity.fingerprint
                and not _match(identity, theirs)
            ):
                return _differs("KV format", _describe(identity.kv_format), _describe(theirs.kv_format), other.name)
        return None

    def _mismatch(self, link: WorkerLink, identity: WorkerIdentity) -> str | None:
        """The reason why the worker does not match this router; None if it does."""
        pairs: list[tuple[str, str, str, str]] = [
            ("role", identity.role.value, link.role.value, f"the list of --{link.role.value}"),
            ("wire version", str(identity.wire_version), str(WIRE_VERSION), "this router"),
            ("model", identity.model, self._model_name, "this router"),
            ("tokenizer digest", identity.tokenizer_digest, self._tokenizer_digest, "this router"),
        ]
        for what, seen, wanted, whose in pairs:
            if seen != wanted:
                return _differs(what, seen, wanted, whose)
        return self._ticket_problem(identity)

    def _ticket_problem(self, identity: WorkerIdentity) -> str | None:
        """The reason why this router's tickets are not accepted by a prefill worker; None if they are."""
        if identity.role is not WorkerRole.PREFILL or self.signs_for(identity):
            return None
        if self._signer is None:
            return "it requires tickets, and this router has no --ticket-key"
        taken, signs = identity.ticket_key_ids, self._signer.key_id
        return f"it takes tickets of the keys {', '.join(k.hex() for k in taken)}, this router signs with {signs.hex()}"


def _differs(what: str, seen: str, wanted: str, whose: str) -> str:
    return f"its {what} is {seen!r}, but {whose} has {wanted!r}"


def _match(one: WorkerIdentity, other: WorkerIdentity) -> bool:
    prefill, decode = (one, other) if one.role is WorkerRole.PREFILL else (other, one)
    return can_pair(prefill.kv_format, decode.kv_format, converts=decode.converts_kv)


def _truncate(text: str) -> str:
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…"


def _describe(kv_format: KvFormat) -> str:
    parts = ", ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in kv_format.parts)
    return f"version {kv_format.version}: {parts}; {kv_format.layers} layers, blocks of {kv_format.block_size}"


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_SOON_S, _SOON_BACKOFF_S = 20.0, 0.2
"""Seconds after a loss in which the worker is expected back, and most seconds between two dials meanwhile."""


_LOAD_S = 600.0
"""Seconds that a new worker may load its model before the log warns that it does not listen."""


_UNWANTED = "it is no longer wanted"
_STALLED = "it answers, but makes no progress"
_SILENT = "was silent for"


class WorkerLink:
    """The router's link to one worker: channel, watch, session, and the requests there.

    `listed` tells whether discovery still finds the address. A link that is no longer listed is kept until its watch
    ends, because name servers drop a worker when it begins to drain, while its streams go on.
    """

    def __init__(
        self,
        address: str,
        role: WorkerRole,
        router_id: str,
        pool: WorkerPool,
        losses: WorkerLosses,
        tls: Tls | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self._tls = tls
        self._generation = tls.generation if tls else 0
        self.channel = control_channel(address, tls, role.value)
        self.listed = True
        self.status: WorkerStatus | None = None
        """The latest status; None while the worker is lost."""
        self.namespace: BlockNamespace | None = None
        """The namespace of its blocks; None before its first status."""
        self.session: DecodeSession | None = None
        """The session with an accepted decode worker, while it is open."""
        self._router_id = router_id
        self._pool = pool
        self._sessions: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._losses = losses
        self._incarnation = ""
        self._assignments: set[PrefillAssignment] = set()
        self._suspects: dict[PrefillAssignment, str] = {}
        """Request ids of the assignments whose prompt is computed here, or whose KV is fetched from here."""
        self._has_foreign_suspects = False
        """Whether the latest status counts requests of other routers that have no token yet."""
        self._lost = asyncio.Event()
        self._ending: tuple[str, Cause] | None = None
        self._assigned = 0
        self._recent = DecayingSum(RECENT_S)
        self._granted_tokens = self._granted_slots = 0
        self.problem = ""
        """The reason why the worker is lost; empty if it is not lost, or was not dialled yet."""
        self._has_drained = False
        """Whether the worker drained before it was lost, and has not come back yet."""
        self._expected_by: float | None = None
        """Time until which a new worker may load its model without a warning; None if it has been seen."""

    @property
    def label(self) -> str:
        """The worker's role and address, by which the router tells workers apart."""
        return f"{self.role.value} {self.address}"

    @property
    def name(self) -> str:
        """The worker's name in logs and errors: id and address."""
        return _name(self.status, self.address)

    async def run(self) -> None:
        """Watch the worker until it is lost and no longer listed, or until cancelled."""
        loop = asyncio.get_running_loop()
        backoff, lost_at = _FIRST_BACKOFF_S, -_SOON_S
        self._expected_by = loop.time() + _LOAD_S
        try:
            while True:
                await self._redial()
                reason = await self._watch()
                if self.status is not None:
                    backoff, lost_at = _FIRST_BACKOFF_S, loop.time()
                self._lose(reason)
                await self._pool.forget_prefixes(self)
                if not self.listed:
                    return
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                soon = loop.time() - lost_at < _SOON_S
                backoff = min(2 * backoff, _SOON_BACKOFF_S if soon else _MAX_BACKOFF_S)
        finally:
            self.problem = _UNWANTED
            self._lose(_UNWANTED)
            await self._pool.forget_prefixes(self)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.channel.close()

    def accept(self) -> None:
        """Take the worker into service. A decode worker gets a session, and a new one whenever that ends."""
        self._ending = None
        if self.role is WorkerRole.DECODE and self._sessions is None:
            self._sessions = asyncio.create_task(self._keep_session(), name=f"sessions {self.address}")
            self._tasks.add(self._sessions)
            self._sessions.add_done_callback(self._tasks.discard)

    def close_session(self) -> None:
        """Take the worker out of service; attempts in its session fail."""
        if self._sessions is not None:
            self._sessions.cancel()
            self._sessions = None

    def assign(self, tokens: int, cached_tokens: int = 0) -> PrefillAssignment:
        """Count a prompt of `tokens` tokens here until the assignment is released.

        The worker is thought to hold the first `cached_tokens` of them. Raises Unavailable if the worker is lost.
        """
        if self.status is None:
            raise Unavailable(f"prefill worker {self.address} is lost")
        self._assigned += 1
        self._recent.add(tokens - cached_tokens, asyncio.get_running_loop().time())
        assignment = PrefillAssignment(self, self.status.identity, tokens, cached_tokens, self._lost)
        self._assignments.add(assignment)
        self._pool.update_view(self)
        return assignment

    def release(self, assignment: PrefillAssignment) -> bool:
        """Stop counting the prompt of an assignment; False if it did not count."""
        if assignment not in self._assignments:
            return False
        self._assignments.discard(assignment)
        self._pool.update_view(self)
        return True

    def add_suspect(self, assignment: PrefillAssignment, request_id: str) -> None:
        """Make the request a suspect if the worker dies."""
        self._suspects[assignment] = request_id

    def remove_suspect(self, assignment: PrefillAssignment) -> None:
        """Make the request no suspect any more: it needs nothing more from the worker."""
        self._suspects.pop(assignment, None)

    def subtract_free(self, tokens: int, slots: int) -> None:
        """Subtract pages of `tokens` tokens and some slots from the free ones until the next status counts them."""
        self._granted_tokens += tokens
        self._granted_slots += slots
        self._pool.update_view(self)

    @property
    def consumer(self) -> str:
        """The audience of KV tickets for this worker; empty while it is lost."""
        return "" if self.status is None else self.status.identity.consumer

    @property
    def fingerprint(self) -> str:
        """The worker's fingerprint; empty while it is lost."""
        return "" if self.status is None else self.status.identity.fingerprint

    @property
    def draining(self) -> bool:
        """Whether the worker reports that it takes no new work."""
        return self.status is not None and self.status.draining

    def prefill_view(self, *, retired: bool) -> PrefillView | None:
        """The view of a prefill worker for placement; None while it is lost.

        A `retired` worker takes no new requests, because the fleet has moved to another fingerprint.
        """
        if self.status is None:
            return None
        return PrefillView(
            address=self.address,
            kv_format=self.status.identity.kv_format,
            draining=self.status.draining or retired,
            pending_tokens=self.status.load.pending_tokens,
            rate=self.status.load.tokens_per_second,
            open_requests=len(self._assignments),
            open_tokens=sum(assignment.tokens - assignment.cached_tokens for assignment in self._assignments),
            assigned_total=self._assigned,
            recent_tokens=self._recent.value(asyncio.get_running_loop().time()),
            incarnation=self._incarnation,
        )

    def decode_view(self, *, retired: bool) -> DecodeView | None:
        """The view of a decode worker for placement; None while there is no session with it."""
        if self.status is None or self.session is None or not self.session.open:
            return None
        load = self.status.load
        return DecodeView(
            address=self.address,
            kv_format=self.status.identity.kv_format,
            converts_kv=self.status.identity.converts_kv,
            draining=self.status.draining or retired,
            free_tokens=max((load.pages_total - load.pages_used) * load.page_size - self._granted_tokens, 0),
            free_slots=max(load.slots_total - load.slots_used - self._granted_slots, 0),
            open_requests=self.session.open_calls,
            incarnation=self._incarnation,
        )

    async def _redial(self) -> None:
        """Make a new channel if the TLS files have changed since the last one was made."""
        if self._tls is None or self._tls.generation == self._generation:
            return
        self._generation = self._tls.generation
        old, self.channel = self.channel, control_channel(self.address, self._tls, self.role.value)
        await old.close()

    async def _watch(self) -> str:
        """Read one watch to its end; returns the reason of the end."""
        call = worker_pb2_grpc.WorkerStub(self.channel).Watch(worker_pb2.WatchRequest())
        silence = SilenceTimer(SILENCE_S, call.cancel)
        try:
            with silence:
                while True:
                    message = await call.read()
                    silence.reset()
                    if message is grpc.aio.EOF:
                        return "ended its watch"
                    status = status_from_proto(message)
                    if self.status and self.status.identity.incarnation != status.identity.incarnation:
                        return "was restarted"
                    if status.prefixes is not None:
                        self._pool.update_prefixes(self, status.prefixes)
                    if status.stalled:
                        self._lose(_STALLED)
                        continue
                    if status.draining and not self.draining:
                        _logger.info("%s worker %s drains", self.role.value, _name(status, self.address))
                    self._update_status(status)
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code().name)
        except BatonError as error:
            return f"sent a status that can't be read: {error}"
        except asyncio.CancelledError:
            if not silence.ended_call():
                raise
            return f"{_SILENT} {SILENCE_S:g} s"
        except Exception as error:
            # The worker must be dialled again after any error, or it would stay unused.
            _logger.exception("a status of %s worker %s can't be handled", self.role.value, self.name)
            return f"sent a status that can't be handled: {type(error).__name__}: {error}"
        finally:
            call.cancel()

    def _update_status(self, status: WorkerStatus) -> None:
        known = self.status.identity if self.status else None
        if known is None or known != status.identity:
            self.namespace = BlockNamespace.of(status.identity)
        else:
            # The same object makes later comparisons cheap.
            status = replace(status, identity=known)
        self.status, self._incarnation = status, status.identity.incarnation
        self._losses.record_status(self.label, self._incarnation)
        self._granted_tokens = self._granted_slots = 0
        self._has_foreign_suspects = status.load.requests_without_token > self._requests_without_token()
        self.problem, self._has_drained, self._expected_by = "", False, None
        self._pool.update_worker(self)

    def _lose(self, reason: str) -> None:
        self._has_drained = self._has_drained or self.draining
        if self._expected_by is not None and _is_unreachable(reason):
            self._log_absence(reason)
        elif reason != self.problem:
            if self._has_drained:
                _logger.info("%s worker %s has left: %s", self.role.value, self.name, reason)
            else:
                _logger.warning("can't watch %s worker %s: %s", self.role.value, self.name, reason)
        self.problem = reason
        if self.status is None:
            return
        cause = Cause.DRAIN if self.status.draining else Cause.LOST
        self._ending = reason, cause
        loss = self._loss(cause, len(set(self._suspects.values())))
        for assignment in self._suspects:
            assignment.loss = loss
        self._suspects.clear()
        error = Unavailable(f"{self.role.value} worker {self.name}: {reason}")
        self.status = None
        self._lost.set()
        self._lost = asyncio.Event()
        self.close_session()
        for assignment in list(self._assignments):
            assignment.fail(error, cause)
        self._pool.update_worker(self)

    def _log_absence(self, reason: str) -> None:
        """Log once that a new worker does not listen, and warn once if that takes long."""
        if not self.problem:
            _logger.info("%s worker %s does not listen yet: %s", self.role.value, self.name, reason)
        elif self._expected_by is not None and asyncio.get_running_loop().time() > self._expected_by:
            self._expected_by = math.inf
            words = "%s worker %s has not listened for %g s: %s"
            _logger.warning(words, self.role.value, self.name, _LOAD_S, reason)

    def _loss(self, cause: Cause, suspects: int) -> WorkerLoss | None:
        if cause is not Cause.LOST:
            return None
        now = asyncio.get_running_loop().time()
        return self._losses.record_loss(
            self.label, self._incarnation, suspects, now, has_foreign_suspects=self._has_foreign_suspects
        )

    def _requests_without_token(self) -> int:
        """Number of this router's requests here that have no token from the worker yet."""
        if self.role is WorkerRole.DECODE:
            return self.session.requests_without_token if self.session else 0
        # An assignment is released at the first token, but its request stays until the KV was fetched.
        return len(self._assignments & self._suspects.keys())

    def _on_session_end(self, suspects: int) -> SessionEnd:
        reason, cause = self._ending or ("", Cause.DRAIN if self.draining else Cause.LOST)
        return SessionEnd(reason, cause, self._loss(cause, suspects))

    async def _keep_session(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while True:
            session = self.session = DecodeSession(
                self.channel, self.name, self._router_id, lambda: self._pool.update_view(self)
            )
            self._pool.update_worker(self)
            began = asyncio.get_running_loop().time()
            try:
                await session.run(self._on_session_end)
            finally:
                if self.session is session:
                    self.session = None
                    self._pool.update_worker(self)
            if asyncio.get_running_loop().time() - began > _MAX_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF_S)


def _is_unreachable(reason: str) -> bool:
    """Whether no process answers at the address; gRPC says so in words only."""
    return "Failed to connect to remote host" in reason or reason.startswith(_SILENT)


def _name(status: WorkerStatus | None, address: str) -> str:
    return f"{status.identity.worker_id} at {address}" if status else address
