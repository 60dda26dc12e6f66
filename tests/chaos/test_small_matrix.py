"""Cells of the chaos matrix, on one fleet of real processes; `make chaos` runs the whole.

The faults themselves have cheaper tests. Only these can show that routers, prefill and decode workers go
together through a fault under a mixed load, with exact tokens and nothing held afterwards.
"""

import random
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.cases import parse
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.runner import run_case

CASES = ("decode/kill/decoding", "router/restart/decoding", "prefill/hang/prefilling")


@pytest.mark.timeout(240)
async def test_faults_lose_nothing(tmp_path: Path) -> None:
    """Nothing hangs, nothing is wrong, lost or leaked, and each time the fleet is healthy again."""
    rng = random.Random(3)
    rows = []
    async with Fleet.running(Shape(), tmp_path) as fleet:
        for name in CASES:
            rows.append(await run_case(fleet, parse(name), rng, hold=0.5))
            print(report.line(rows[-1]))
            assert not rows[-1].problems, "\n".join([report.line(rows[-1]), *rows[-1].problems])
    assert all(row.counts["finished"] for row in rows)
