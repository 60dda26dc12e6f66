"""What overload does to those who are served: rhythm, goodput, refusals, waste.

A fleet of real processes whose engines take a fixed time per step and chunk (the fake engine), so that what is
measured is admission, queues and slots, and not how two cores are shared. Three runs on one fleet:

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
import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from baton.bench.load.connect import connect
from baton.bench.load.outcome import Ending, Outcome
from baton.bench.load.runner import LoadPlan, LoadRun
from baton.bench.load.targets import Place, Target
from baton.bench.load.workload import Job, Prompts, lengths, poisson, random_jobs
from baton.bench.stats import shares
from bench.common import save
from bench.services import started, total

TTFT_SLO_S, ITL_SLO_S = 2.0, 0.05
PROMPT_TOKENS, VOCABULARY = 64, 1000
TIMEOUT_S = 120.0
WARM_SHARE = 0.2
"""Leading part of a run that is not counted: slots fill, rates are learnt."""


@contextlib.contextmanager
def fleet(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """One prefill and one decode worker with fake engines, and a router: its address, and the ops of all."""
    decode_flags = ["--slots", str(arguments.slots), "--step-time", str(arguments.step_ms / 1e3), "--pages", "4096"]
    with contextlib.ExitStack() as stack:
        worker = ["-m", "tests.chaos.process"]
        prefill = stack.enter_context(started([*worker, "prefill"])).listening()
        decode = stack.enter_context(started([*worker, "decode", *decode_flags])).listening()
        places = ["--prefill", prefill["control"], "--decode", decode["control"]]
        wait = ["--queue-wait-s", str(arguments.queue_wait_s)]
        router = stack.enter_context(started(["-m", "router", *places, *wait])).listening()
        yield router["grpc"], [each["ops"] for each in (prefill, decode, router)]


async def undisturbed(target: Target, prompts: Prompts, slots: int, tokens: int) -> list[float]:
    """Gaps while the whole batch runs: from the last first token to the first end."""
    run = LoadRun(LoadPlan(concurrency=slots, requests=slots, timeout_s=TIMEOUT_S))
    await run.send_all(target, (Job(prompts.of(PROMPT_TOKENS), tokens) for _ in range(slots)))
    begin = max(outcome.times[1] for outcome in run.outcomes)
    end = min(outcome.times[-1] for outcome in run.outcomes)
    pairs = [pair for outcome in run.outcomes for pair in itertools.pairwise(outcome.times)]
    return [later - earlier for earlier, later in pairs if begin <= earlier and later <= end]


async def open_loop(
    target: Target, prompts: Prompts, rate: float, seconds: float, tokens: int, seed: str
) -> list[Outcome]:
    """The requests of Poisson arrivals for a time, but for the first that came; returns when all have ended."""
    # Lengths differ, or those that began together would end together, and the load would come in waves.
    outputs = lengths(f"uniform:{tokens // 2}:{3 * tokens // 2}")
    due = poisson(rate, random.Random(f"{seed}/arrivals"))
    run = LoadRun(LoadPlan(seconds=seconds, timeout_s=TIMEOUT_S))
    await run.send_all(target, random_jobs(prompts, seed, lengths(str(PROMPT_TOKENS)), outputs, due))
    return [outcome for outcome in run.outcomes if outcome.sent - run.began >= WARM_SHARE * seconds]


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """One run in numbers; `seconds` is the counted time."""
    endings = [outcome.ending for outcome in outcomes]
    return {
        "requests": len(outcomes),
        "goodput_per_s": round(sum(outcome.good(TTFT_SLO_S, ITL_SLO_S) for outcome in outcomes) / seconds, 2),
        "refused": endings.count(Ending.REFUSED),
        "failed": endings.count(Ending.FAILED),
        "itl_ms": in_ms([gap for outcome in outcomes for gap in outcome.gaps]),
        # The first gap is the handoff: what is left of the transfer, the wait for the next step, and that step.
        "itl_after_handoff_ms": in_ms([gap for outcome in outcomes for gap in outcome.gaps[1:]]),
        "ttft_ms": in_ms([outcome.ttft for outcome in outcomes if outcome.ttft is not None]),
        "refusal_ms": in_ms([each.ended - each.sent for each in outcomes if each.ending is Ending.REFUSED]),
    }


def in_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles."""
    return shares([1e3 * each for each in seconds], digits=2)


async def measure(arguments: argparse.Namespace, router: str, ops: Sequence[str]) -> dict[str, Any]:
    """All three runs on the fleet behind `router`."""
    slots, tokens, seconds = arguments.slots, arguments.tokens, arguments.seconds
    capacity = slots / (tokens * arguments.step_ms / 1e3)
    prompts = Prompts(str(arguments.seed), VOCABULARY)
    async with connect(Place(f"grpc://{router}")) as target:
        await undisturbed(target, prompts, slots, 16)
        alone = in_ms(await undisturbed(target, prompts, slots, 4 * tokens))
        runs = {}
        for factor in (1, 2):
            seed = f"{arguments.seed}/{factor}"
            outcomes = await open_loop(target, prompts, factor * capacity, seconds, tokens, seed)
            runs[f"{factor}x"] = summary(outcomes, (1 - WARM_SHARE) * seconds)
    one, two = runs["1x"], runs["2x"]
    return {
        "slots": slots,
        "step_ms": arguments.step_ms,
        "capacity_per_s": round(capacity, 2),
        "undisturbed": {"itl_ms": alone},
        **runs,
        "wasted_prefill_tokens": total(ops, "baton_wasted_prefill_tokens_total"),
        "p99_itl_2x_over_undisturbed": round(two["itl_ms"]["p99"] / alone["p99"], 3),
        "p99_itl_after_handoff_2x_over_undisturbed": round(two["itl_after_handoff_ms"]["p99"] / alone["p99"], 3),
        "goodput_2x_over_1x": round(two["goodput_per_s"] / one["goodput_per_s"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=30)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--queue-wait-s", type=float, default=1.0, help="of the router: longest expected wait")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with fleet(arguments) as (router, ops):
        save("overload", asyncio.run(measure(arguments, router, ops)))


if __name__ == "__main__":
    main()
