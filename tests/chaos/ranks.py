"""Fleets of workers with ranks: their shape, and their load with the tokens of a real model.

Prefill workers are tensor parallel, decode workers are pipelines. They serve the bundled model, whose right tokens
come from an engine of one process.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton import bundled
from baton.engine import factory
from baton.engine.config import EngineConfig
from baton.engine.core import EngineCore
from baton.request import SamplingParams
from tests.chaos.fleet import Shape
from tests.chaos.load import Mix, Spec
from tests.contract.engines import GREEDY, generate, state

SHAPE = Shape(prefill_ranks=(2, 1), decode_ranks=(1, 2), model_len=2048, stall_s=10.0)
"""Ranks that stand still are noticed after 10 s, no later than engines that hang."""

RATE = 4.0
"""Requests per second of the mixed load."""

VOCABULARY = 4096
FRESH = {400: (30, 12), 900: (40, 12)}
"""Prompts of each length that are new in each case, so that no worker has their KV: output tokens, and number."""

COMMON = {40: (150, 16), 64: (60, 24), 120: (40, 12)}
"""The same of prompts that come again."""


class RealMix(Mix):
    """Draws requests whose tokens an engine of one process has computed beforehand."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._engine: EngineCore = factory.build(
            EngineConfig(str(bundled.path()), dtype="float32", kv_memory=1 << 26, slots=4, threads=1)
        )
        self._pools = {length: self._computed(length) for length in COMMON}
        self._forks = [self._forked() for _ in range(4)]
        self._turns = dict.fromkeys([*COMMON, *FRESH], 0)

    def refresh(self) -> None:
        """Compute the prompts that are new in each case."""
        self._pools |= {length: self._computed(length) for length in FRESH}

    def close(self) -> None:
        self._engine.close()

    def _computed(self, length: int) -> list[Spec]:
        tokens, count = (COMMON | FRESH)[length]
        return [self._spec(length, tokens, seed=None if each % 2 else each) for each in range(count)]

    def _forked(self) -> Spec:
        return self._spec(40, 40, seed=7, n=3)

    def _spec(self, length: int, tokens: int, *, seed: int | None, n: int = 1) -> Spec:
        prompt = [self._rng.randrange(VOCABULARY) for _ in range(length)]
        params = GREEDY if seed is None else SamplingParams(seed=seed)
        known = [generate(self._engine, state(prompt, params, choice=choice), tokens) for choice in range(n)]
        return Spec(tuple(prompt), tokens, n=n, seed=seed, known=tuple(map(tuple, known)))

    def draw(self) -> Spec:
        rng = self._rng
        pool = self._forks if rng.random() < 0.08 else self._pools[rng.choice((*COMMON,))]
        spec = rng.choice(pool)
        return self._leaving(
            self._stopping(replace(spec, max_tokens=min(spec.max_tokens, rng.choice((1, 10, 25, 60)))))
        )

    def plain(self, prompt: int, max_tokens: int) -> Spec:
        """A request of a known prompt of this length, in turns; of at most as many tokens as are known."""
        self._turns[prompt] += 1
        pool = self._pools[prompt]
        spec = pool[self._turns[prompt] % len(pool)]
        return replace(spec, max_tokens=min(spec.max_tokens, max_tokens))
