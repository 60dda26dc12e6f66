"""Who holds how much of a prompt, as tests say it."""

from __future__ import annotations

from collections.abc import Mapping

from router.placement.prefix_directory import PrefixMatch


def hits(by_worker: Mapping[str, int]) -> PrefixMatch:
    """What an index finds where workers hold so many leading tokens."""
    numbers = sorted({tokens for tokens in by_worker.values() if tokens}, reverse=True)
    return PrefixMatch([(least, [name for name, held in by_worker.items() if held >= least]) for least in numbers])
