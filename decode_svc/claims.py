"""Pages that are set aside for large reservations, so that smaller ones can't starve them. Pure.

If a reservation is refused because pages are missing, it leaves a claim. Half of the pages that are free then, and half
of those that come free later, are set aside for the oldest claim. Others get pages from the other half. Sequences that
run and grow take pages from both halves. A claim ends when it is granted, when the router cancels it, because the
request was cancelled or placed elsewhere, or when it was not renewed for CLAIM_S. The router asks again when it hears
from the worker, or RENEW_S after the refusal, if a prefill worker can take the request then.

Each session has at most one claim, and so have all pending forks together. The next claim of a session ranks behind the
claims of other sessions, so routers take turns.

A bound on the wait. Call the time in which everything that runs now ends a generation. In a generation, all pages that
others hold now come free. Half of them stay with the claim, and others may hold the other half at most. So a claim on a
share s of all pages waits for at most 1 + log2(1 / (1 - s)) generations: one generation for half of the pages, and
log2(pages) + 1 for all of them. Meanwhile the others get at least half of the pages that come free.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import OutOfPages
from decode_svc.messages import AttemptKey

CLAIM_S, RENEW_S = 3.0, 1.0
"""Seconds after which a claim ends if it is not renewed, and after which its owner is told to ask again."""

Claimant = tuple[int, AttemptKey | None]
"""A session and its attempt."""

FORKS: Claimant = (-1, None)
"""The claimant of all pending forks."""

NOBODY: Claimant = (-2, None)
"""A claimant that has no claim."""


class OutOfUnclaimedPages(OutOfPages):
    """Enough pages are free, but they are set aside for another claim."""

    def __init__(self, needed: int, free: int, total: int, kept: int) -> None:
        super().__init__(needed, free, total)
        self.args = (f"{self.args[0]}, and {kept} are kept for a larger request that waits",)


class OutOfContextPages(OutOfPages):
    """Contexts of choices that wait to be forked already have their share of the pages."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(needed, free, total)
        problem = f"the context needs {needed} pages while its further choices wait"
        self.args = (f"{problem}; {free} of the {total} for such contexts are free",)


@dataclass(slots=True)
class _Claim:
    claimant: Claimant
    pages: int
    renewed_at: float


class Claims:
    """All claims on a worker's pages.

    Times are seconds on the caller's clock; `free` is the number of pages available.
    """

    def __init__(self) -> None:
        self._claims: dict[int, _Claim] = {}
        self._first: _Claim | None = None
        # Twice the pages set aside for the first claim, and the number of free pages when that was computed.
        self._twice = self._free = 0

    def pages_set_aside(self, claimant: Claimant, free: int, now: float) -> int:
        """Number of pages that are set aside for claimants other than this one."""
        first = self._oldest(now)
        if first is None:
            return 0
        self._twice = min(max(self._twice + free - self._free, 0), 2 * first.pages)
        self._free = free
        return 0 if first.claimant == claimant else -(-self._twice // 2)

    def add(self, claimant: Claimant, pages: int, now: float) -> None:
        """Record that `pages` pages were not free; renews the claim, or makes one if the session has none."""
        claim = self._claims.get(claimant[0])
        if claim is None or now >= claim.renewed_at + CLAIM_S:
            self._claims.pop(claimant[0], None)
            self._claims[claimant[0]] = _Claim(claimant, pages, now)
        elif claim.claimant == claimant:
            claim.pages, claim.renewed_at = pages, now

    def renew(self, claimant: Claimant, now: float) -> None:
        """Record that the claimant asked again, whatever the answer is."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant and now < claim.renewed_at + CLAIM_S:
            claim.renewed_at = now

    def settle(self, claimant: Claimant, free: int) -> None:
        """Remove the claim of a claimant that got its pages; `free` pages are left."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant:
            del self._claims[claimant[0]]
        self._free = free

    def cancel(self, claimant: Claimant) -> bool:
        """Remove the claim of a claimant that does not ask again; returns whether it had one."""
        claim = self._claims.get(claimant[0])
        if claim is None or claim.claimant != claimant:
            return False
        del self._claims[claimant[0]]
        return True

    def drop_session(self, session: int) -> None:
        """Remove the claim of a session that has ended."""
        self._claims.pop(session, None)

    def _oldest(self, now: float) -> _Claim | None:
        for session, claim in list(self._claims.items()):
            if now >= claim.renewed_at + CLAIM_S:
                del self._claims[session]
        first = next(iter(self._claims.values()), None)
        if first is not self._first:
            self._first, self._twice, self._free = first, 0, 0
        return first
