"""Stop strings: where they end, what is held back, and that borders between pieces don't matter."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.output import StopMatcher, StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def matcher(stops: list[str], *, include_stop: bool = False) -> StopMatcher:
    return StopMatcher(StopStrings(stops), include_stop=include_stop)


def expected(text: str, stops: list[str], ignored: int = 0) -> tuple[str, str] | None:
    """Text before the match and the match, found by trying every end beyond the first `ignored` characters."""
    for end in range(ignored + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return None


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=8), include=st.booleans())
def test_equal_to_searching_the_whole_text(stops: list[str], pieces: list[str], include: bool) -> None:
    watched = matcher(stops, include_stop=include)
    shown = "".join(watched.push(piece) for piece in pieces) + watched.flush()
    found = expected("".join(pieces), stops)
    if found is None:
        assert (shown, watched.found) == ("".join(pieces), None)
    else:
        before, stop = found
        assert (shown, watched.found) == (before + (stop if include else ""), stop)


@given(stops=STOPS, pieces=st.lists(st.text("abc", max_size=4), max_size=8))
def test_holds_back_exactly_what_could_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    watched = matcher(stops)
    shown, seen = "", ""
    for piece in pieces:
        shown, seen = shown + watched.push(piece), seen + piece
        if watched.found is not None:
            return
        prefixes = {stop[:n] for stop, n in itertools.product(stops, range(1, 4)) if n < len(stop)}
        assert len(seen) - len(shown) == max((len(p) for p in prefixes if seen.endswith(p)), default=0)


def test_the_work_per_character_does_not_grow_with_the_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, advance = 0, StopStrings.advance

    def counted(self: StopStrings, node: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return advance(self, node, char)

    watched = matcher([" " * 60 + chr(ord("a") + n) for n in range(26)])
    monkeypatch.setattr(StopStrings, "advance", counted)
    for _ in range(50):
        watched.push(" " * 40)
    assert steps == 50 * 40
    assert len(watched.flush()) == 60
