"""A fleet of this version compared with a fleet of another version of Baton, with the same requests in turns.

    python -m bench.versions TREE NAME... [--model DIR] [--pairs 24]

TREE is a checkout with an installation in `.venv`. The names are those of bench/version_requests.py. Both fleets run
(`baton up`), and one of them has work at a time. The speed of this version divided by that of the other is published
as the median over pairs, with the interval that contains the median of the distribution with a probability of 95%:
order statistics of the pairs (sign test). A pair during which the host took more than 2% of the CPU time is measured
again. Writes bench/results/versions.json.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from baton.bench.machine import stolen_s
from bench.children import Child, child
from bench.common import save

HERE = Path(__file__).parents[1]
WARM_TURNS = 3
STOLEN = 0.02


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95% interval of the median of the distribution that the ratios are drawn from."""
    ordered, count = sorted(ratios), len(ratios)
    outside, below = 0, 0.0
    while below + math.comb(count, outside) / 2**count <= 0.025:
        below += math.comb(count, outside) / 2**count
        outside += 1
    return ordered[outside - 1], ordered[count - outside]


def fleet(stack: ExitStack, tree: Path, model: str) -> Child:
    """The client of a running fleet of `tree`."""
    port = 50100 + 10 * os.getpid() % 1000 + (tree == HERE)
    baton = [str(tree / ".venv/bin/baton"), "up", f"--model={model}", f"--grpc=127.0.0.1:{port}", "--kv-memory=2GiB"]
    up = stack.enter_context(child([*baton, "--redis=none", "--log-level=warning"], grace_s=30.0, unread=True))
    deadline = time.monotonic() + 120
    while f"127.0.0.1:{port}" not in up.output_tail() and time.monotonic() < deadline:
        time.sleep(0.2)
    script = str(HERE / "bench/version_requests.py")
    return stack.enter_context(child([str(tree / ".venv/bin/python"), script, f"127.0.0.1:{port}"]))


def compare(ours: Child, theirs: Child, name: str, pairs: int) -> dict[str, Any]:
    """Ratios of speed by pair, their median and interval, and the median seconds of both."""
    found: list[tuple[float, float]] = []
    turn = disturbed = 0
    while len(found) < pairs:
        stolen, began = stolen_s(), time.monotonic()
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        took = {id(each): each.ask(name, turn=turn)["s"] for each in order}
        share = (stolen_s() - stolen) / (time.monotonic() - began) / (os.cpu_count() or 1)
        if turn >= WARM_TURNS:
            if share > STOLEN and disturbed < pairs:
                disturbed += 1
            else:
                found.append((took[id(ours)], took[id(theirs)]))
        turn += 1
    ratios = [other / mine for mine, other in found]
    low, high = interval(ratios)
    return {
        "speed_ratio": round(statistics.median(ratios), 3),
        "interval": [round(low, 3), round(high, 3)],
        "pairs": len(ratios),
        "disturbed": disturbed,
        "s": round(statistics.median(mine for mine, _ in found), 4),
        "other_s": round(statistics.median(other for _, other in found), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=lambda text: Path(text).resolve())
    parser.add_argument("names", nargs="+")
    parser.add_argument("--model", default="")
    parser.add_argument("--pairs", type=int, default=24)
    given = parser.parse_args()
    with ExitStack() as stack:
        ours, theirs = (fleet(stack, tree, given.model) for tree in (HERE, given.tree))
        for name in given.names:
            result = compare(ours, theirs, name, given.pairs)
            print(name, result, file=sys.stderr, flush=True)
            save("versions", result, part=name)


if __name__ == "__main__":
    main()
