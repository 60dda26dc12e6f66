"""Stop strings across token borders. Pure.

The text is read character by character by one Knuth–Morris–Pratt automaton for each stop string, so the result
does not depend on how the text was cut into pieces, and the work per character is constant. The match that ends
first wins; of two that end together, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopString:
    """A stop string; `borders[i]` is the length of the longest border of `text[:i + 1]`."""

    text: str
    borders: tuple[int, ...]

    @classmethod
    def build(cls, text: str) -> StopString:
        """Compute the table (Knuth, Morris, Pratt 1977)."""
        borders = [0]
        for char in text[1:]:
            length = borders[-1]
            while length and text[length] != char:
                length = borders[length - 1]
            borders.append(length + (text[length] == char))
        return cls(text, tuple(borders))

    def advance(self, matched: int, char: str) -> int:
        """Characters of the stop string matched after `char`, given those matched before it."""
        while matched and self.text[matched] != char:
            matched = self.borders[matched - 1]
        return matched + (self.text[matched] == char)


class StopMatcher:
    """Watches one text for stop strings, and holds back exactly the longest suffix that could begin one."""

    def __init__(self, stops: Sequence[StopString], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._matched = [0] * len(stops)
        self._held = ""
        self._first = frozenset(stop.text[0] for stop in stops)
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, *, counts: bool = True) -> str:
        """Add text and return what may be shown now; once `found` is set, nothing more comes.

        Without `counts`, matches that end within `piece` are ignored. One that only begins there is found when it ends.
        """
        if self.found is not None:
            return ""
        if not self._held and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            pairs = zip(self._stops, self._matched, strict=True)
            self._matched = [stop.advance(length, char) for stop, length in pairs]
            pairs = zip(self._stops, self._matched, strict=True)
            whole = [stop.text for stop, length in pairs if length == len(stop.text)]
            if whole and counts:
                self.found = max(whole, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.found)]
            if whole:
                # The end of the ignored match may begin the next one.
                pairs = zip(self._stops, self._matched, strict=True)
                self._matched = [stop.borders[-1] if length == len(stop.text) else length for stop, length in pairs]
        hold = max(self._matched)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        held, self._held = self._held, ""
        return held
