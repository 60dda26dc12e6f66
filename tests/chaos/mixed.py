"""Fleets with workers of both roles: two of them, and one beside a prefill and a decode worker."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.chaos import flood
from tests.chaos.cases import BOTH, DAMAGE, FAULTS, FLOODS, MATRIX, MIXED, STATES, STORM, Case
from tests.chaos.fleet import Shape

TWO = Shape(prefill=0, decode=0, mixed=2)
BESIDE = Shape(prefill=1, decode=1, mixed=1)
FLOODED = replace(flood.SHAPE, prefill=0, decode=0, mixed=2)


def shapes_of(case: Case) -> list[Shape]:
    """Fleets on which a case can run."""
    if case.fault == "flood":
        return [FLOODED]
    return [BESIDE] if case.target in ("prefill", "decode") else [TWO, BESIDE]


def plan(rng: random.Random) -> list[tuple[Shape, Case]]:
    """Every fault in every state on two workers of both roles, and floods; beside others, some states of each fault."""
    others = [Case(target, "kill", state) for target in ("router", "redis") for state in STATES]
    others += [Case("redis", "names", "prefilling")]
    two = [*MIXED, *others]
    beside = [Case("mixed", "kill", state) for state in (*STATES, BOTH)]
    beside += [Case("mixed", fault, rng.choice((BOTH, "transferring"))) for fault in FAULTS if fault not in _ELSEWHERE]
    beside += [Case(target, rng.choice(_OF_WORKERS), state) for target in ("prefill", "decode") for state in STATES]
    assert set(beside) <= {*MIXED, *MATRIX}
    found = [(TWO, case) for case in (STORM, *rng.sample(two, len(two)), DAMAGE, STORM)]
    found += [(FLOODED, case) for case in FLOODS]
    return found + [(BESIDE, case) for case in (STORM, *rng.sample(beside, len(beside)), DAMAGE, STORM)]


_ELSEWHERE = ("kill", "names")
_OF_WORKERS = tuple(fault for fault in FAULTS if fault != "names")
