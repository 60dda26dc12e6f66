"""Whether fetching cached blocks beats computing them, by measured rates of both. Pure.

Fetching a run of n blocks from tier t is expected to take

    latency_s[t] + n · block_bytes / bytes_per_s[t]     seconds,

and computing it n · block_tokens / prefill_rate, with prefill_rate in tokens per second. Only leading blocks can be
used, so runs are taken from the nearest on; taken are those runs after which the most time is saved. Both sides are
linear in n, so part of a run is never better than all or nothing of it. So a quick link and a slow model fetch all,
a fast GPU and a slow Redis nothing, and a run that loses is fetched all the same if what lies behind it wins more.

A tie is fetched: the engine then has time for others. What is not known yet costs nothing to fetch (rates lack until
something was fetched), and a prefill rate of 0 is not known either. There is no margin: a wrong choice near the tie
loses next to nothing, and the next request chooses anew.

A tier that is refused is not measured, and would be refused for ever. So once in TRIAL_EVERY_S it is tried: as many
blocks as should take TRIAL_S by its last rates, at least one. Any fetch of a tier puts off its next trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.kv.prefix.contract import FetchRate, Hits

TRIAL_EVERY_S = 5.0
TRIAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Decision:
    """How many of the `found` leading blocks to fetch, and the seconds that this should save as far as is known."""

    found: int
    blocks: int
    saves_s: float = 0.0
    trial: bool = False

    @property
    def name(self) -> str:
        """Metric label: "nothing" was found; "all", "part" or "none" of it is fetched; or a "trial" is."""
        if not self.found:
            return "nothing"
        if self.trial:
            return "trial"
        return "all" if self.blocks == self.found else "part" if self.blocks else "none"


class FetchCostModel:
    """The decisions of one worker; `block_bytes` and `block_tokens` are those of a block of its KV format."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._block_bytes, self._block_tokens = block_bytes, block_tokens
        self._measured: dict[str, float] = {}

    def decide(self, hits: Hits, rates: Mapping[str, FetchRate], prefill_rate: float, now: float) -> Decision:
        """Choose for one request; `now` in seconds of any clock that does not go back."""
        runs, gain_s, saves_s, taken = hits.runs, 0.0, 0.0, 0
        for number, (tier, blocks) in enumerate(runs, 1):
            gain_s += self.computing_s(blocks, prefill_rate) - self.fetching_s(blocks, rates.get(tier))
            if gain_s >= saves_s or prefill_rate <= 0:
                taken, saves_s = number, gain_s
        for tier, _ in runs[:taken]:
            self._measured[tier] = now
        fetched = sum(blocks for _, blocks in runs[:taken])
        if taken < len(runs):
            tier, blocks = runs[taken]  # which loses, and so has a rate
            if now - self._measured.setdefault(tier, now) >= TRIAL_EVERY_S:
                self._measured[tier] = now
                return Decision(hits.blocks, fetched + self._trial(blocks, rates[tier]), saves_s, trial=True)
        return Decision(hits.blocks, fetched, saves_s)

    def fetching_s(self, blocks: int, rate: FetchRate | None) -> float:
        """Seconds that a run is expected to take from a tier; 0 if that is not known."""
        if rate is None or rate.bytes_per_s <= 0:
            return 0.0
        return rate.latency_s + blocks * self._block_bytes / rate.bytes_per_s

    def computing_s(self, blocks: int, prefill_rate: float) -> float:
        """Seconds that computing a run is expected to take; 0 if that is not known."""
        return blocks * self._block_tokens / prefill_rate if prefill_rate > 0 else 0.0

    def _trial(self, blocks: int, rate: FetchRate) -> int:
        within = (TRIAL_S - rate.latency_s) * rate.bytes_per_s / self._block_bytes
        return int(min(blocks, max(1.0, within)))
