"""All workers of a router: checks that workers match, and the view of the fleet for placement.

Each address that discovery finds has a `WorkerLink`.

A worker is accepted if it matches the router (role, model name, tokenizer) and the workers accepted before it
(fingerprint; KV format between those that prefill and those that decode). If not, it is refused: the log names it once,
with both values. It is checked again at each of its statuses, because the other worker may have gone. A status of an
accepted worker changes only its own views, so the cost does not depend on the size of the fleet.

A mixed worker prefills and decodes. It has one link, and two views at one address. Its loss is one event for both.

All new requests go to workers with one fingerprint, so a request never gets KV or tokens from two checkpoints. It
changes when the workers with it are no longer a pair that takes new requests (they drain, or are lost), and those with
another are one. Workers with the old fingerprint then get no new requests, and finish those that they have:

    old:  P P D D   P P D drains         . . D drains        (the streams there end)
    new:  refused   P and D refused      P D accepted        P P D D

A worker that prefills is also refused if this router can't sign the tickets that it asks for. Because keys can be
replaced at any time, accepted workers are checked for this at each status as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial

from baton.config.router import RouterConfig
from baton.kv.format import KvFormat
from baton.rpc.tls import Tls
from baton.transfer.tickets import TicketSigner
from baton.worker.status import (
    WIRE_VERSION,
    PrefixChange,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
)
from router.placement.policy import FleetView, can_pair, can_serve
from router.placement.prefix_directory import BlockNamespace, PrefixDirectory
from router.workers.discovery import Discovery
from router.workers.failures import WorkerLosses
from router.workers.link import WorkerLink

_AGAIN_S = 5.0
"""Seconds until a worker is dialled again if its watch failed because of a bug in this router."""

REASON_CHARACTERS = 400
"""Most characters of a refusal or loss in an error for clients."""

_SHORT = 12
"""Characters of a fingerprint in logs and errors, enough to tell it from others."""

_WORK = {
    WorkerRole.PREFILL: frozenset({WorkerRole.PREFILL}),
    WorkerRole.DECODE: frozenset({WorkerRole.DECODE}),
    WorkerRole.MIXED: frozenset({WorkerRole.PREFILL, WorkerRole.DECODE}),
}
"""Work of a worker of each role, by the role that does only this work."""

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
            for role, targets in (
                (WorkerRole.PREFILL, config.prefill),
                (WorkerRole.DECODE, config.decode),
                (WorkerRole.MIXED, config.mixed),
            )
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
        """Whether a worker that prefills and one that decodes can serve together; a mixed worker can alone."""
        return can_serve(self.fleet, needs_decode=True)

    def prefill_link(self, address: str) -> WorkerLink:
        """The worker at `address` that prefills. Raises KeyError if it is gone."""
        if (link := self._link(WorkerRole.PREFILL, address)) is None:
            raise KeyError(address)
        return link

    def decode_link(self, address: str) -> WorkerLink | None:
        """The worker at `address` that decodes; None if it is gone."""
        return self._link(WorkerRole.DECODE, address)

    def _link(self, role: WorkerRole, address: str) -> WorkerLink | None:
        """The link to the worker at `address` that is of `role`, or mixed; None if it is gone."""
        found = [self._links[key][0] for key in ((role, address), (WorkerRole.MIXED, address)) if key in self._links]
        # If the address is listed twice, one of its links is refused.
        return next((link for link in found if link.label in self._accepted), next(iter(found), None))

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
        """Number of tokens in the KV memory of the largest worker that does the work of `role`; 0 without one."""
        return max((load.pages_total * load.page_size for load in self.loads(role)), default=0)

    def loads(self, role: WorkerRole) -> list[WorkerLoad]:
        """The loads of the accepted workers that do the work of `role`, as they have reported them."""
        roles = (role, WorkerRole.MIXED)
        return [link.status.load for link in self._accepted.values() if link.status is not None and link.role in roles]

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
        self.update_view(link)
        other_fingerprint = self._choose_fingerprint(link, joins=not accepted)
        if other_fingerprint or removed:
            # Workers that did not match before may join now.
            for other, _ in list(self._links.values()):
                self._accept_or_refuse(other)
                if other_fingerprint or other.address == link.address:
                    self.update_view(other)
        elif not accepted:
            self._accept_or_refuse(link)
        self._notify()

    def update_view(self, link: WorkerLink) -> None:
        """Update the worker's views in the fleet."""
        accepted, work = link.label in self._accepted, self._work(link)
        retired = link.fingerprint != self._fingerprint
        if WorkerRole.PREFILL in work:
            self.fleet.set_prefill(link.address, link.prefill_view(retired=retired) if accepted else None)
        if WorkerRole.DECODE in work:
            self.fleet.set_decode(link.address, link.decode_view(retired=retired) if accepted else None)

    def update_prefixes(self, link: WorkerLink, change: PrefixChange) -> None:
        """Record a change of the prefixes that a worker holds."""
        if link.label not in self._accepted and self._other_roles(link):
            # It is refused for its role, and the other link has the same blocks.
            return
        for role in self._work(link):
            self.prefixes.update(role, link.address, change)

    async def forget_prefixes(self, link: WorkerLink) -> None:
        """Forget the prefixes of a lost worker, in parts, so that the event loop is not held up."""
        more = True
        while more:
            more = any(self.prefixes.forget(role, link.address) for role in self._work(link))
            await asyncio.sleep(0)

    def _work(self, link: WorkerLink) -> frozenset[WorkerRole]:
        """The work whose view and prefixes at the address are those of the link.

        Work of an accepted worker of another role, for which the address is listed too, is not among it.
        """
        return _WORK[link.role].difference(*map(_WORK.__getitem__, self._other_roles(link)))

    def _other_roles(self, link: WorkerLink) -> list[WorkerRole]:
        """Other roles for which the address is listed too, if a worker of such a role is accepted there."""
        others = [role for role in WorkerRole if role is not link.role]
        return [role for role in others if f"{role.value} {link.address}" in self._accepted]

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _remove_accepted(self, key: str) -> None:
        link = self._accepted.pop(key)
        if link.namespace is not None:
            self._namespaces -= Counter((link.namespace,))

    def _choose_fingerprint(self, changed: WorkerLink, *, joins: bool) -> bool:
        """Choose the fingerprint of new requests after a change of a worker; returns whether it is another one now.

        `joins` tells that the worker was not accepted before. While a pair serves, the fingerprint stays.
        """
        if self.serving or not (joins or changed.draining or changed.status is None):
            return False
        known: dict[str, set[WorkerRole]] = {}
        for link, _ in self._links.values():
            if link.status is not None and self._mismatch(link, link.status.identity) is None:
                takes_new = known.setdefault(link.fingerprint, set())
                if not link.status.draining:
                    takes_new.add(link.role)
        pairs = [
            fingerprint
            for fingerprint, takes_new in known.items()
            if any(role.prefills for role in takes_new) and any(role.decodes for role in takes_new)
        ]
        old = self._fingerprint
        if old in pairs or (old in known and not pairs):
            return False
        self._fingerprint = next(iter(pairs or known), old)
        if old and self._fingerprint != old:
            new = _short(self._fingerprint)
            _logger.info("new requests go to workers with fingerprint %s, no longer %s", new, _short(old))
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
                # A rollout of other weights refuses its new workers for a while.
                waits = link.fingerprint != self._fingerprint and self._mismatch(link, link.status.identity) is None
                level = logging.WARNING if waits else logging.ERROR
                _logger.log(level, "%s", refusal)
            self._refusals[key] = refusal
            return
        self._refusals.pop(key, None)
        self._accepted[key] = link
        if link.namespace is not None:
            self._namespaces[link.namespace] += 1
        link.accept()
        self.update_view(link)
        _logger.info("%s worker %s joined%s", link.role.value, link.name, _degrees(link.status.identity))

    def _problem(self, link: WorkerLink, identity: WorkerIdentity) -> str | None:
        """The reason to refuse the worker; None if it matches the router and the other workers."""
        if (problem := self._mismatch(link, identity)) is not None:
            return problem
        if identity.fingerprint != self._fingerprint:
            return (
                f"its fingerprint is {_short(identity.fingerprint)}, but new requests go to workers with "
                f"{_short(self._fingerprint)}. In a rollout of other weights it takes over when those workers leave; "
                "otherwise start it again with their checkpoint and --dtype"
            )
        for other in self._accepted.values():
            if other.status is None:
                continue
            theirs = other.status.identity
            if theirs.incarnation == identity.incarnation:
                return f"it is the same worker as that at {other.address}"
            if theirs.fingerprint == identity.fingerprint and not _match(identity, theirs):
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
        """The reason why a worker that prefills does not accept this router's tickets; None if it does."""
        if not identity.role.prefills or self.signs_for(identity):
            return None
        if self._signer is None:
            return "it requires tickets, and this router has no --ticket-key"
        taken, signs = identity.ticket_key_ids, self._signer.key_id
        return f"it takes tickets of the keys {', '.join(k.hex() for k in taken)}, this router signs with {signs.hex()}"


def _degrees(identity: WorkerIdentity) -> str:
    """The degrees of a worker of several ranks, after a colon; "" for one rank."""
    tensor, pipeline = identity.tensor_parallel, identity.pipeline_parallel
    return f": tensor_parallel {tensor}, pipeline_parallel {pipeline}" if tensor * pipeline > 1 else ""


def _short(fingerprint: str) -> str:
    return fingerprint[:_SHORT]


def _differs(what: str, seen: str, wanted: str, whose: str) -> str:
    return f"its {what} is {seen!r}, but {whose} has {wanted!r}"


def _match(one: WorkerIdentity, other: WorkerIdentity) -> bool:
    """Whether each of the two can decode what the other one has prefilled, as far as their roles allow it."""
    return all(
        can_pair(prefill.kv_format, decode.kv_format, converts=decode.converts_kv)
        for prefill, decode in ((one, other), (other, one))
        if prefill.role.prefills and decode.role.decodes
    )


def _truncate(text: str) -> str:
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…"


def _describe(kv_format: KvFormat) -> str:
    parts = ", ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in kv_format.parts)
    return f"version {kv_format.version}: {parts}; {kv_format.layers} layers, blocks of {kv_format.block_size}"


async def _cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
