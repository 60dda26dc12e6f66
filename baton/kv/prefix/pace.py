"""How quick a tier is, from the fetches that were made. Pure."""

from __future__ import annotations

from baton.kv.prefix.contract import FetchRate

ENOUGH_BYTES = 256 << 10
"""Least bytes after the first record from which a rate can be told."""

_WEIGHT = 0.25


class Pace:
    """Exponentially weighted means of latency and bytes per second; None until a fetch was large enough to tell."""

    def __init__(self) -> None:
        self.rate: FetchRate | None = None

    def fetched(self, records: int, record_bytes: int, latency_s: float, total_s: float) -> None:
        """So many records took `total_s` seconds, `latency_s` of them until the first one was there.

        The rate is that of the others, so a fetch of one record has none.
        """
        size = (records - 1) * record_bytes
        if records < 2 or size < ENOUGH_BYTES or not 0 <= latency_s < total_s:
            return
        seen = FetchRate(latency_s, size / (total_s - latency_s))
        old = self.rate or seen
        self.rate = FetchRate(
            old.latency_s + _WEIGHT * (seen.latency_s - old.latency_s),
            # The mean is one of seconds per byte: a stall must count for as long as it took.
            1 / (1 / old.bytes_per_s + _WEIGHT * (1 / seen.bytes_per_s - 1 / old.bytes_per_s)),
        )
