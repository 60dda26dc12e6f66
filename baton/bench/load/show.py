"""A run on the terminal: a progress bar, and then a table of the results."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.bench.load.outcome import Ending
from baton.bench.load.report import LATENCIES
from baton.bench.load.runner import LoadRun

_REFRESH_S = 0.25
_LATE_MS = 10.0
_BUSY = 0.8
_NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
_NAMES |= {"cap_wait_ms": "wait for the cap", "lateness_ms": "lateness"}


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
        found.append(f"1% of the requests were sent {late:.0f} ms late or more: the arrivals were not those asked for")
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
