"""The choice of the blocks of a prompt's prefix to load, and of their tiers. Pure.

    pool │ host │ redis │ peer │ computed
    have ▲      the cache's hits      ▲ the peer's, after the end of the cache's hits, or earlier if it is faster

A plan is a list of consecutive runs of blocks. The first run begins where the hits of the pool end.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.kv.prefix.contract import FetchRate, Hits

PEER = "peer"


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive blocks of one tier."""

    tier: str
    blocks: range


def cached_runs(hits: Hits, looked_up_from: int, have: int) -> list[TierRun]:
    """The cache's hits from block `have` on, if the look-up began at block `looked_up_from`.

    Empty if `have` lies before `looked_up_from`, because nothing is known about the blocks between them.
    """
    runs, at = [], looked_up_from
    for tier, blocks in hits.runs:
        start, at = max(at, have), at + blocks
        if looked_up_from <= have and start < at:
            runs.append(TierRun(tier, range(start, at)))
    return runs


def add_peer(
    runs: Sequence[TierRun], have: int, peer_blocks: int, rates: Mapping[str, FetchRate], block_bytes: int
) -> list[TierRun]:
    """`runs` together with a peer that has the first `peer_blocks` blocks.

    The peer supplies the blocks after the runs, and the blocks of the first run for which it is known to be faster and
    of all runs after it.
    """
    kept: list[TierRun] = []
    for run in runs:
        at = run.blocks.start
        if at < peer_blocks and _is_faster(
            rates.get(PEER), rates.get(run.tier), min(run.blocks.stop, peer_blocks) - at, block_bytes
        ):
            break
        kept.append(run)
    at = kept[-1].blocks.stop if kept else have
    if at >= peer_blocks:
        return list(runs)
    beyond = (
        TierRun(run.tier, range(max(peer_blocks, run.blocks.start), run.blocks.stop)) for run in runs[len(kept) :]
    )
    return [*kept, TierRun(PEER, range(at, peer_blocks)), *(run for run in beyond if run.blocks)]


def truncate(runs: Sequence[TierRun], blocks: int) -> list[TierRun]:
    """The first `blocks` blocks of a plan."""
    cut = []
    for run in runs:
        if blocks > 0:
            cut.append(TierRun(run.tier, run.blocks[:blocks]))
        blocks -= len(run.blocks)
    return cut


def to_hits(runs: Sequence[TierRun]) -> Hits:
    """A plan as hits."""
    return Hits(tuple((run.tier, len(run.blocks)) for run in runs))


def _is_faster(rate: FetchRate | None, than: FetchRate | None, blocks: int, block_bytes: int) -> bool:
    if rate is None or than is None:
        return False
    return _seconds(rate, blocks * block_bytes) < _seconds(than, blocks * block_bytes)


def _seconds(rate: FetchRate, size: int) -> float:
    return rate.latency_s + size / rate.bytes_per_s


def common_blocks(digests: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Number of leading blocks that two chains have in common."""
    shorter = min(len(digests), len(others))
    return bisect.bisect_left(range(shorter), True, key=lambda block: digests[block] != others[block])
