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
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from bench.children import Child, child
from bench.common import save
from bench.pairing import medians

STEADY_S, STOP_S = 6.0, 60.0
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
        results[Path(given).name] = {name: medians(runs, digits=2) for name, runs in seen.items()}
    save("start", {"runs": options.runs, "models": results})


def parts(tree: Path, model: str) -> dict[str, float]:
    """Seconds of a start, by part."""
    with child([sys.executable, "-c", PARTS, model], name="the start in parts", cwd=tree) as process:
        seconds = map(float, process.finish().split())
    return dict(zip(("import_torch", "import_rest", "load"), seconds, strict=True))


def listen(tree: Path, model: str) -> dict[str, float]:
    """Seconds from the command to the line that says where it listens, and CPU seconds until then."""
    command = [sys.executable, "-m", "decode_svc", f"--model={model}", "--redis=none", "--threads=1", *LISTENERS]
    began = time.perf_counter()
    with child(command, cwd=tree, grace_s=STOP_S) as worker:
        worker.listening()
        seconds = time.perf_counter() - began
        process = psutil.Process(worker.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return {"listens": seconds, "listens_cpu": sum(each.user + each.system for each in times)}


def restart(tree: Path, model: str) -> dict[str, float]:
    """Seconds from the death of one decode worker of two until the router has joined its successor."""
    command = [sys.executable, "-m", "baton", "up", f"--model={model}", "--decode=2", "--redis=none", "--threads=1"]
    command += ["--grpc=127.0.0.1:0"]
    with child(command, cwd=tree, environ={"PYTHONPATH": str(tree)}, grace_s=STOP_S, both=True) as up:
        until_joined(up, 3)
        # Steady, as most workers are that die.
        time.sleep(STEADY_S)
        killed = time.perf_counter()
        found = psutil.Process(up.pid).children(recursive=True)
        os.kill(next(each.pid for each in found if "--worker-id=decode-0" in each.cmdline()), signal.SIGKILL)
        until_joined(up, 1)
        return {"rejoins": time.perf_counter() - killed}


def until_joined(up: Child, workers: int) -> None:
    """Read what `baton up` says until so many workers have joined its router."""
    while workers:
        workers -= bool(re.match(r"router +\| .* joined", up.line()))


if __name__ == "__main__":
    main()
