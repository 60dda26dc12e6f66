"""What overload does to those who are served: rhythm, goodput, refusals, waste.

A fleet of real processes whose engines take a fixed time per step and chunk (the fake engine), so that what is
measured is admission, lines and slots, and not how two cores are shared. Three runs on one fleet:

    undisturbed   as many requests as there are slots, all at once, nothing else
    1x            Poisson arrivals at the capacity that the engine's numbers imply
    2x            twice that

    python -m bench.overload [--seconds 60] [--slots 32] [--step-ms 30] [--tokens 256]

Goodput counts requests per second that finish with a first token within 2 s and a mean time between tokens of at
most 50 ms. The capacity is slots / (tokens x step) requests per second, outputs being between half and one and a half
times `--tokens` long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from baton import AsyncClient
from baton.bench.stats import percentile
from baton.engine.fake import expected_tokens
from baton.errors import BatonError, Overloaded
from bench.common import save
from bench.fakes import FakeFleet, fake_fleet

TTFT_SLO_S, ITL_SLO_S = 2.0, 0.05
PROMPT_TOKENS = 64
WARM_SHARE = 0.2
"""Leading part of a run that is not counted: slots fill, rates are learnt."""


@dataclass(slots=True)
class Outcome:
    """One request; times are seconds on the client's clock."""

    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    refused: bool = False
    error: str = ""
    wrong: bool = False

    @property
    def gaps(self) -> list[float]:
        """Times between tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def good(self) -> bool:
        """Whether it finished within its objectives."""
        if self.refused or self.error or len(self.arrivals) < 2:
            return False
        mean = (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)
        return self.arrivals[0] - self.sent <= TTFT_SLO_S and mean <= ITL_SLO_S


async def ask(client: AsyncClient, prompt: list[int], tokens: int, outcomes: list[Outcome]) -> None:
    """Send one request and note when each token came."""
    outcome, got = Outcome(time.perf_counter()), []
    outcomes.append(outcome)
    try:
        async for delta in client.generate(prompt, max_tokens=tokens, temperature=0.0, timeout=120):
            outcome.arrivals += [time.perf_counter()] * len(delta.tokens)
            got += [token.token_id for token in delta.tokens]
        outcome.wrong = got != expected_tokens(prompt, tokens)
    except Overloaded:
        outcome.refused = True
    except BatonError as error:
        outcome.error = type(error).__name__
    outcome.ended = time.perf_counter()


def some_prompt(chosen: random.Random) -> list[int]:
    """A prompt that no cache has seen."""
    return [chosen.randrange(1000) for _ in range(PROMPT_TOKENS)]


async def undisturbed(client: AsyncClient, slots: int, tokens: int, chosen: random.Random) -> list[float]:
    """Gaps while the whole batch runs: from the last first token to the first end."""
    outcomes: list[Outcome] = []
    await asyncio.gather(*(ask(client, some_prompt(chosen), tokens, outcomes) for _ in range(slots)))
    begin = max(outcome.arrivals[1] for outcome in outcomes)
    end = min(outcome.arrivals[-1] for outcome in outcomes)
    return [
        later - earlier
        for outcome in outcomes
        for earlier, later in zip(outcome.arrivals, outcome.arrivals[1:], strict=False)
        if begin <= earlier and later <= end
    ]


async def open_loop(
    client: AsyncClient, rate: float, seconds: float, tokens: int, chosen: random.Random
) -> list[Outcome]:
    """Poisson arrivals for a time, of `tokens` output tokens on average; returns when all have ended."""
    outcomes: list[Outcome] = []
    begin, due, tasks = time.perf_counter(), 0.0, []
    while due < seconds:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        # Lengths differ, or those that began together would end together, and the load would come in waves.
        length = chosen.randint(tokens // 2, 3 * tokens // 2)
        tasks.append(asyncio.create_task(ask(client, some_prompt(chosen), length, outcomes)))
        due += chosen.expovariate(rate)
    await asyncio.gather(*tasks)
    return [outcome for outcome in outcomes if outcome.sent - begin >= WARM_SHARE * seconds]


def summary(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """One run in numbers; `seconds` is the counted time."""
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    # The first gap is the handoff: what is left of the transfer, the wait for the next step, and that step.
    rhythm = [gap for outcome in outcomes for gap in outcome.gaps[1:]]
    firsts = [outcome.arrivals[0] - outcome.sent for outcome in outcomes if outcome.arrivals]
    refusals = [outcome.ended - outcome.sent for outcome in outcomes if outcome.refused]
    return {
        "requests": len(outcomes),
        "goodput_per_s": round(sum(outcome.good for outcome in outcomes) / seconds, 2),
        "refused": len(refusals),
        "failed": sum(bool(outcome.error) for outcome in outcomes),
        "wrong": sum(outcome.wrong for outcome in outcomes),
        "itl_ms": _shares(gaps),
        "itl_after_handoff_ms": _shares(rhythm),
        "ttft_ms": _shares(firsts),
        "refusal_ms": _shares(refusals),
    }


def _shares(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{share}": round(1e3 * percentile(values, share / 100), 2) for share in (50, 90, 99, 100)}


def counter(ops: str, name: str) -> float:
    """A counter, summed over its labels, as the process at `ops` tells it."""
    with urllib.request.urlopen(f"http://{ops}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def measure(arguments: argparse.Namespace, fleet: FakeFleet) -> dict[str, Any]:
    chosen = random.Random(arguments.seed)
    capacity = arguments.slots / (arguments.tokens * arguments.step_ms / 1e3)
    counted = (1 - WARM_SHARE) * arguments.seconds
    async with AsyncClient(fleet.router) as client:
        await undisturbed(client, arguments.slots, 16, chosen)
        alone = await undisturbed(client, arguments.slots, 4 * arguments.tokens, chosen)
        runs = {}
        for factor in (1, 2):
            outcomes = await open_loop(client, factor * capacity, arguments.seconds, arguments.tokens, chosen)
            runs[f"{factor}x"] = summary(outcomes, counted)
    wasted = sum(counter(ops, "baton_wasted_prefill_tokens_total") for ops in fleet.ops)
    one, two = runs["1x"], runs["2x"]
    return {
        "slots": arguments.slots,
        "step_ms": arguments.step_ms,
        "capacity_per_s": round(capacity, 2),
        "undisturbed": {"itl_ms": _shares(alone)},
        **runs,
        "wasted_prefill_tokens": wasted,
        "p99_itl_2x_over_undisturbed": round(two["itl_ms"]["p99"] / _shares(alone)["p99"], 3),
        "p99_itl_after_handoff_2x_over_undisturbed": round(
            two["itl_after_handoff_ms"]["p99"] / _shares(alone)["p99"], 3
        ),
        "goodput_2x_over_1x": round(two["goodput_per_s"] / one["goodput_per_s"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=30)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--line-wait-s", type=float, default=1.0, help="of the router: longest expected wait")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with fake_fleet(
        decode_flags=["--slots", str(arguments.slots), "--step-time", str(arguments.step_ms / 1e3), "--pages", "4096"],
        router_flags=["--line-wait-s", str(arguments.line_wait_s)],
    ) as fleet:
        save("overload", asyncio.run(measure(arguments, fleet)))


if __name__ == "__main__":
    main()
