"""The form of the Markdown files that people write."""

import re
from collections.abc import Iterator
from functools import cache
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


MAPS = ("CONTRIBUTING.md", "docs/architecture.md")
FOLDERS = (ROOT / ".ci", *filter(Path.is_dir, ROOT.glob("[a-z]*")))


@cache
def tree() -> tuple[frozenset[str], str]:
    """Paths of files and folders, and all code."""
    files = [file for folder in FOLDERS for file in folder.rglob("*") if "__pycache__" not in file.parts]
    paths = {str(file.relative_to(ROOT)) for file in files} | {file.name for file in ROOT.iterdir()}
    code = [file.read_text() for file in files if file.suffix in {".py", ".h", ".cpp", ".proto"}]
    return frozenset(paths), "\n".join(code)


def exists(named: str) -> bool:
    """Paths may lack their first folders. A name is defined or assigned somewhere, or is a text, as of a variable."""
    paths, code = tree()
    if "/" in named or re.search(r"\.(py|cpp|h|md|proto|json|toml)$", named):
        end = re.escape(named.strip("/")).replace(r"\*", "[^/]*")
        return any(re.fullmatch(f"(.*/)?{end}", path) for path in paths)
    shapes = r'\b(?:def|class|struct|enum|rpc|message) {0}\b|^ *{0}\b[^=\n]*[:=]|"{0}"'
    parts = named.removesuffix("()").split(".")
    return all(re.search(shapes.format(part), code, re.MULTILINE) for part in parts)


@pytest.mark.parametrize("page", MAPS)
def test_the_maps_name_what_exists(page: str) -> None:
    """Names and paths in backticks, and paths in blocks of code."""
    prose, *blocks = re.split(r"^```", (ROOT / page).read_text(), flags=re.MULTILINE)
    named = re.findall(r"[\w/]+(?:\.py|/)(?=[\s,:])", "".join(blocks[::2]))
    named += re.findall(r"`([\w./*-]*\w[./*]?|[\w.]+\(\))`", "".join([prose, *blocks[1::2]]))
    assert not (gone := sorted({each for each in named if not exists(each)})), f"{page} names {gone}"
