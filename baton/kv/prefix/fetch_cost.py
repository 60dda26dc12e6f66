"""The measured speeds of tiers, and whether fetching cached blocks beats computing them. Pure.

Fetching a run of n blocks from tier t is expected to take

    latency_s[t] + n · block_bytes / bytes_per_s[t]     seconds,

and computing it n · block_tokens / prefill_rate, with prefill_rate in tokens per second. Only leading blocks can be
used. So the model adds runs from the first on, and chooses the number of runs that saves the most time. Both sides are
linear in n, so part of a run is never better than all or none of it. A quick link and a slow model fetch everything,
a fast GPU and a slow Redis nothing. A run that costs time is still fetched if the runs after it save more.

A tie is fetched: the engine then has time for other prompts. Unknown rates count as free: a tier has no rate until
something was fetched, and a prefill rate of 0 is unknown too. There is no margin: a wrong choice near the tie
costs almost nothing, and the next request decides again.

A tier that is never chosen is never measured. So once in TRIAL_EVERY_S a trial fetches from it as many
blocks as should take TRIAL_S by its last rates, at least one. Any fetch from a tier delays its next trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.kv.prefix.contract import FetchRate, Hits
from baton.rates import DecayingAverage, DecayingRate

TRIAL_EVERY_S = 5.0
TRIAL_S = 0.02

MIN_SAMPLE_BYTES = 256 << 10
"""Bytes of the smallest fetch that is used to measure a rate."""

_LATENCY_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """`blocks` of the `found` leading blocks are fetched, which is expected to save `saves_s` seconds.

    `trial` tells whether they are fetched to measure the rate of a tier.
    """

    found: int
    blocks: int
    saves_s: float = 0.0
    trial: bool = False

    @property
    def name(self) -> str:
        """Metric label: "nothing" (no block was found), "all", "part" or "none" (of the blocks), or "trial"."""
        if not self.found:
            return "nothing"
        if self.trial:
            return "trial"
        return "all" if self.blocks == self.found else "part" if self.blocks else "none"


class FetchCostModel:
    """The decisions of one worker; `block_bytes` and `block_tokens` are those of a block of its KV format."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes, self._block_tokens = block_bytes, block_tokens
        self._fetched_at: dict[str, float] = {}

    def decide(self, hits: Hits, rates: Mapping[str, FetchRate], prefill_rate: float, now: float) -> FetchDecision:
        """Decide for one request; `now` is in seconds of a monotonic clock."""
        runs, gain_s, saves_s, taken = hits.runs, 0.0, 0.0, 0
        for number, (tier, blocks) in enumerate(runs, 1):
            gain_s += self.estimate_compute_s(blocks, prefill_rate) - self.estimate_fetch_s(blocks, rates.get(tier))
            if gain_s >= saves_s or prefill_rate <= 0:
                taken, saves_s = number, gain_s
        for tier, _ in runs[:taken]:
            self._fetched_at[tier] = now
        fetched = sum(blocks for _, blocks in runs[:taken])
        if taken < len(runs):
            tier, blocks = runs[taken]  # a run that is not chosen has a known rate
            if now - self._fetched_at.setdefault(tier, now) >= TRIAL_EVERY_S:
                self._fetched_at[tier] = now
                return FetchDecision(hits.blocks, fetched + self._trial(blocks, rates[tier]), saves_s, trial=True)
        return FetchDecision(hits.blocks, fetched, saves_s)

    def estimate_fetch_s(self, blocks: int, rate: FetchRate | None) -> float:
        """Estimated seconds to fetch a run from a tier; 0 if unknown."""
        if rate is None or rate.bytes_per_s <= 0:
            return 0.0
        return rate.latency_s + blocks * self._block_bytes / rate.bytes_per_s

    def estimate_compute_s(self, blocks: int, prefill_rate: float) -> float:
        """Estimated seconds to compute a run; 0 if unknown."""
        return blocks * self._block_tokens / prefill_rate if prefill_rate > 0 else 0.0

    def _trial(self, blocks: int, rate: FetchRate) -> int:
        within = (TRIAL_S - rate.latency_s) * rate.bytes_per_s / self._block_bytes
        return int(min(blocks, max(1.0, within)))


class Throughput:
    """Decaying means of a tier: seconds of a look-up, which carries no payload, and bytes per second of fetches."""

    def __init__(self) -> None:
        self._latency_s = DecayingAverage(_LATENCY_WEIGHT)
        self._bytes_per_s = DecayingRate()

    def record_lookup(self, seconds: float) -> None:
        """Record a look-up that took `seconds`."""
        self._latency_s.add(seconds)

    def record_fetch(self, size: int, seconds: float) -> None:
        """Record a fetch of `size` bytes that took `seconds`."""
        if size >= MIN_SAMPLE_BYTES and seconds > 0:
            self._bytes_per_s.add(size, seconds)

    @property
    def rate(self) -> FetchRate | None:
        """The measured rate; None until there was a large enough fetch."""
        bytes_per_s = self._bytes_per_s.value
        return FetchRate(self._latency_s.value, bytes_per_s) if bytes_per_s else None
