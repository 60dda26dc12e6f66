"""What the measurements share: a running fleet, and results that say where they come from."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.bench.provenance import provenance

RESULTS = Path(__file__).parent / "results"
RAN = provenance()
"""Read when the measurement is loaded: what is committed while it runs is not what it measures."""


@contextlib.contextmanager
def running_fleet(*flags: str) -> Iterator[dict[str, str]]:
    """`baton up` with `flags` on a free port; yields addresses: `grpc`, and `prefill-0`, `decode-0` ... (control)."""
    command = [sys.executable, "-m", "baton", "up", "--grpc", "127.0.0.1:0", *flags]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout else ""
            log.seek(0)
            said = log.read()
            if not line.startswith("ready "):
                raise RuntimeError(f"{' '.join(command)} did not get ready: {said[-2000:]}")
            workers = dict(re.findall(r"^(\S+) *\| .*listening control=(\S+)", said, re.MULTILINE))
            yield dict(re.findall(r"(\w+)=(\S+)", line)) | workers
        finally:
            process.terminate()
            process.wait(30)


def save(name: str, results: dict[str, Any], part: str = "") -> None:
    """Print the results and write them to bench/results/NAME.json with machine, commit and command.

    A `part` is written beside what the file holds already, under that key.
    """
    module = Path(sys.argv[0]).relative_to(Path(__file__).parents[1]).with_suffix("")
    command = " ".join(["python -m", ".".join(module.parts).removesuffix(".__main__"), *sys.argv[1:]])
    report = {**RAN, "command": command, "results": results}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    if part:
        report = (json.loads(path.read_text()) if path.exists() else {}) | {part: report}
    text = json.dumps(report, indent=2)
    path.write_text(text + "\n")
    print(text)
