"""Rotary position embeddings in numbers: their kinds, and their angles per position.

Angles are computed in float64. In float32 the angle at position 2**20 is off by up to 0.03 rad, at 2**24 by 0.5.

No torch: the router reads a model's length through this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "yarn", "llama3")
"""Supported RoPE variants, named as transformers names them."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields after `kind` keep their defaults if `kind` does not use them.

    `attention_factor` multiplies cosines and sines. `truncate` rounds the borders of YaRN's ramp to whole dimensions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0

    def max_position(self, configured: int) -> int:
        """The model's largest number of positions; `configured` is `max_position_embeddings`.

        As in vLLM, the factor multiplies it if it is the length before scaling.
        """
        match self.kind:
            case "linear":
                return int(configured * self.factor)
            case "yarn":
                return max(configured, int(self.original_max_position * self.factor))
        return configured

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """The angle per position in radians, `[head_dim / 2]` (Su et al. 2021, arXiv:2104.09864).

        "linear" divides positions by the factor (Chen et al. 2023, arXiv:2306.15595). "yarn" and "llama3" do so for
        low frequencies only, keep high ones, and blend those in between.
        """
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        match self.kind:
            case "linear":
                return [frequency / self.factor for frequency in plain]
            case "yarn":
                kept = self._yarn_kept(head_dim)
            case "llama3":
                kept = [self._llama3_kept(frequency) for frequency in plain]
            case _:
                return plain
        return [
            share * frequency + (1 - share) * frequency / self.factor
            for share, frequency in zip(kept, plain, strict=True)
        ]

    def _yarn_kept(self, head_dim: int) -> list[float]:
        """Share of each frequency that stays: a ramp between two dimensions (Peng et al. 2023, arXiv:2309.00071)."""
        low, high = (
            head_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        return [1 - min(max((pair - low) / width, 0.0), 1.0) for pair in range(head_dim // 2)]

    def _llama3_kept(self, frequency: float) -> float:
        """1 for wavelengths up to original length / high_freq_factor, 0 from original length / low_freq_factor on.

        After Llama 3.1's reference code.
        """
        turns = self.original_max_position * frequency / (2 * math.pi)
        return min(max((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0), 1.0)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Factor of YaRN for cosines and sines, if the checkpoint has none."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
