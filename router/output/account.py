"""The latency account of one request; all durations on the router's clock but decode's own, which are durations too.

    arrival ──line── dispatch ──prefill── first token ──transfer── ──slot wait── ──decode── end

The parts add up to the total exactly. Decode begins to fetch when prefill is dispatched, so only the part of the
fetch that comes after prefill counts as transfer. Decode is the rest, so that no time is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.request import Timings
from baton.worker.messages import DecodeTimings


@dataclass(slots=True)
class Account:
    """Times are in seconds on one monotonic clock; of several attempts the first one's count."""

    arrived: float
    dispatched: float | None = None
    first_token: float | None = None
    decode: DecodeTimings | None = None
    tokens: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """First time, last time and number of tokens by choice."""

    def on_dispatch(self, now: float) -> None:
        """Prefill was called."""
        if self.dispatched is None:
            self.dispatched = now

    def on_decode(self, timings: DecodeTimings) -> None:
        """Decode has reported its share."""
        if self.decode is None:
            self.decode = timings

    def on_tokens(self, choice: int, count: int, now: float) -> float | None:
        """Tokens of a choice came; returns the time per token since those before, None for the first."""
        if self.first_token is None:
            self.first_token = now
        first, last, seen = self.tokens.get(choice, (now, now, 0))
        self.tokens[choice] = (first, now, seen + count)
        return (now - last) / count if seen else None

    def timings(self, now: float) -> Timings:
        """The account of a request that ends now, in milliseconds."""
        total = 1e3 * (now - self.arrived)
        line = 1e3 * ((now if self.dispatched is None else self.dispatched) - self.arrived)
        until_first = 1e3 * ((now if self.first_token is None else self.first_token) - self.arrived)
        prefill = until_first - line
        left = total - until_first
        transfer = slot_wait = 0.0
        if self.decode is not None:
            transfer = min(max(self.decode.fetch_ms - prefill, 0.0), left)
            slot_wait = min(max(self.decode.slot_wait_ms, 0.0), left - transfer)
        decode = max(left - transfer - slot_wait, 0.0)
        gaps = sum(count - 1 for _, _, count in self.tokens.values())
        spans = sum(last - first for first, last, _ in self.tokens.values())
        return Timings(
            line=line,
            prefill=prefill,
            transfer=transfer,
            slot_wait=slot_wait,
            decode=decode,
            total=line + prefill + transfer + slot_wait + decode,
            first_token=until_first,
            mean_itl=1e3 * spans / gaps if gaps else 0.0,
        )
