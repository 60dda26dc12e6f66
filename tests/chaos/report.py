"""Tables of what the chaos suite saw, with all that is needed to repeat it."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from baton.bench.machine import commit, machine
from baton.bench.stats import percentile
from bench.common import RESULTS
from tests.chaos import flood
from tests.chaos.cases import CASES, MATRIX
from tests.chaos.fleet import Shape

if TYPE_CHECKING:
    from tests.chaos.scene import Row

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

_FLOOD_HEAD = (
    "flood",
    "calls of the flooder",
    "refused",
    "requests alone",
    "in the flood",
    "p50 alone s",
    "p50 s",
    "p99 alone s",
    "p99 s",
    "p99 ratio",
)


def line(row: Row) -> str:
    counts = " ".join(f"{count} {end}" for end, count in row.counts.items())
    return (
        f"{'ok ' if row.good else 'BAD'} {row.case.name} hit {row.hit} ({row.in_state} in state): "
        f"{row.sent} sent, {counts}, {row.lost} lost, leaked {row.leaked}, "
        f"detect {_seconds(row.detect)}, gap {row.stall:.2f}, healthy {_seconds(row.heal)}, free {row.settled:.2f}"
        + (f"; {row.note}" if row.note else "")
        + (f"; other tenant {' | '.join(_first_tokens(row))}" if row.trickle else "")
    )


def table(rows: Sequence[Row], shape: Shape, *, seed: int, seconds: float) -> str:
    body = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in sorted(rows, key=lambda row: CASES.index(row.case)):
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
            *_notes(rows),
            *_floods(rows),
            "Not applicable: " + ", ".join(case.name for case in MATRIX if not case.applicable) + ": a pair is a "
            "prefill and a decode worker, and sessions are broken that routers have with workers.",
            "",
            *_EXPLAINED,
            *(["", "## Problems", "", *bad] if bad else []),
            "",
        ]
    )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes on storms and damage."""
    noted = [f"- {row.case.name}: {row.note}" for row in rows if row.note]
    return [*noted, ""] if noted else []


def _floods(rows: Sequence[Row]) -> list[str]:
    """The first tokens of the tenant that floods nothing."""
    flooded = [row for row in rows if row.trickle]
    if not flooded:
        return []
    return [
        "## Floods",
        "",
        f"No fault: one tenant, which may have {flood.MAX_STREAMS} streams, floods; another sends {flood.RATE:g} small "
        f"requests a second; their seconds to the first token. p99 may be {flood.BAR:g} times that alone. The fleet: "
        f"{_settings(flood.SHAPE)}.",
        "",
        "| " + " | ".join(_FLOOD_HEAD) + " |",
        "|" + "---|" * len(_FLOOD_HEAD),
        *(
            f"| {row.case.state} | {row.sent} | {row.counts['refused']} | {' | '.join(_first_tokens(row))} |"
            for row in sorted(flooded, key=lambda row: CASES.index(row.case))
        ),
        "",
    ]


def _first_tokens(row: Row) -> list[str]:
    if row.trickle is None or not (row.trickle.alone and row.trickle.flooded):
        return ["–"] * 7
    alone, flooded = row.trickle.alone, row.trickle.flooded
    times = [percentile(values, share) for share in (0.5, 0.99) for values in (alone, flooded)]
    return [str(len(alone)), str(len(flooded)), *(f"{value:.3f}" for value in times), f"{row.trickle.ratio:.2f}"]


def heading(seed: int, seconds: float, shape: Shape) -> list[str]:
    """Lines with command, commit, time, machine and fleet."""
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    main = sys.modules["__main__"].__spec__
    command = " ".join(["python -m", main.name.removesuffix(".__main__") if main else sys.argv[0], *sys.argv[1:]])
    return [
        f"- command: `{command}`, seed {seed}, {seconds:.0f} s",
        f"- commit: {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- machine: {where}, kernel {platform.release()}",
        f"- fleet: {_settings(shape)}",
    ]


def _settings(shape: Shape) -> str:
    settings = {each.name: getattr(shape, each.name) for each in fields(shape)}
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value not in ((), {}))


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
    "every router and every worker has worked again; *free*: until every ledger was empty. Faults: *cut*: nothing "
    "moves on the links; *reset*: the connections that routers have with the workers of a role break, one worker after "
    "the other, while all live; *storm*: every 3 to 4 s a worker that is up is killed, frozen or hangs; "
    "*damage*: bits of records in Redis are flipped; *flood*: no fault, see above.",
)
