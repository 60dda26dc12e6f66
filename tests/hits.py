"""Prefix hits by worker, as tests write them."""

from collections.abc import Mapping

from router.placement.prefix_directory import PrefixMatch


def hits(by_worker: Mapping[str, int]) -> PrefixMatch:
    """Result of an index where workers hold so many leading tokens."""
    numbers = sorted({tokens for tokens in by_worker.values() if tokens}, reverse=True)
    return PrefixMatch([(least, [name for name, held in by_worker.items() if held >= least]) for least in numbers])
