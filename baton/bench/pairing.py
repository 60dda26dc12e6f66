"""What is compared is measured in turns: runs between probes, peers round by round, and what all turns say.

The state of a machine changes within minutes, so a ratio is always of one turn, and is told as the median of all turns
with the least and the most of them. A turn's entry has figures, or `{"error": words}` where what was measured failed,
or is None where it was not asked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Entry = dict[str, Any] | None
_WORDS = 300

Run = TypeVar("Run")
Probe = TypeVar("Probe")


def between(runs: Iterable[Callable[[], Run]], probe: Callable[[], Probe]) -> Iterator[tuple[Run, Probe, Probe]]:
    """What each run gives, with the probe before it and the one after it, which is the next one's before."""
    before = probe()
    for run in runs:
        found, after = run(), probe()
        yield found, before, after
        before = after


def turned(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: who was first is last in the next."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns, or the words that it fails with: a peer's failure is a result too."""
    try:
        return run()
    except Exception as error:
        # Tracebacks end with what went wrong.
        return {"error": (str(error).strip() or type(error).__name__)[-_WORDS:]}


def values(entries: Sequence[Entry], name: str) -> list[Any]:
    """A figure of all turns that have it."""
    return [entry[name] for entry in entries if entry is not None and "error" not in entry]


def median(entries: Sequence[Entry], name: str) -> float | None:
    """The median of a figure, None if no turn has it."""
    found = values(entries, name)
    return statistics.median(found) if found else None


def ratio(ours: Sequence[Entry], theirs: Sequence[Entry], name: str) -> dict[str, Any] | None:
    """Of a figure, ours over theirs in each turn that both have; None if there is none."""
    return spread([mine / other for mine, other in _both(ours, theirs, name)])


def spread(found: Sequence[float]) -> dict[str, Any] | None:
    """`{"median", "min", "max", "rounds"}` of values, None without one."""
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": list(found)}


def failures(rounds: Mapping[str, Sequence[Entry]]) -> dict[str, dict[str, Any]]:
    """By peer that failed: how often, of how many turns, and the last words."""
    found = {}
    for peer, entries in rounds.items():
        errors = [entry["error"] for entry in entries if entry is not None and "error" in entry]
        if errors:
            asked = sum(entry is not None for entry in entries)
            found[peer] = {"count": len(errors), "of": asked, "words": errors[-1]}
    return found


def _both(ours: Sequence[Entry], theirs: Sequence[Entry], name: str) -> list[tuple[float, float]]:
    pairs = ((values([mine], name), values([other], name)) for mine, other in zip(ours, theirs, strict=True))
    return [(mine[0], other[0]) for mine, other in pairs if mine and other]


def medians(rounds: Sequence[Mapping[str, Any]], digits: int = 3) -> dict[str, Any]:
    """The median of each number of all rounds, wherever it stands in them."""
    found: dict[str, Any] = {}
    for name, value in rounds[0].items():
        values = [each[name] for each in rounds]
        nested = isinstance(value, Mapping)
        found[name] = medians(values, digits) if nested else round(statistics.median(values), digits)
    return found
