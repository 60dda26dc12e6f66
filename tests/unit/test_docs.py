"""The form of the Markdown files that people write."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ROOT / "docs/compose-transcript.md"
"""Output of programs, as they printed it."""

PLACES = ("*.md", "docs/**/*.md", "bench/README.md", "baton/bundled/README.md")
FILES = sorted({file for place in PLACES for file in ROOT.glob(place)} - {COPIED})
COLUMNS = 100


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines by number, without tables and code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            yield number, line


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_prose_is_wrapped(file: Path) -> None:
    """A line may be longer if it is one word, such as a link, or one span of code, behind the mark of a list."""
    words = re.compile(r"`[^`]+`\S*|\S+")
    long = [number for number, line in prose(file.read_text()) if len(line) > COLUMNS and len(words.findall(line)) > 2]
    assert not long, f"lines {long} have more than {COLUMNS} columns"
