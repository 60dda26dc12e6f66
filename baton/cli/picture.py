"""Pictures of points over two logarithmic axes, as SVG without dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 700, 50, 405
_COLOURS = ("#1f5fa8", "#c2571a", "#3c8d40", "#7a4a9e")
_GREY, _INK = "#d8d8d8", "#333333"


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y), both above 0, each with a label or ""; joined by a line if `line`, hollow if not `filled`."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    line: bool = False
    filled: bool = True


class _Axis:
    """A logarithmic axis from the least to the largest value, with some room, on pixels."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        room = max(1.12, (max(values) / min(values)) ** 0.06)
        self._low, self._high = math.log(min(values) / room), math.log(max(values) * room)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> Iterator[float]:
        for power in range(math.floor(self._low / math.log(10)), math.ceil(self._high / math.log(10)) + 1):
            for digit in (1, 2, 5):
                if self._low <= math.log(tick := digit * 10.0**power) <= self._high:
                    yield tick


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series], band: float | None = None) -> str:
    """An SVG picture.

    With `band`, both axes have one scale; the line x = y is drawn, and those where y is larger or smaller by this part.
    Raises ValueError without points.
    """
    points = [point for each in series for point in each.points]
    if not points:
        raise ValueError("there are no points to draw")
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    if band is not None:
        xs = ys = xs + ys
    x, y = _Axis(xs, _LEFT, _RIGHT), _Axis(ys, _BOTTOM, _TOP)
    parts = [*_frame(title, x_label, y_label, x, y)]
    if band is not None:
        parts += _diagonals(x, y, min(xs), max(xs), band)
    for index, each in enumerate(series):
        parts += _series(each, _COLOURS[index % len(_COLOURS)], index, x, y)
    return "\n".join(parts) + "\n</svg>\n"


def _frame(title: str, x_label: str, y_label: str, x: _Axis, y: _Axis) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">'
    )
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    yield _text(_LEFT, 20, title, 'font-size="14"')
    for tick in x.ticks():
        yield _line(x.at(tick), _TOP, x.at(tick), _BOTTOM, _GREY)
        yield _text(x.at(tick), _BOTTOM + 18, f"{tick:,.6g}", 'text-anchor="middle"')
    for tick in y.ticks():
        yield _line(_LEFT, y.at(tick), _RIGHT, y.at(tick), _GREY)
        yield _text(_LEFT - 6, y.at(tick) + 4, f"{tick:,.6g}", 'text-anchor="end"')
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 40, x_label, 'text-anchor="middle"')
    middle = (_TOP + _BOTTOM) / 2
    yield _text(16, middle, y_label, f'text-anchor="middle" transform="rotate(-90 16 {middle})"')


def _diagonals(x: _Axis, y: _Axis, low: float, high: float, band: float) -> Iterator[str]:
    for factor, dash in ((1, ""), (1 + band, "4 4"), (1 - band, "4 4")):
        first, last = max(low, low / factor), min(high, high / factor)
        yield _line(x.at(first), y.at(first * factor), x.at(last), y.at(last * factor), "#888888", dash)


def _series(series: Series, colour: str, index: int, x: _Axis, y: _Axis) -> Iterator[str]:
    places = [(x.at(one), y.at(other)) for one, other in series.points]
    if series.line:
        joined = " ".join(f"{one:.1f},{other:.1f}" for one, other in places)
        yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    fill = colour if series.filled else "white"
    for one, other in places:
        yield f'<circle cx="{one:.1f}" cy="{other:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    for (one, other), label in zip(places, series.labels, strict=False):
        yield _text(one, other - 9, label, f'font-size="10" text-anchor="middle" fill="{colour}"')
    left, top = _LEFT + 10, _TOP + 14 + 18 * index
    yield f'<circle cx="{left}" cy="{top - 4}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    yield _text(left + 10, top, series.name, "")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
