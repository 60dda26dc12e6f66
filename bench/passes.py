"""Seconds of forward passes with steps and prompt tokens, and the best rate that they allow a mixed worker.

    python -m bench.passes CHECKPOINT [--rounds 5] [--layer-calls]

One engine on two cores, without services. Each round measures every pass once: `steps` sequences of 288 tokens that
take a step, beside `tokens` tokens of prompts of 256 tokens, which are split or packed. Every pass samples a token of
its last prompt. The least time of all rounds counts. A round during which the host took more than 2% of the CPU time
is measured again, at most as often as there are rounds. With `--layer-calls`, passes stop after each layer, as those
whose KV is sent while it is computed.

The best rate (`Ceiling`) is that of `clients` users, each of which sends the next request when the last one has ended.
A request of `prompt` and `output` tokens takes `prompt / tokens` mixed passes, and `output - 1` steps. While one prompt
is computed, all other requests take steps, `steps` of them on average:

    passes(request)  = (output - 1) / steps                            of which prompt / tokens are mixed
    seconds(request) = prompt / tokens * mixed(steps, tokens) + (passes - prompt / tokens) * step(steps)
    steps            = clients - prompt / tokens * mixed(steps, tokens) / seconds(request)
    tokens/s         = output / seconds(request)

If there are fewer passes than mixed ones, every pass is mixed, and some requests wait for their prefill: `steps` is
then (output - 1) * tokens / prompt. Services, the network and sampling of single requests are not in it, so no worker
is faster. The time between tokens is that of a mixed pass or of a step alone; its p99 is that of a mixed pass where
more than 1% of the passes are mixed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.bench.machine import stolen_s
from baton.engine.process import pin_compute_threads, prepare
from bench.common import save
from bench.pairing import turned

CONTEXT, PROMPT = 288, 256
STEPS = (0, 6, 8, 16, 24, 32)
TOKENS = (0, 16, 32, 40, 48, 64, 96, 128, 256, 264, 288)
CASES = ((8, 256, 64), (32, 256, 64), (8, 1024, 128))
"""Clients, tokens of a prompt and of an output, on average."""
STOLEN = 0.02
GOOD = 0.95

Seconds = Mapping[tuple[int, int], float]
"""Seconds of a pass by its number of steps and of prompt tokens."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best rate with `tokens` prompt tokens in a mixed pass.

    `steps`: sequences that take a step, on average. `multiple`: time of a mixed pass over that of a step alone.
    """

    tokens: int
    tokens_per_s: float
    steps: float
    itl_p99_ms: float
    multiple: float
    mixed_share: float


def seconds_at(seconds: Seconds, steps: float, tokens: int) -> float:
    """Seconds of a pass, interpolated between the measured numbers of steps."""
    known = sorted(each for each, of in seconds if of == tokens and each)
    low = max((each for each in known if each <= steps), default=known[0])
    high = min((each for each in known if each >= steps), default=known[-1])
    part = 0.0 if low == high else (steps - low) / (high - low)
    return (1 - part) * seconds[low, tokens] + part * seconds[high, tokens]


def ceiling(seconds: Seconds, tokens: int, clients: int, prompt: int, output: int) -> Ceiling:
    """The best rate of a mixed worker, as the text of the module derives it."""
    mixed = prompt / tokens
    most = (output - 1) * tokens / prompt
    steps = min(most, clients - 0.5)
    for _ in range(50):
        slow = seconds_at(seconds, steps, tokens)
        alone = seconds_at(seconds, steps, 0)
        passes = max(mixed, (output - 1) / steps)
        took = mixed * slow + (passes - mixed) * alone
        steps = (steps + min(most, clients - mixed * slow / took)) / 2
    share = mixed / passes
    itl = slow if share > 0.01 else alone
    return Ceiling(tokens, output / took, steps, 1e3 * itl, slow / alone, share)


def ceilings(seconds: Seconds) -> dict[str, Any]:
    """The rates of all cases by number of prompt tokens, the best one, and the least multiple with a good rate."""
    found: dict[str, Any] = {}
    for clients, prompt, output in CASES:
        rates = [ceiling(seconds, tokens, clients, prompt, output) for tokens in TOKENS if tokens]
        best = max(rates, key=lambda each: each.tokens_per_s)
        good = [each for each in rates if each.tokens_per_s >= GOOD * best.tokens_per_s]
        found[f"c{clients} {prompt}/{output}"] = {
            "best": _row(best),
            "least_multiple_of_a_good_rate": _row(min(good, key=lambda each: each.multiple)),
            "by_tokens": [_row(each) for each in rates],
        }
    return found


def _row(each: Ceiling) -> dict[str, float]:
    return {name: round(getattr(each, name), 3) for name in each.__slots__}


def parts(seconds: Seconds) -> dict[str, Any]:
    """Mixed passes compared with two passes, and with one pass over as many prompt tokens as they have rows."""
    found = {}
    for (steps, tokens), took in seconds.items():
        if steps and tokens:
            rows = seconds.get((0, steps + tokens))
            found[f"{steps} steps + {tokens} tokens"] = {
                "ms": round(1e3 * took, 2),
                "over_two_passes": round(took / (seconds[steps, 0] + seconds[0, tokens]), 3),
                "over_prompt_of_as_many_rows": rows and round(took / rows, 3),
            }
    return found


class Passes:
    """Timed passes of one engine."""

    def __init__(self, checkpoint: str, layer_calls: bool) -> None:
        """Load the checkpoint, on two threads."""
        prepare("0-1")
        from baton.bench.engine import EngineRuns
        from baton.engine.config import EngineConfig
        from baton.engine.factory import build

        engine = build(EngineConfig(checkpoint, device="cpu", threads=2, slots=max(STEPS), kv_memory=1 << 30))
        pin_compute_threads()
        self._runs = EngineRuns(engine)
        self._on_layer = (lambda layer: None) if layer_calls else None

    def measure(self, number: int) -> dict[tuple[int, int], float]:
        """Seconds of each pass, in an order that moves on with the number of the round."""
        found = {}
        for steps in turned(STEPS, number):
            room = 4 * len(TOKENS)
            with self._runs.batch(steps, CONTEXT, room) if steps else contextlib.nullcontext():
                for tokens in turned(TOKENS, number):
                    if steps or tokens:
                        found[steps, tokens] = self._runs.mixed(
                            split(tokens, PROMPT), PROMPT, step=bool(steps), on_layer=self._on_layer
                        )
        return found


def split(tokens: int, prompt: int) -> list[int]:
    """The sizes of chunks of prompts of `prompt` tokens that have `tokens` tokens together."""
    return [min(prompt, tokens - start) for start in range(0, tokens, prompt)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layer-calls", action="store_true", help="stop after each layer")
    given = parser.parse_args()
    passes = Passes(given.checkpoint, given.layer_calls)
    rounds: list[dict[tuple[int, int], float]] = []
    disturbed = 0
    while len(rounds) < given.rounds:
        stolen, began = stolen_s(), time.monotonic()
        found = passes.measure(len(rounds))
        share = (stolen_s() - stolen) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if share > STOLEN and disturbed < given.rounds:
            disturbed += 1
            continue
        rounds.append(found)
        print(f"round {len(rounds)}: {time.monotonic() - began:.0f} s", flush=True)
    seconds = {each: min(one[each] for one in rounds) for each in rounds[0]}
    results = {
        "rounds": len(rounds),
        "disturbed": disturbed,
        "ms": {
            str(steps): {str(each): round(1e3 * seconds[steps, each], 2) for each in TOKENS if steps or each}
            for steps in STEPS
        },
        "prompt_tokens_per_s": {str(tokens): round(tokens / seconds[0, tokens], 1) for tokens in TOKENS if tokens},
        "mixed": parts(seconds),
        "ceilings": ceilings(seconds),
    }
    save("passes-layer-calls" if given.layer_calls else "passes", results)


if __name__ == "__main__":
    main()
