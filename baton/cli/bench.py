"""`baton bench engine`: the speed of an engine, compared with the machine's bandwidth and arithmetic.

The measurement is in `baton.bench`, and is imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.cli.options import INTERRUPTED, Counts, ReportFile, extra_installed, output, size, table
from baton.cli.picture import Series, chart
from baton.errors import BatonError, ConfigError
from baton.native import KERNELS

_BAND = 0.15
"""Error of a prediction, as a part of the measured time, up to which it counts as right."""


class _BenchGroup(click.Group):
    """Commands that exit with the status of an interrupt if Ctrl-C comes before the first result."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure engines."""


@bench.command()
@click.argument("model")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Element type of weights and KV.",
)
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True, help="Kernels on a CPU.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0: torch decides.")
@click.option("--cpus", default="", help="Cores to use, such as 0-3,8; empty: all.")
@click.option(
    "--prefill", type=Counts(), default="128,256,512,1024,2048,4096,8192", show_default=True, help="Prompt lengths."
)
@click.option("--batch", "batches", type=Counts(), default="1,8,32", show_default=True, help="Batch sizes of decode.")
@click.option(
    "--context",
    "contexts",
    type=Counts(),
    default="128,1024",
    show_default=True,
    help="Context length of each sequence in a batch.",
)
@click.option("--steps", type=click.IntRange(min=1), default=16, show_default=True, help="Number of timed steps.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of runs of each kind.")
@click.option(
    "--chunk-size",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Largest number of tokens in a forward pass of prefill.",
)
@click.option("--json", "json_path", type=ReportFile(), help="Write the report to a file.")
@click.option("--plot", type=ReportFile(), help="Write a picture of predicted and measured steps, SVG.")
def engine(
    model: str,
    device: str,
    dtype: str,
    kernels: str,
    threads: int,
    cpus: str,
    json_path: Path | None,
    plot: Path | None,
    **plan: Any,
) -> None:
    """Measure prefill and decode of the checkpoint MODEL.

    The machine's memory bandwidth and arithmetic are measured with each run; MFU and MBU are shares of these, and the
    predictions of `baton plan roofline` follow from them. After Ctrl-C the report contains what is complete.
    """
    # Otherwise torch's profiler writes to standard error. It reads the variable when it is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    from baton.engine.process import pin_compute_threads, prepare

    try:
        # A worker's process does the same for its engine, before torch is imported.
        prepare(cpus, threads)
        with extra_installed("worker"):
            from baton.bench.engine import EnginePlan
            from baton.bench.engine_report import measure
            from baton.bench.interrupts import last_report
            from baton.engine.config import EngineConfig

            config = EngineConfig(model, device=device, dtype=dtype, kernels=kernels, threads=threads)
            if cpus:
                pin_compute_threads()
            with Console(stderr=True).status("") as status:
                report = last_report(measure(config, EnginePlan(**plan), status.update))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except BatonError as error:
        raise click.ClickException(str(error)) from None
    if report is None:
        raise KeyboardInterrupt
    # Shown even if it can't be written; otherwise a long measurement would be lost.
    _print(report)
    _write(report, json_path)
    if plot is not None and report["decode"]:
        _saved(plot, lambda file: file.write_text(_picture(report), encoding="utf-8"))
    if report["interrupted"]:
        click.echo("interrupted: the report contains what was complete by then", err=True)
        sys.exit(INTERRUPTED)


def _write(report: dict[str, Any], file: Path | None) -> None:
    from baton.bench.machine import write

    if file is not None:
        _saved(file, lambda path: write(path, report))


def _saved(file: Path, write: Callable[[Path], object]) -> None:
    try:
        write(file)
    except OSError as error:
        raise click.ClickException(f"{str(file)!r} can't be written: {error.strerror}") from None


def _picture(report: dict[str, Any]) -> str:
    """Predicted over measured times of a step, with rates at the rows of the run, and with those of 256 rows."""
    rows = report["decode"]
    labels = [f"{row['batch']} x {row['context']}" for row in rows]
    series = [
        Series(
            "operations/s with the rows of the step", [(row["step_ms"], row["predicted_ms"]) for row in rows], labels
        ),
        Series("operations/s with 256 rows", [(row["step_ms"], row["predicted_256_ms"]) for row in rows], filled=False),
    ]
    title = f"Decode steps of {Path(report['engine']['model']).name}, batch x context; lines at {_BAND:.0%}"
    return chart(title, "measured, ms", "predicted, ms", series, band=_BAND)


def _print(report: dict[str, Any]) -> None:
    console = output()
    prefill_columns = ("prompt", "tokens/s", "ms", "predicted ms", "MFU", "peak GFLOP/s")
    prefill = table(prefill_columns, prefill_columns)
    for row in report["prefill"]:
        prefill.add_row(
            str(row["tokens"]),
            f"{row['tokens_per_s']:.1f}",
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['predicted_s']:.1f}",
            f"{row['mfu']:.0%}",
            f"{row['peak_flops_per_s'] / 1e9:.0f}",
        )
    columns = ("batch", "context", "tokens/s", "step ms", "predicted ms", "MBU", "peak GB/s")
    decode = table(columns, columns)
    for row in report["decode"]:
        decode.add_row(
            str(row["batch"]),
            str(row["context"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['step_ms']:.2f}",
            f"{row['predicted_ms']:.2f}",
            f"{row['mbu']:.0%}",
            f"{row['peak_bytes_per_s'] / 1e9:.1f}",
        )
    for made in (prefill, decode):
        if made.row_count:
            console.print(made)
            console.print()
    console.print(_facts(report))


def _facts(report: dict[str, Any]) -> str:
    facts = []
    if (seconds := report["startup"]["first_token_s"]) is not None:
        facts.append(f"start to first token: {seconds:.1f} s")
    memory = report["memory"]
    if memory["peak_bytes"] is not None:
        facts.append(f"memory: {size(memory['steady_bytes'])} steady, {size(memory['peak_bytes'])} peak")
    if errors := [abs(row["predicted_over_measured"] - 1) for row in report["decode"]]:
        near = sum(error <= _BAND for error in errors)
        facts.append(f"steps predicted within {_BAND:.0%}: {near} of {len(errors)}")
    return "\n".join(facts)
