"""What a worker's start takes, and its restart under `baton up`; writes bench/results/start.json.

    python -m bench.start MODEL... [--base DIR] [--runs 5]

Seconds, medians: of the parts of a decode worker's start, of the whole until it listens (and its CPU time until
then), and from its death until the router has it again. `--base` is another tree of Baton, such as an earlier commit;
the two are measured in turns. One start goes before all, so that weights are hashed and in the page cache, as they are
at a restart.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from bench.common import save

HERE = Path(__file__).parents[1]
LISTENERS = [f"--{name}=127.0.0.1:0" for name in ("control", "kv", "ops")]
PARTS = """
import sys, time
begin = time.perf_counter()
from baton.engine.process import prepare
prepare("", 1)
import torch
torch_there = time.perf_counter()
import decode_svc.app, baton.engine.factory
from baton.engine.config import EngineConfig
imported = time.perf_counter()
baton.engine.factory.build(EngineConfig(model=sys.argv[1], slots=32, threads=1))
print(torch_there - begin, imported - torch_there, time.perf_counter() - imported)
"""


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(prog="python -m bench.start")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="checkpoint directories")
    parser.add_argument("--base", type=Path, help="another tree, measured in turns with this one")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    trees = {"base": options.base.resolve(), "this": HERE} if options.base else {"this": HERE}
    results: dict[str, Any] = {}
    for given in options.models:
        model = str(Path(given).resolve())
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        listen(HERE, model)
        for _ in range(options.runs):
            for name, tree in trees.items():
                seen[name].append(parts(tree, model) | listen(tree, model) | restart(tree, model))
        results[Path(given).name] = {
            name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
            for name, runs in seen.items()
        }
    save("start", {"runs": options.runs, "models": results})


def parts(tree: Path, model: str) -> dict[str, float]:
    """Seconds of a start, by part."""
    command = [sys.executable, "-c", PARTS, model]
    text = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
    return dict(zip(("import_torch", "import_rest", "load"), map(float, text.split()), strict=True))


def listen(tree: Path, model: str) -> dict[str, float]:
    """Seconds from the command to the line that says where it listens, and CPU seconds until then."""
    command = [sys.executable, "-m", "decode_svc", f"--model={model}", "--redis=none", "--threads=1", *LISTENERS]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
        line = worker.stdout.readline() if worker.stdout else ""
        took = time.perf_counter() - began
        used = sum(psutil.Process(worker.pid).cpu_times()[:2])
        worker.terminate()
    if not line:
        raise RuntimeError(f"{' '.join(command)} did not listen")
    return {"listens": took, "listens_cpu": used}


def restart(tree: Path, model: str) -> dict[str, float]:
    """Seconds from the death of one decode worker of two until the router has joined its successor."""
    command = [sys.executable, "-m", "baton", "up", f"--model={model}", "--decode=2", "--redis=none", "--threads=1"]
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        [*command, "--grpc=127.0.0.1:0"],
        cwd=tree,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as up:
        joined, killed = 0, 0.0
        for line in up.stderr or ():
            joined += bool(re.match(r"router +\| .* joined", line))
            if joined == 3 and not killed:
                # Steady, as most workers are that die.
                time.sleep(6)
                killed = time.perf_counter()
                found = psutil.Process(up.pid).children(recursive=True)
                os.kill(next(each.pid for each in found if "--worker-id=decode-0" in each.cmdline()), signal.SIGKILL)
            if joined == 4:
                took = time.perf_counter() - killed
                up.terminate()
                return {"rejoins": took}
    raise RuntimeError(f"{' '.join(command)} ended")


if __name__ == "__main__":
    main()
