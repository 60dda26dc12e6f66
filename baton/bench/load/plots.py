"""Reports as pictures; the end of the file name gives the format (.png, .svg, .pdf).

Raises PlotError if a report has nothing to show. matplotlib is loaded when a picture is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENDINGS = (".png", ".svg", ".pdf")
Report = Mapping[str, Any]

_SIZE_INCHES = (8.0, 4.2)
_DPI = 150
_PANELS = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"))
_LOADS = (("rate", "requests per second"), ("concurrency", "concurrent requests"))


class PlotError(Exception):
    """The picture can't be drawn; the message says why."""


def latency_against_load(reports: Sequence[Report], file: Path) -> None:
    """TTFT and ITL against the load: median and 99th percentile, a colour for each target."""
    name, words = _load(reports)
    by_target: dict[str, list[Report]] = defaultdict(list)
    for each in sorted(reports, key=lambda each: float(each["workload"][name])):
        by_target[each["target"]].append(each)
    figure = _figure()
    for axes, (latency, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for number, (target, points) in enumerate(by_target.items()):
            for share, style in (("p50", "-o"), ("p99", "--s")):
                known = [each for each in points if each[latency][share] is not None]
                x = [each["workload"][name] for each in known]
                y = [each[latency][share] for each in known]
                axes.plot(x, y, style, color=f"C{number}", label=f"{target} {share}", markersize=4)
        axes.set(title=title, xlabel=words)
        _in_ms(axes)
    _save(figure, file)


def itl_over_time(reports: Sequence[Report], file: Path) -> None:
    """ITL during each run: median and 99th percentile of the gaps that ended in each hundredth of the run."""
    figure = _figure()
    axes = figure.subplots()
    for number, each in enumerate(reports):
        course = each["itl_over_time"]
        for share, style in (("p50", "-"), ("p99", ":")):
            label = f"{_named(each)} {share}"
            known = [(at, ms) for at, ms in zip(course["at_s"], course[f"{share}_ms"], strict=True) if ms is not None]
            axes.plot([at for at, _ in known], [ms for _, ms in known], style, color=f"C{number}", label=label)
    axes.set(title="ITL over time", xlabel="seconds")
    _in_ms(axes)
    _save(figure, file)


def _load(reports: Sequence[Report]) -> tuple[str, str]:
    """The name of the load that all reports have, and its unit."""
    for name, words in _LOADS:
        if reports and all(each["workload"].get(name) is not None for each in reports):
            return name, words
    raise PlotError("the reports have no load in common: all must have a rate, or all a concurrency")


def _named(report: Report) -> str:
    for name, words in _LOADS:
        if (value := report["workload"].get(name)) is not None:
            return f"{report['target']}, {value:g} {words}"
    return str(report["target"])


def _figure() -> Any:
    from matplotlib.figure import Figure

    # Not pyplot's, which would want a display.
    return Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")


def _in_ms(axes: Any) -> None:
    """A logarithmic axis with plain numbers, because latencies differ by large factors."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(ylabel="ms", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _save(figure: Any, file: Path) -> None:
    if file.suffix.lower() not in ENDINGS:
        raise PlotError(f"{str(file)!r} must end in {', '.join(ENDINGS)}")
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize="x-small")
    try:
        figure.savefig(file)
    except OSError as error:
        raise PlotError(f"{str(file)!r} can't be written: {error.strerror}") from None
