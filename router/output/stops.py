"""Stop strings across token borders. Pure.

The text is read character by character by one automaton for all stop strings of a request (Aho and Corasick, 1975), so
the result does not depend on how the text was cut into pieces, and the work per character depends neither on the number
of stop strings nor on their length. The match that ends first wins; of two that end together, the longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The automaton of some stop strings; choices of a request share it.

    A node stands for a prefix of a stop string: the longest one that the text read so far ends with. Node 0 is empty.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        """By node: the node of the next shorter prefix that it ends with."""
        self.match = [0]
        """By node: characters of the longest stop string that it ends with; 0 if there is none."""
        self.hold = [0]
        """By node: characters at its end that a stop string could begin with."""
        for stop in stops:
            self._add(stop)
        self._link()
        self._first = frozenset(self._next[0])

    def misses(self, text: str) -> bool:
        """Whether no stop string begins anywhere in the text."""
        return self._first.isdisjoint(text)

    def advance(self, node: int, char: str) -> int:
        """The node after one more character."""
        while (found := self._next[node].get(char)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return found

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self.match.append(0)
            node = self._next[node][char]
        self.match[node] = len(stop)

    def _link(self) -> None:
        """Set what follows from shorter prefixes, which come first."""
        depth = [0] * len(self._next)
        self._shorter, self.hold = [0] * len(self._next), [0] * len(self._next)
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for char, longer in self._next[node].items():
                depth[longer] = depth[node] + 1
                shorter = self.advance(self._shorter[node], char) if node else 0
                self._shorter[longer] = shorter
                self.match[longer] = self.match[longer] or self.match[shorter]
                self.hold[longer] = depth[longer] if self._next[longer] else self.hold[shorter]
                waiting.append(longer)


class StopMatcher:
    """Watches one text for stop strings, and holds back exactly the longest suffix that could begin one."""

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = 0
        self._pending = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, *, counts: bool = True) -> str:
        """Add text and return what may be shown now; once `found` is set, nothing more comes.

        Without `counts`, matches that end within `piece` are ignored. One that only begins there is found when it ends.
        """
        if self.found is not None:
            return ""
        if not self._pending and self._stops.misses(piece):
            self._node = 0
            return piece
        text = self._pending + piece
        for end, char in enumerate(piece, start=len(self._pending) + 1):
            self._node = self._stops.advance(self._node, char)
            if counts and (length := self._stops.match[self._node]):
                self.found = text[end - length : end]
                self._pending = ""
                return text[: end if self._include_stop else end - length]
        hold = self._stops.hold[self._node]
        self._pending = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        text, self._pending = self._pending, ""
        return text
