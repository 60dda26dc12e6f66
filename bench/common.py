"""What the measurements share: a running fleet, and results that say where they come from."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


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


def machine() -> dict[str, Any]:
    """What ran it: processor, cores, memory in GiB, Python and the versions that matter."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "grpcio", "transformers")},
    }


def commit() -> str:
    """The commit of the tree, with "+changes" when it has uncommitted ones."""
    here = Path(__file__).parent
    name = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=here, text=True).strip()
    changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=here, text=True).strip()
    return name + ("+changes" if changed else "")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def save(name: str, results: dict[str, Any], part: str = "") -> None:
    """Print the results and write them to bench/results/NAME.json with machine, commit and command.

    A `part` is written beside what the file holds already, under that key.
    """
    command = " ".join(["python -m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    report = {"machine": machine(), "commit": commit(), "command": command, "results": results}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    if part:
        report = (json.loads(path.read_text()) if path.exists() else {}) | {part: report}
    text = json.dumps(report, indent=2)
    path.write_text(text + "\n")
    print(text)
