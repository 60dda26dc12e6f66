"""Results of measurements: machine and commit that they belong to, and their file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from baton.bench.machine import machine, stolen_s


class Provenance:
    """The machine and the commit at the time when this object is made, which is before the measurement.

    Commits that are made during a measurement are not what it measures.
    """

    def __init__(self) -> None:
        self._about = {"machine": machine(), "commit": commit()}
        self._stolen_s = stolen_s()

    def report(self) -> dict[str, Any]:
        """`machine`, `commit` (None outside a git checkout), and `stolen_s`, which the host has taken since then."""
        return {**self._about, "stolen_s": round(stolen_s() - self._stolen_s, 2)}


def commit() -> str | None:
    """The commit of the tree, with "+changes" when it has uncommitted ones."""
    here = Path(__file__).parent
    try:
        name = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(here, "status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+changes" if changed else "")


def _git(here: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=here, text=True, stderr=subprocess.DEVNULL).strip()


def write(path: Path, report: Any) -> None:
    """Write a report as JSON. Raises OSError."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
