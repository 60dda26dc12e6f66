"""`python -m tests.chaos`: the matrix, for as long as asked; see report.py for what it writes.

    python -m tests.chaos --minutes 30 --seed 1
    python -m tests.chaos --ranks
    python -m tests.chaos --mixed
    python -m tests.chaos --case decode/kill/decoding --case redis/stop/prefilling --keep-logs /tmp/logs

All cases but those of workers with several ranks or of both roles run once, storms, damage and floods more often
(cases.py has the order), then cases at random until the minutes are used up. Exits with 1 if anything was hung, wrong,
leaked, lost, orphaned or not healthy again, or if a flood of one tenant delayed another beyond the bar.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import flood, report
from tests.chaos import mixed as of_mixed
from tests.chaos import ranks as of_ranks
from tests.chaos.cases import RANK_FAULTS, RANKS, Case, parse, plan
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.runner import run_case
from tests.chaos.scene import Row

SHAPE = Shape()


async def run(arguments: argparse.Namespace, directory: Path) -> list[tuple[Shape, Row]]:
    """Run cases one after the other, each on a fleet of its shape; a fleet that a case leaves sick is replaced."""
    rng = random.Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    todo = planned(arguments, rng)
    again: list[tuple[Shape, Case]] = list(todo)
    rows: list[tuple[Shape, Row]] = []
    while todo:
        fresh = directory / f"fleet-{len(rows)}"
        fresh.mkdir()
        shape = todo[0][0]
        mix = of_ranks.RealMix(rng) if shape.real else None
        async with Fleet.running(shape, fresh) as fleet:
            while todo and todo[0][0] is shape:
                _, case = todo.pop(0)
                row = await attempt(fleet, case, rng, mix)
                rows.append((shape, row))
                if not todo and time.monotonic() < end and not arguments.case:
                    todo = rng.sample(again, len(again))
                if time.monotonic() > end and len(rows) >= len(again):
                    todo = []
                if row.problems:
                    break
    return rows


def planned(arguments: argparse.Namespace, rng: random.Random) -> list[tuple[Shape, Case]]:
    """Cases with their fleets, in order."""
    asked = [parse(name) for name in arguments.case]
    if arguments.mixed:
        return [(shape, case) for case in asked for shape in of_mixed.shapes_of(case)] or of_mixed.plan(rng)
    asked = asked or (rng.sample(RANKS, len(RANKS)) if arguments.ranks else plan(rng))
    return [(shape_of(case), case) for case in asked]


def shape_of(case: Case) -> Shape:
    """The fleet that a case needs."""
    if case.fault in RANK_FAULTS:
        return of_ranks.SHAPE
    if case.target == "mixed":
        return of_mixed.TWO
    return flood.SHAPE if case.fault == "flood" else SHAPE


async def attempt(fleet: Fleet, case: Case, rng: random.Random, mix: of_ranks.RealMix | None) -> Row:
    """Run a case and tell of it; whatever the harness itself raises is a problem of the case."""
    began = time.monotonic()
    try:
        if case.fault == "flood":
            row = await flood.run_flood(fleet, case, rng)
        elif mix is not None:
            mix.refresh()
            row = await run_case(fleet, case, rng, mix, rate=of_ranks.RATE)
        else:
            row = await run_case(fleet, case, rng)
    except Exception as error:
        row = Row(case, problems=[f"the case could not be run: {error!r}"])
    took = time.monotonic() - began
    print(f"{took:5.1f} s  {report.line(row)}", flush=True)
    for problem in row.problems:
        print(f"    {problem}", flush=True)
    if row.problems:
        for name, process in fleet.processes.items():
            print(f"    --- {name}, pid {process.pid}\n{process.tail(12)}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", default=[], help="TARGET/FAULT/STATE; may be repeated")
    parser.add_argument("--ranks", action="store_true", help="the cases of workers with several ranks, each once")
    parser.add_argument("--mixed", action="store_true", help="cases of fleets with workers of both roles")
    parser.add_argument("--keep-logs", type=Path, help="directory for the processes' logs")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        directory = arguments.keep_logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        rows = asyncio.run(run(arguments, directory))
    if not arguments.mixed:
        rows = [(shape_of(rows[0][1].case), row) for _, row in rows]
    text = report.page(rows, seed=arguments.seed, seconds=time.monotonic() - began)
    print(text)
    if not arguments.case:
        kind = "chaos-ranks" if arguments.ranks else "chaos-mixed" if arguments.mixed else "chaos"
        report.write(kind, text)
    return int(any(row.problems for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
