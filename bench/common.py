"""The folder of results, and the description of a run in each result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from baton.bench.machine import Provenance, write

RESULTS = Path(__file__).parent / "results"
RAN = Provenance()


def save(name: str, results: dict[str, Any], part: str = "") -> None:
    """Print the results and write them to bench/results/NAME.json with machine, commit, stolen time and command.

    A `part` is written beside what the file holds already, under that key.
    """
    module = Path(sys.argv[0]).relative_to(Path(__file__).parents[1]).with_suffix("")
    command = " ".join(["python -m", ".".join(module.parts).removesuffix(".__main__"), *sys.argv[1:]])
    report = {**RAN.report(), "command": command, "results": results}
    path = RESULTS / f"{name}.json"
    if part:
        report = (json.loads(path.read_text()) if path.exists() else {}) | {part: report}
    write(path, report)
    print(json.dumps(report, indent=2))
