"""Draws docs/long-prompts.svg from bench/results/long.json: memory and time of a long prompt's prefill.

python -m bench.long_plot
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.common import RESULTS

PICTURE = Path(__file__).parents[1] / "docs" / "long-prompts.svg"
NAMES = {
    "whole": "whole prompt",
    "chunked_mlp": "chunked MLP only",
    "chunked_layer": "chunked within each layer",
    "streaming": "streaming",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of the strategies in what `bench.long` saved; the suffix of `path` names the format."""
    matplotlib.use("Agg")
    found = [part["results"] for name, part in report.items() if name.startswith("strategies-")]
    rows = {each["length"]: each["strategies"] for each in found}
    lengths = sorted(rows)
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(9, 4))
    for axes, figure_name, label in (
        (memory, "peak_mib", "peak beyond weights and KV, MiB"),
        (seconds, "cpu_seconds", "CPU time of all threads, s"),
    ):
        for name, words in NAMES.items():
            axes.plot(lengths, [rows[length][name][figure_name] for length in lengths], marker="o", label=words)
        _scale(axes, lengths, label)
    memory.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _scale(axes: Axes, lengths: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length >> 10}k" for length in lengths])
    axes.set(xlabel="tokens of the prompt", ylabel=label)
    axes.grid(True, alpha=0.2)


def main() -> None:
    draw(json.loads((RESULTS / "long.json").read_text()), PICTURE)


if __name__ == "__main__":
    main()
