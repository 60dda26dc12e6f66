"""Fleet and load that a case works with, and the row that it returns."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.cases import Case
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load, Outcome
from tests.chaos.observe import settle

TOLD = 8
"""Bad requests that are told of in full; more of them say the same."""

BAD = ("failed", "untyped", "wrong", "hung")


@dataclass
class Row:
    """Result of one case; times in seconds, None where there is nothing to tell."""

    case: Case
    hit: str = "?"
    in_state: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    lost: int = 0
    """Accepted requests that another worker could have served, and that failed."""
    leaked: int = 0
    detect: float | None = None
    """From the fault until a router counts a failed attempt or a client sees a status."""
    ended: float | None = None
    """From the fault until the process that was hit has ended."""
    back: float | None = None
    """From the fault until its successor serves."""
    orphans: int = 0
    """Ranks that outlived their leader by more than a second, or were left at the end."""
    stall: float = 0.0
    """Longest time without a token in a stream that went on after the fault."""
    refusal: float | None = None
    """Slowest refusal."""
    heal: float | None = None
    """From the end of the fault until every router answers and every worker works again."""
    settled: float = 0.0
    """Until every ledger was empty."""
    note: str = ""
    """Further results of this kind of case, in words."""
    problems: list[str] = field(default_factory=list)

    async def settle(self, fleet: Fleet, bound: float) -> None:
        """Wait until nothing is held any more; what still is after `bound` seconds is a leak."""
        left, self.settled = await settle(fleet, bound)
        self.leaked = left.bytes
        if not left.clean:
            self.problems.append("\n  ".join(["held after the end:", *left.violations, *left.lines, *left.silent]))

    @property
    def good(self) -> bool:
        return not self.problems


@dataclass
class Scene:
    """A case under way. `hold` scales how long faults last."""

    fleet: Fleet
    case: Case
    load: Load
    rng: random.Random
    row: Row
    hold: float


def told(outcome: Outcome) -> str:
    spec = outcome.spec
    return (
        f"{outcome.end}: request {outcome.request_id} at {outcome.router}, prompt {len(spec.prompt)}, "
        f"max_tokens {spec.max_tokens}, n {spec.n}, seed {spec.seed}, timeout {spec.timeout}, "
        f"cancel_after {spec.cancel_after}, received {outcome.received}: {outcome.error}"
    )
