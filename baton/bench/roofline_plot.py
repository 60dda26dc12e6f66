"""The roofline picture (Williams et al. 2009, doi:10.1145/1498765.1498785): rates under the measured roof."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of what `baton.bench.engine_report.measure` gave; the suffix of `path` names the format."""
    matplotlib.use("Agg")
    peak = statistics.median(row["peak_flops_per_s"] for row in report["prefill"])
    bandwidth = statistics.median(row["peak_bytes_per_s"] for row in report["decode"])
    figure, axes = plt.subplots(figsize=(8, 5))
    reaches = []
    for kind, marker in (("prefill", "s"), ("decode", "o")):
        for row in report[kind]:
            seconds = row["seconds"] if kind == "prefill" else 1e-3 * row["step_ms"]
            intensity, rate = row["flops"] / row["bytes"], row["flops"] / seconds
            name = str(row["tokens"]) if kind == "prefill" else f"{row['batch']}×{row['context']}"
            axes.plot(intensity, rate / 1e9, marker, color="C0" if kind == "prefill" else "C1", label=kind)
            axes.annotate(name, (intensity, rate / 1e9), xytext=(4, -10), textcoords="offset points", fontsize=7)
            reaches.append(intensity)
    knee = peak / bandwidth
    line = [min(*reaches, knee) / 2, knee, max(*reaches, knee) * 2]
    axes.plot(line, [min(peak, bandwidth * each) / 1e9 for each in line], color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    about = report["engine"]
    axes.set_title(
        f"{Path(about['model']).name}, {about['dtype']} on {about['device']}: "
        f"{bandwidth / 1e9:.0f} GB/s, {peak / 1e9:.0f} GFLOP/s",
        fontsize=10,
    )
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend([*once.values()], ["prefill, by tokens", "decode, batch × context"])
    axes.grid(True, which="both", alpha=0.2)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
