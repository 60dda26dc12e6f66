"""The outcomes of a run in numbers, and on the terminal: a progress bar, and then a table.

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

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.bench.load.outcome import Ending, Outcome
from baton.bench.load.runner import LoadRun
from baton.bench.stats import summary

LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "cap_wait_ms", "lateness_ms")
_MESSAGE = 300
_EXAMPLES = 32
_REFRESH_S = 0.25
_LATE_MS = 10.0
_BUSY = 0.8
_NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
_NAMES |= {"cap_wait_ms": "wait for the cap", "lateness_ms": "lateness"}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits of a good request, in ms: the time to its first token, and its mean time between tokens."""

    ttft_ms: float = 2000.0
    itl_ms: float = 50.0


def report(run: LoadRun, target: str, workload: Mapping[str, Any], objectives: Objectives) -> dict[str, Any]:
    """A run as JSON; `workload` describes what was sent, `objectives` the limits within which a request is good."""
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


@contextlib.asynccontextmanager
async def bar(run: LoadRun, console: Console) -> AsyncIterator[None]:
    """Show the progress of `run` until the block ends, if `console` is a terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Drawn from the loop: a thread of its own would take the interpreter at any moment.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        drawing = asyncio.create_task(_draw(run, progress, task))
        try:
            yield
        finally:
            drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawing


async def _draw(run: LoadRun, progress: Progress, task: Any) -> None:
    while True:
        progress.update(task, completed=run.progress, description=_words(run))
        progress.refresh()
        await asyncio.sleep(_REFRESH_S)


def _words(run: LoadRun) -> str:
    ended = run.endings
    words = [f"{len(run.outcomes)} sent", f"{run.open} open", f"{ended[Ending.FINISHED]} finished"]
    words += [f"{run.waiting} waiting"] if run.waiting else []
    words += [f"{ended[ending]} {ending}" for ending in (Ending.REFUSED, Ending.FAILED) if ended[ending]]
    return ", ".join(words)


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The numbers of one run."""
    requests = report["requests"]
    counts = ", ".join(f"{requests[name]} {name}" for name in ("sent", *Ending) if requests[name] or name == "sent")
    console.print(f"{report['target']}: {_load(report['workload'])}, {report['seconds']:.1f} s", style="bold")
    console.print(f"requests   {counts}; {report['requests_per_s']:.3g} finished/s")
    read = report["input_tokens_per_s"]
    console.print(
        f"tokens     {report['output_tokens_per_s']:.5g} out/s, {'-' if read is None else f'{read:.5g}'} in/s"
    )
    if (share := report["cached_share"]) is not None:
        console.print(f"cached     {report['cached_tokens']} prompt tokens, {share:.1%}")
    objectives = report["workload"]
    console.print(
        f"goodput    {report['goodput_per_s']:.3g} requests/s "
        f"(TTFT ≤ {objectives['slo_ttft_ms']:g} ms, TPOT ≤ {objectives['slo_itl_ms']:g} ms)"
    )
    console.print(_latencies(report))
    for kind, failures in report["failures"].items():
        console.print(f"{failures['count']} × {kind}: {failures['example']}", style="red", soft_wrap=True)


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Reasons why the numbers may be those of the generator and not of the server."""
    found = []
    if (late := report["lateness_ms"]["p99"] or 0.0) > _LATE_MS:
        words = "the generator did not keep the requested rate"
        found.append(f"1% of the requests were sent {late:.0f} ms late or more: {words}")
    if report["generator_cpu"] > _BUSY:
        found.append(f"the generator used {report['generator_cpu']:.0%} of a core: it may be what was measured")
    return found


def _load(workload: Mapping[str, Any]) -> str:
    if workload.get("concurrency") is not None:
        return f"{workload['concurrency']} at a time"
    most = workload.get("max_concurrency")
    return f"{workload['rate']:g} requests/s" + ("" if most is None else f", {most} at a time at most")


def _latencies(report: Mapping[str, Any]) -> Table:
    shares = list(report["ttft_ms"])
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms")
    for share in shares:
        table.add_column(share, justify="right")
    for name in LATENCIES:
        if name == "cap_wait_ms" and report["workload"].get("max_concurrency") is None:
            continue
        values = (report[name][share] for share in shares)
        table.add_row(_NAMES[name], *("-" if value is None else f"{value:.2f}" for value in values))
    return table
