"""Turns of measurements that are compared, and the results of all turns.

The state of a machine changes within minutes. So a ratio compares results of one turn, and the report has the median,
the least and the greatest of all turns. The entry of a turn has figures, or `{"error": message}` if the measurement
failed; it is None if there was none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Entry = dict[str, Any] | None
_WORDS = 300
T = TypeVar("T")


def turned(names: Sequence[T], number: int) -> list[T]:
    """The names in the order of round `number`: the first name of a round is the last one of the next round."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `run`, or its error message: a failure of a peer is a result too."""
    try:
        return run()
    except Exception as error:
        # Tracebacks end with what went wrong.
        return {"error": (str(error).strip() or type(error).__name__)[-_WORDS:]}


def values(entries: Sequence[Entry], name: str) -> list[Any]:
    """The values of a figure in all turns that have it."""
    return [entry[name] for entry in entries if entry is not None and "error" not in entry]


def median(entries: Sequence[Entry], name: str) -> float | None:
    """The median of a figure, None if no turn has it."""
    found = values(entries, name)
    return statistics.median(found) if found else None


def ratio(ours: Sequence[Entry], theirs: Sequence[Entry], name: str) -> dict[str, Any] | None:
    """Our figure divided by theirs, for each turn that has both; None if no turn has both."""
    return spread([mine / other for mine, other in _both(ours, theirs, name)])


def spread(found: Sequence[float]) -> dict[str, Any] | None:
    """`{"median", "min", "max", "rounds"}` of values, None if there are none."""
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found), "rounds": list(found)}


def failures(rounds: Mapping[str, Sequence[Entry]]) -> dict[str, dict[str, Any]]:
    """For each peer that failed: the number of failures, the number of turns, and the last message."""
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
    """The median over all rounds of each number, also of those in nested dictionaries."""
    found: dict[str, Any] = {}
    for name, value in rounds[0].items():
        values = [each[name] for each in rounds]
        nested = isinstance(value, Mapping)
        found[name] = medians(values, digits) if nested else round(statistics.median(values), digits)
    return found
