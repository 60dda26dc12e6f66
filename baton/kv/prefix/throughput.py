"""The speed of a tier, measured at its look-ups and fetches. Pure."""

from __future__ import annotations

from baton.kv.prefix.contract import FetchRate
from baton.rates import DecayingAverage, DecayingRate

MIN_SAMPLE_BYTES = 256 << 10
"""Bytes of the smallest fetch that is used to measure a rate."""

_LATENCY_WEIGHT = 0.2


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
