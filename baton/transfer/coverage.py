"""The tokens of each layer that a stream has carried; used by exporter and consumer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from baton.errors import CorruptFrame
from baton.transfer.closing import TokenRun


@dataclass(frozen=True, slots=True)
class Box:
    """A box in the space of (token, layer, head). A box without tokens asks for the commit only."""

    tokens: range
    layers: range
    heads: range


class Coverage:
    """The part of a box that was carried. No token of a layer may be carried twice."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._runs: dict[int, list[list[int]]] = {layer: [] for layer in box.layers}

    def add(self, layer: int, tokens: range, heads: range) -> None:
        """Add one frame; raises CorruptFrame if it lies outside the box, or if some of it was carried before."""
        box = self._box
        if layer not in box.layers or heads != box.heads or not _within(tokens, box.tokens):
            raise CorruptFrame(
                f"a frame of layer {layer}, tokens {_span(tokens)}, heads {_span(heads)} lies outside of "
                f"layers {_span(box.layers)}, tokens {_span(box.tokens)}, heads {_span(box.heads)}"
            )
        runs = self._runs[layer]
        at = bisect_right(runs, [tokens.start, tokens.stop])
        before = runs[at - 1] if at else None
        after = runs[at] if at < len(runs) else None
        if (before and before[1] > tokens.start) or (after and after[0] < tokens.stop):
            raise CorruptFrame(f"tokens {_span(tokens)} of layer {layer} were sent twice")
        joins_before = before is not None and before[1] == tokens.start
        joins_after = after is not None and after[0] == tokens.stop
        start = before[0] if before and joins_before else tokens.start
        stop = after[1] if after and joins_after else tokens.stop
        runs[at - joins_before : at + joins_after] = [[start, stop]]

    def runs(self) -> tuple[TokenRun, ...]:
        """The longest runs of tokens carried, by layer and token."""
        return tuple((layer, start, stop) for layer, runs in self._runs.items() for start, stop in runs)

    def missing(self) -> list[Box]:
        """The gaps: one box for each part of a layer that was not carried."""
        gaps = []
        for layer, runs in self._runs.items():
            at = self._box.tokens.start
            for start, stop in [*runs, [self._box.tokens.stop, self._box.tokens.stop]]:
                if at < start:
                    gaps.append(Box(range(at, start), range(layer, layer + 1), self._box.heads))
                at = stop
        return gaps


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start < inner.stop <= outer.stop


def _span(span: range) -> str:
    return f"[{span.start}, {span.stop})"
