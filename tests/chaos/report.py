"""Tables of what the chaos suite saw, with all that is needed to repeat it."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from baton.bench.provenance import commit, machine
from bench.common import RESULTS
from tests.chaos.cases import MATRIX
from tests.chaos.fleet import Shape

if TYPE_CHECKING:
    from tests.chaos.runner import Row

_HEAD = (
    "target",
    "fault",
    "state",
    "hit",
    "sent",
    "finished",
    "cancelled",
    "expired",
    "refused",
    "failed",
    "untyped",
    "lost",
    "hung",
    "wrong",
    "leaked bytes",
    "detect s",
    "longest gap s",
    "slowest refusal s",
    "healthy s",
    "free s",
)


def line(row: Row) -> str:
    """One case in words."""
    counts = " ".join(f"{count} {end}" for end, count in row.counts.items())
    return (
        f"{'ok ' if row.good else 'BAD'} {row.case.name} hit {row.hit} ({row.in_state} in state): "
        f"{row.sent} sent, {counts}, {row.lost} lost, leaked {row.leaked}, "
        f"detect {_seconds(row.detect)}, gap {row.stall:.2f}, healthy {_seconds(row.heal)}, free {row.settled:.2f}"
    )


def table(rows: Sequence[Row], shape: Shape, *, seed: int, seconds: float) -> str:
    """All cases as a page of markdown."""
    body = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in sorted(rows, key=lambda row: MATRIX.index(row.case)):
        counts = [
            row.sent,
            *(row.counts[end] for end in ("finished", "cancelled", "expired", "refused", "failed", "untyped")),
            row.lost,
            row.counts["hung"],
            row.counts["wrong"],
            row.leaked,
        ]
        times = [
            _seconds(row.detect),
            f"{row.stall:.2f}",
            _seconds(row.refusal),
            _seconds(row.heal),
            f"{row.settled:.2f}",
        ]
        cells = [row.case.target, row.case.fault, row.case.state, row.hit, *map(str, counts), *times]
        body.append("| " + " | ".join(cells) + " |")
    bad = [f"- {row.case.name}: {problem}" for row in rows for problem in row.problems]
    return "\n".join(
        [
            "# Chaos",
            "",
            *heading(seed, seconds, shape),
            "",
            _totals(rows),
            "",
            *body,
            "",
            "Not applicable: " + ", ".join(case.name for case in MATRIX if not case.applicable) + ": a pair is a "
            "prefill and a decode worker.",
            "",
            *_EXPLAINED,
            *(["", "## Problems", "", *bad] if bad else []),
            "",
        ]
    )


def heading(seed: int, seconds: float, shape: Shape) -> list[str]:
    """Where, when, of what and how."""
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    settings = {each.name: getattr(shape, each.name) for each in fields(shape)}
    setting = ", ".join(f"{name} {value}" for name, value in settings.items() if value != ())
    main = sys.modules["__main__"].__spec__
    command = " ".join(["python -m", main.name.removesuffix(".__main__") if main else sys.argv[0], *sys.argv[1:]])
    return [
        f"- command: `{command}`, seed {seed}, {seconds:.0f} s",
        f"- commit: {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- machine: {where}, kernel {platform.release()}",
        f"- fleet: {setting}",
    ]


def write(kind: str, text: str) -> None:
    """Write a page to bench/results/KIND-DATE.md."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{kind}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.md"
    path.write_text(text)
    print(f"written to {path}")


def _totals(rows: Sequence[Row]) -> str:
    sums = {
        end: sum(row.counts[end] for row in rows)
        for end in ("finished", "cancelled", "expired", "refused", "failed", "untyped", "hung", "wrong")
    }
    kills = [row for row in rows if row.case.target == "decode" and row.case.fault == "kill"]
    told = ", ".join(f"{end} {count}" for end, count in sums.items())
    return (
        f"**{len(rows)} cases, {sum(row.sent for row in rows)} requests: {told}, lost {sum(row.lost for row in rows)}, "
        f"leaked bytes {sum(row.leaked for row in rows)}.** Decode kills: {len(kills)}, accepted streams lost in them: "
        f"{sum(row.lost + row.counts['hung'] + row.counts['untyped'] for row in kills)}."
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


_EXPLAINED = (
    "*cancelled*: by the client, at a moment drawn beforehand; *expired*: had a short deadline of its own; *refused*: "
    "RESOURCE_EXHAUSTED; *failed*: another typed status; *lost*: those of the failed that the fault does not excuse "
    "(only the streams of a router that is hit may break); *wrong*: a token, a finish reason or the usage differs from "
    "what can be computed by hand; *leaked*: bytes with an owner in any ledger once all requests have ended. *detect*: "
    "from the fault until a router counts a failed attempt or a client sees a status; *longest gap*: the longest time "
    "without a token in any stream that went on; *healthy*: from the end of the fault until fresh requests succeed at "
    "every router and every worker has worked again; *free*: until every ledger was empty.",
)
