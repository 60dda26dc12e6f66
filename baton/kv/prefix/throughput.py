"""How quick a tier is, from the look-ups and fetches that were made. Pure."""

from __future__ import annotations

from baton.kv.prefix.contract import FetchRate
from baton.rates import DecayingAverage, DecayingRate

ENOUGH_BYTES = 256 << 10
"""Bytes of the smallest fetch from which a rate can be told."""

_LATENCY_WEIGHT = 0.2


class Throughput:
    """Decaying means of a tier: seconds of a look-up, which carries no payload, and bytes per second of fetches."""

    def __init__(self) -> None:
        self._latency_s = DecayingAverage(_LATENCY_WEIGHT)
        self._bytes_per_s = DecayingRate()

    def looked_up(self, seconds: float) -> None:
        """A look-up was answered after so long."""
        self._latency_s.add(seconds)

    def fetched(self, size: int, seconds: float) -> None:
        """So many bytes were there after so long."""
        if size >= ENOUGH_BYTES and seconds > 0:
            self._bytes_per_s.add(size, seconds)

    @property
    def rate(self) -> FetchRate | None:
        """None until a fetch was large enough to tell."""
        bytes_per_s = self._bytes_per_s.value
        return FetchRate(self._latency_s.value, bytes_per_s) if bytes_per_s else None
