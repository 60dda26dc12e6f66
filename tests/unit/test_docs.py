"""The form of the Markdown files that people write."""

import ast
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


NOT_IN_CODE = {".venv", "BATON_*"}
MAPS = ("CONTRIBUTING.md", "docs/architecture.md")
FOLDERS = (ROOT / ".ci", *filter(Path.is_dir, ROOT.glob("[a-z]*")))


@cache
def tree() -> tuple[frozenset[str], frozenset[str]]:
    """Paths of files and folders, and all names that code defines or assigns, or that are a text."""
    files = [file for folder in FOLDERS for file in folder.rglob("*") if "__pycache__" not in file.parts]
    paths = {str(file.relative_to(ROOT)) for file in files} | {file.name for file in ROOT.iterdir()}
    code = "\n".join(file.read_text() for file in files if file.suffix in {".py", ".h", ".cpp", ".proto"})
    shapes = r"\b(?:def|class|struct|enum|rpc|message) (\w+)", r"^ *(\w+)\b[^=\n]*[:=]", r'"(\w+)"'
    return frozenset(paths), frozenset(name for shape in shapes for name in re.findall(shape, code, re.MULTILINE))


@cache
def modules() -> tuple[str, ...]:
    """All Python code but that of the tests."""
    return tuple(file.read_text() for folder in FOLDERS if folder.name != "tests" for file in folder.rglob("*.py"))


@cache
def members(owner: str) -> frozenset[str]:
    """Methods and attributes of the classes with this name and of their bases."""
    found = set[str]()
    trees = (ast.parse(module) for module in modules() if f"class {owner}" in module)
    for made in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(made, ast.ClassDef) or made.name != owner:
            continue
        for base in made.bases:
            found |= members(base.id) if isinstance(base, ast.Name) else set()
        for node in (*made.body, *(each for each in ast.walk(made) if isinstance(each, ast.Attribute))):
            match node:
                case (
                    ast.FunctionDef(name)
                    | ast.AsyncFunctionDef(name)
                    | ast.AnnAssign(target=ast.Name(name))
                    | ast.Assign(targets=[ast.Name(name)])
                    | ast.Attribute(ast.Name("self"), name, ast.Store())
                ):
                    found.add(name)
    return frozenset(found)


def exists(named: str) -> bool:
    """Paths may lack their first folders. A name is defined or assigned somewhere, or is a text, as of a variable.

    After the name of a class, it is a method or an attribute of that class.
    """
    paths, names = tree()
    if "/" in named or re.search(r"\.(py|cpp|h|md|proto|json|toml)$", named):
        end = re.escape(named.strip("/")).replace(r"\*", "[^/]*")
        return any(re.fullmatch(f"(.*/)?{end}", path) for path in paths)
    *owners, name = named.removesuffix("()").split(".")
    if owners and owners[-1][:1].isupper():
        return name in members(owners[-1])
    return names.issuperset((*owners, name)) or named in NOT_IN_CODE


@pytest.mark.parametrize(
    "named", ["PrefillScheduler._compute", "Sequence.next_positions", "Nothing.run", "router/nothing.py"]
)
def test_a_name_that_is_elsewhere_does_not_exist(named: str) -> None:
    assert not exists(named)


@pytest.mark.parametrize("page", MAPS)
def test_the_maps_name_what_exists(page: str) -> None:
    """Names and paths in backticks, and paths in blocks of code."""
    prose, *blocks = re.split(r"^```", (ROOT / page).read_text(), flags=re.MULTILINE)
    named = re.findall(r"[\w/]+(?:\.py|/)(?=[\s,:])", "".join(blocks[::2]))
    named += re.findall(r"`([\w./*-]*\w[./*]?|[\w.]+\(\))`", "".join([prose, *blocks[1::2]]))
    assert not (gone := sorted({each for each in named if not exists(each)})), f"{page} names {gone}"
