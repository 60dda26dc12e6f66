"""Pages set aside for a reservation that needs more than are free, so that smaller ones don't keep it out. Pure.

A reservation that is refused for want of pages leaves a claim. Of the pages that are free then, and of those that come
free later, half are set aside for the oldest claim; others are granted from the other half. Pages that running
sequences take to grow come from both halves. The claim ends when it is granted, or when it was not renewed for CLAIM_S.
A router asks again at news of a worker, or RENEW_S after the refusal, if a prefill worker has a seat for it then.

Each session has one claim at a time, and so have the forks that are pending. A session's next claim is behind those of
the others, so routers take turns.

What that bounds: in the time in which all that runs now ends (a generation), all pages that others hold now come free.
Half of them stay with the claim, and others may hold the other half at most. So a claim of a share s of all pages waits
for 1 + log2(1 / (1 - s)) generations at most, one for half of the pages and log2(pages) + 1 for all of them; and
meanwhile others get at least half of what comes free.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import OutOfPages
from decode_svc.messages import AttemptKey

CLAIM_S, RENEW_S = 3.0, 1.0
"""How long a claim lasts that nobody renews, and when its owner is asked to come back at the latest."""

Claimant = tuple[int, AttemptKey | None]
"""A session and its attempt."""

FORKS: Claimant = (-1, None)
"""The pending forks of all attempts."""

NOBODY: Claimant = (-2, None)
"""Whoever has no claim."""


class PagesKept(OutOfPages):
    """There would be pages if they were not set aside for another."""

    def __init__(self, needed: int, free: int, total: int, kept: int) -> None:
        super().__init__(needed, free, total)
        self.args = (f"{self.args[0]}, and {kept} are kept for a larger request that waits",)


class ContextsKept(OutOfPages):
    """Choices that wait to be forked keep their share of the pages already."""

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
    """All claims on a worker's pages; times are seconds on the caller's clock, `free` are pages that could be had."""

    def __init__(self) -> None:
        self._claims: dict[int, _Claim] = {}
        self._first: _Claim | None = None
        # Twice the pages that are set aside for the first claim, and the free pages when that was counted.
        self._twice = self._free = 0

    def kept(self, claimant: Claimant, free: int, now: float) -> int:
        """Pages that are set aside for others than this one."""
        first = self._oldest(now)
        if first is None:
            return 0
        self._twice = min(max(self._twice + free - self._free, 0), 2 * first.pages)
        self._free = free
        return 0 if first.claimant == claimant else -(-self._twice // 2)

    def want(self, claimant: Claimant, pages: int, now: float) -> None:
        """So many pages were not free; renews the claim, or makes one if the session has none."""
        claim = self._claims.get(claimant[0])
        if claim is None or now >= claim.renewed_at + CLAIM_S:
            self._claims.pop(claimant[0], None)
            self._claims[claimant[0]] = _Claim(claimant, pages, now)
        elif claim.claimant == claimant:
            claim.pages, claim.renewed_at = pages, now

    def renew(self, claimant: Claimant, now: float) -> None:
        """The claimant has asked again, whatever the answer."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant and now < claim.renewed_at + CLAIM_S:
            claim.renewed_at = now

    def granted(self, claimant: Claimant, free: int) -> None:
        """The claimant has its pages, and so many are free now."""
        claim = self._claims.get(claimant[0])
        if claim is not None and claim.claimant == claimant:
            del self._claims[claimant[0]]
        self._free = free

    def drop(self, session: int) -> None:
        """The session has ended."""
        self._claims.pop(session, None)

    def _oldest(self, now: float) -> _Claim | None:
        for session, claim in list(self._claims.items()):
            if now >= claim.renewed_at + CLAIM_S:
                del self._claims[session]
        first = next(iter(self._claims.values()), None)
        if first is not self._first:
            self._first, self._twice, self._free = first, 0, 0
        return first
