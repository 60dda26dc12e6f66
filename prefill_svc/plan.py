"""From where which blocks of a prompt's prefix are loaded. Pure.

    pool │ host │ redis │ peer │ computed
    have ▲      the cache's hits      ▲ the peer's, from where the cache's end, or sooner where it is quicker

A plan is a list of runs of blocks, one after the other, the first beginning where the pool's hits end.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.kv.prefix.contract import FetchRate, Hits

PEER = "peer"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of one tier."""

    tier: str
    blocks: range


def cached_runs(hits: Hits, sought: int, have: int) -> list[Run]:
    """The cache's hits from block `have` on, given that they were looked for from block `sought` on.

    Nothing if `have` lies before `sought`: whether the cache has what is between them is not known.
    """
    runs, at = [], sought
    for tier, blocks in hits.runs:
        start, at = max(at, have), at + blocks
        if sought <= have and start < at:
            runs.append(Run(tier, range(start, at)))
    return runs


def with_peer(runs: Sequence[Run], have: int, held: int, rates: Mapping[str, FetchRate], block_bytes: int) -> list[Run]:
    """`runs` together with a peer that holds the first `held` blocks.

    The peer gives what is beyond the runs, and from the first run on from which it is known to be quicker.
    """
    kept: list[Run] = []
    for run in runs:
        at = run.blocks.start
        if at < held and _quicker(rates.get(PEER), rates.get(run.tier), min(run.blocks.stop, held) - at, block_bytes):
            break
        kept.append(run)
    at = kept[-1].blocks.stop if kept else have
    if at >= held:
        return list(runs)
    beyond = (Run(run.tier, range(max(held, run.blocks.start), run.blocks.stop)) for run in runs[len(kept) :])
    return [*kept, Run(PEER, range(at, held)), *(run for run in beyond if run.blocks)]


def leading(runs: Sequence[Run], blocks: int) -> list[Run]:
    """The first `blocks` blocks of a plan."""
    cut = []
    for run in runs:
        if blocks > 0:
            cut.append(Run(run.tier, run.blocks[:blocks]))
        blocks -= len(run.blocks)
    return cut


def as_hits(runs: Sequence[Run]) -> Hits:
    """A plan as hits."""
    return Hits(tuple((run.tier, len(run.blocks)) for run in runs))


def _quicker(rate: FetchRate | None, than: FetchRate | None, blocks: int, block_bytes: int) -> bool:
    if rate is None or than is None:
        return False
    return _seconds(rate, blocks * block_bytes) < _seconds(than, blocks * block_bytes)


def _seconds(rate: FetchRate, size: int) -> float:
    return rate.latency_s + size / rate.bytes_per_s


def common_blocks(digests: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Leading blocks that two chains have in common."""
    shorter = min(len(digests), len(others))
    return bisect.bisect_left(range(shorter), True, key=lambda block: digests[block] != others[block])
