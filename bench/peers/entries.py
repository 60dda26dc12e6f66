"""What one peer did in one turn, and what all turns say of two peers.

A turn's entry has figures, or `{"error": words}` where the peer failed, or is None where it was not asked. The machine
changes its state within minutes, so a ratio is always of one turn, and is told as the median of all turns with the
least and the most of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Entry = dict[str, Any] | None
_WORDS = 300


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


def turned(peers: Sequence[str], number: int) -> list[str]:
    """The order of a round: who was first is last in the next."""
    turn = number % len(peers)
    return [*peers[turn:], *peers[:turn]]
