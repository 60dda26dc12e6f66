"""The outcomes of a run in numbers.

    ttft_ms       from sending a request to its first event with tokens
    itl_ms        between successive events of a request; an event counts once, with one or more tokens, like `itl`
                  of `vllm bench serve`; all requests together
    tpot_ms       a request's time after its first event over the tokens that came after it: its mean ITL per token
    e2e_ms        from sending to the last event with tokens
    cap_wait_ms   from when a request came to the cap until it was let through, None without a cap
    lateness_ms   from when a request was due until it was sent, without that wait: the delay of the generator
    seconds       from the start of the first request to the end of the last; rates are over this time
    goodput       requests per second that finished with TTFT and TPOT within their objectives

    cached_share  prompt tokens that a cache had, over all prompt tokens of the requests that finished

No latency includes the wait for the cap or the lateness. TTFT, ITL and TPOT are those of all requests that had tokens,
finished or not; E2E is that of finished ones. The prompt tokens of texts are those that the server has counted; None if
it counts none.
Percentiles are nearest ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.load.outcome import Ending, Outcome
from baton.bench.load.runner import LoadRun
from baton.bench.stats import summary

LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "cap_wait_ms", "lateness_ms")
_MESSAGE = 300
_EXAMPLES = 32


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits of a good request, in ms: the time to its first token, and its mean time between tokens."""

    ttft_ms: float = 2000.0
    itl_ms: float = 50.0


def report(run: LoadRun, target: str, workload: Mapping[str, Any], objectives: Objectives) -> dict[str, Any]:
    """A run as JSON; `workload` describes what was sent."""
    outcomes = run.outcomes
    seconds = max(run.ended - run.began, 1e-9)
    finished = [each for each in outcomes if each.ending is Ending.FINISHED]
    input_tokens = _read([each.input_tokens for each in outcomes if each.times])
    good = sum(each.good(objectives.ttft_ms / 1e3, objectives.itl_ms / 1e3) for each in outcomes)
    return {
        "target": target,
        "workload": {**workload, "slo_ttft_ms": objectives.ttft_ms, "slo_itl_ms": objectives.itl_ms},
        "seconds": round(seconds, 3),
        "interrupted": run.interrupted,
        "requests": {"sent": len(outcomes), **{ending: run.endings[ending] for ending in Ending}},
        "output_tokens": sum(each.tokens for each in outcomes),
        "input_tokens": input_tokens,
        "output_tokens_per_s": round(sum(each.tokens for each in outcomes) / seconds, 3),
        "input_tokens_per_s": None if input_tokens is None else round(input_tokens / seconds, 3),
        **_cached(finished),
        "requests_per_s": round(len(finished) / seconds, 4),
        "goodput_per_s": round(good / seconds, 4),
        "ttft_ms": summary(each.ttft for each in outcomes if each.ttft is not None),
        "itl_ms": summary(gap for each in outcomes for gap in each.gaps),
        "tpot_ms": summary(each.tpot for each in outcomes if each.tpot is not None),
        "e2e_ms": summary(each.times[-1] - each.sent for each in finished),
        "cap_wait_ms": summary(each.capped for each in outcomes if run.plan.max_concurrency is not None),
        "lateness_ms": summary(each.lateness for each in outcomes),
        "generator_cpu": round(run.cpu_s / seconds, 3),
        "failures": _failures(outcomes),
    }


def _read(prompts: Sequence[int | None]) -> int | None:
    """The sum of the known values; None if there are values and none is known."""
    known = [each for each in prompts if each is not None]
    return sum(known) if known or not prompts else None


def _cached(finished: Sequence[Outcome]) -> dict[str, Any]:
    """Number and share of prompt tokens that came from a cache; None if the server does not report it.

    vLLM reports hits only. So after the first report of a server, a request without one counts as 0.
    """
    told = any(each.cached_tokens is not None for each in finished)
    asked = sum(each.input_tokens or 0 for each in finished)
    cached = sum(each.cached_tokens or 0 for each in finished) if told else None
    return {"cached_tokens": cached, "cached_share": None if cached is None or not asked else round(cached / asked, 4)}


def _failures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Failures by kind, the most frequent first: their number, and the message of one of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in outcomes:
        if each.kind:
            found[each.kind].append(each.message)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:_EXAMPLES]
    return {kind: {"count": len(said), "example": said[0][:_MESSAGE]} for kind, said in ordered}
