"""What a request's sampling parameters cost its batch mates, in milliseconds of a step.

    python -m bench.sampler [--threads 1] [--repeats 9] [--step-ms 150]

Logits of Qwen2.5-0.5B's vocabulary for 32 rows. Each case is timed in turns with a batch of greedy rows: once with one
row that has the parameters, once with 32, and once with such a row leaving and another joining before the step. What is
printed are differences between the quickest of each, and the share of a step of the 0.5B model at batch 32
(`--step-ms`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baton.model.sampler import SamplerBatch
from baton.request import SamplingParams, SequenceState
from bench.common import save

VOCAB, BATCH, PROMPT = 151_936, 32, 2_000
GREEDY = SamplingParams(temperature=0.0)

CASES = {
    "temperature=1": SamplingParams(seed=1),
    "temperature=100": SamplingParams(seed=1, temperature=100.0),
    "top_k=50": SamplingParams(seed=1, top_k=50),
    "top_k=500": SamplingParams(seed=1, top_k=500),
    "top_k=100000": SamplingParams(seed=1, top_k=100_000),
    "top_p=0.9": SamplingParams(seed=1, top_p=0.9),
    "top_p=0.001, temperature=100": SamplingParams(seed=1, top_p=0.001, temperature=100.0),
    "top_k=100000, top_p=0.01, temperature=100": SamplingParams(seed=1, top_k=100_000, top_p=0.01, temperature=100.0),
    "min_p=0.05": SamplingParams(seed=1, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.1),
    "allowed_token_ids, all but one": SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(VOCAB - 1))),
    "logit_bias, 1024": SamplingParams(temperature=0.0, logit_bias=tuple((i, 1.0) for i in range(1024))),
    "min_tokens, 1024 stop tokens": SamplingParams(
        temperature=0.0, min_tokens=1 << 20, stop_token_ids=tuple(range(1024))
    ),
    "logprobs=20": SamplingParams(temperature=0.0, logprobs=20),
}


class Steps:
    """A batch, and the time of its next step."""

    def __init__(self, rows: Sequence[SamplingParams], logits: torch.Tensor) -> None:
        self._logits, self._scratch = logits, torch.empty_like(logits)
        self._batch = SamplerBatch(VOCAB, frozenset({VOCAB - 1}), torch.device("cpu"))
        for number, params in enumerate(rows):
            self._batch.add(str(number), state(params, number))

    def __call__(self, leaves: SamplingParams | None = None) -> float:
        """Milliseconds; with a row that leaves, and one with these parameters that joins, if they are given."""
        self._scratch.copy_(self._logits)
        # Another request has a list of its own.
        new = leaves and state(replace(leaves, allowed_token_ids=(*leaves.allowed_token_ids,)), BATCH)
        began = time.perf_counter()
        if new is not None:
            self._batch.remove(0)
            self._batch.add("new", new)
        infos = self._batch.sample(self._scratch)
        took = time.perf_counter() - began
        self._batch.accept([info.token_id for info in infos])
        return took * 1e3


def state(params: SamplingParams, number: int) -> SequenceState:
    return SequenceState(params, range(number, number + PROMPT), [], number)


def over(first: Callable[[], float], second: Callable[[], float], repeats: int) -> float:
    """What `first` takes more than `second`, each at its quickest, in turns: the rest is other processes' work.

    The first two turns warm up.
    """
    took = [(first(), second()) for _ in range(repeats + 2)][2:]
    return round(min(one for one, _ in took) - min(other for _, other in took), 2)


def steal() -> float:
    """Seconds that the host has taken from this machine so far."""
    return int(Path("/proc/stat").read_text().splitlines()[0].split()[8]) / 100


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--step-ms", type=float, default=150.0, help="a step of the 0.5B model at batch 32 here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    stolen, began = steal(), time.monotonic()
    greedy = Steps([GREEDY] * BATCH, logits)
    usual = min(greedy() for _ in range(options.repeats + 2))
    cases = {}
    for name, params in CASES.items():
        one, full = Steps([params, *[GREEDY] * (BATCH - 1)], logits), Steps([params] * BATCH, logits)
        alone = over(one, greedy, options.repeats)
        cases[name] = {
            "one_row_ms": alone,
            "one_row_share_of_step": round(alone / options.step_ms, 4),
            "all_rows_ms": over(full, greedy, options.repeats),
            "one_leaves_and_joins_ms": over(lambda: full(params), full, options.repeats),  # noqa: B023
        }
        print(f"{name:45} {cases[name]}", flush=True)
    save(
        "sampler",
        {
            "vocab": VOCAB,
            "rows": BATCH,
            "threads": options.threads,
            "step_ms": options.step_ms,
            "greedy_ms": round(usual, 2),
            "stolen_s": round(steal() - stolen, 2),
            "seconds": round(time.monotonic() - began, 1),
            "cases": cases,
        },
    )


if __name__ == "__main__":
    main()
