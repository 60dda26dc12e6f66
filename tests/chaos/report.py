"""Tables of what the chaos suite saw, with all that is needed to repeat it."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from baton.bench.machine import commit, machine
from bench.common import RESULTS
from tests.chaos.cases import CASES
from tests.chaos.fleet import Shape

if TYPE_CHECKING:
    from tests.chaos.scene import Row

_ENDS = ("finished", "cancelled", "expired", "refused", "failed", "untyped", "hung", "wrong")


def cells(row: Row) -> dict[str, str]:
    """Results of a case by column, as `Row` explains them."""
    return {
        "case": row.case.name,
        "hit": row.hit,
        "in state": str(row.in_state),
        "sent": str(row.sent),
        **{end: str(row.counts[end]) for end in _ENDS},
        "lost": str(row.lost),
        "leaked bytes": str(row.leaked),
        "orphans": str(row.orphans),
        "detect s": _seconds(row.detect),
        "ended s": _seconds(row.ended),
        "back s": _seconds(row.back),
        "longest gap s": _seconds(row.stall),
        "slowest refusal s": _seconds(row.refusal),
        "healthy s": _seconds(row.heal),
        "free s": _seconds(row.settled),
        "note": row.note,
    }


def line(row: Row) -> str:
    return " ".join(["ok " if row.good else "BAD", *(f"{name} {value}," for name, value in cells(row).items())])


def page(rows: Sequence[tuple[Shape, Row]], *, seed: int, seconds: float) -> str:
    """A page with a table for each fleet."""
    shapes: list[Shape] = []
    for shape, _ in rows:
        if shape not in shapes:
            shapes.append(shape)
    text = ["# Chaos", "", *heading(seed, seconds, shapes[0] if len(shapes) == 1 else None)]
    for shape in shapes:
        text += ["", *([f"## {_fleet(shape)}", ""] if len(shapes) > 1 else [])]
        text += table([row for of, row in rows if of is shape])
    text += [
        "",
        "Ends are explained in `tests/chaos/load.py`, times in `scene.py`. *lost*: the failed that the fault does "
        "not excuse: only the streams of a router that is hit may break.",
    ]
    bad = [f"- {row.case.name}: {problem}" for _, row in rows for problem in row.problems]
    return "\n".join([*text, *(["", "## Problems", "", *bad] if bad else []), ""])


def table(rows: Sequence[Row]) -> list[str]:
    """Lines with the sums and the cases of one fleet."""
    rows = sorted(rows, key=lambda row: CASES.index(row.case))
    sums = ", ".join(f"{end} {sum(row.counts[end] for row in rows)}" for end in _ENDS)
    kills = [row for row in rows if row.case.target in ("decode", "mixed") and row.case.fault.endswith("kill")]
    lost = sum(row.lost + row.counts["hung"] + row.counts["untyped"] for row in kills)
    found = [cells(row) for row in rows]
    body = [list(found[0]), ["---"] * len(found[0]), *(list(each.values()) for each in found)]
    return [
        f"**{len(rows)} cases, {sum(row.sent for row in rows)} requests: {sums}, lost "
        f"{sum(row.lost for row in rows)}, leaked bytes {sum(row.leaked for row in rows)}, orphans "
        f"{sum(row.orphans for row in rows)}.** Kills of workers that decode: "
        f"{len(kills)}, accepted streams lost in them: {lost}.",
        "",
        *("| " + " | ".join(each) + " |" for each in body),
    ]


def heading(seed: int, seconds: float, shape: Shape | None) -> list[str]:
    """Lines with command, commit, time, machine and fleet, if it is one."""
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    main = sys.modules["__main__"].__spec__
    command = " ".join(["python -m", main.name.removesuffix(".__main__") if main else sys.argv[0], *sys.argv[1:]])
    return [
        f"- command: `{command}`, seed {seed}, {seconds:.0f} s",
        f"- commit: {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- machine: {where}, kernel {platform.release()}",
        *([f"- fleet: {_fleet(shape)}"] if shape else []),
    ]


def _fleet(shape: Shape) -> str:
    settings = {each.name: getattr(shape, each.name) for each in fields(shape)}
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value not in ({}, 0))


def write(kind: str, text: str) -> None:
    """Write a page to bench/results/KIND-DATE.md."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{kind}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.md"
    path.write_text(text)
    print(f"written to {path}")


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
