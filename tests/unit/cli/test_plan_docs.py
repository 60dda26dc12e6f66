"""Commands of docs/planning.md, and the output that is printed below each."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.cli.main import main

PLANNING = Path(__file__).resolve().parents[3] / "docs" / "planning.md"
_BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ baton (plan [^|\n]*)(?:\| (.*))?\n", re.MULTILINE)


def transcripts() -> list[tuple[str, str, str]]:
    """Arguments of each command, the filter after its pipe, and the lines below it."""
    found = []
    for block in _BLOCK.findall(PLANNING.read_text(encoding="utf-8")):
        _, *parts = _COMMAND.split(block)
        found += [*zip(parts[::3], (each or "cat" for each in parts[1::3]), parts[2::3], strict=True)]
    return found


def test_every_command_of_the_page_is_found() -> None:
    assert len(transcripts()) == PLANNING.read_text(encoding="utf-8").count("$ baton plan") > 10


@pytest.mark.parametrize(("arguments", "keep", "printed"), transcripts())
def test_the_page_prints_what_the_command_prints(arguments: str, keep: str, printed: str) -> None:
    done = CliRunner().invoke(main, shlex.split(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    shown = subprocess.run(["sh", "-c", keep], input=done.output, capture_output=True, text=True, check=True).stdout
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in printed.splitlines()]
