"""Time between tokens of running streams beside long prompts, on a mixed worker with `--itl-target-ms`.

    python -m bench.beside CHECKPOINT [--up=--mixed=1] [--lengths 4096 65536] [--multiple 3] [--limit 600]

Four streams of 128 tokens are watched alone first; the median time between their tokens is that of a step alone. Then
the fleet starts again with `--itl-target-ms` set to `--multiple` times this (0: not set), and the streams are watched
beside prompts of each length: one of 16,384 tokens or more, or as many shorter ones as have 16,384 tokens together. A
prompt that takes longer than `--limit` seconds is given up; its share is in `seconds`. If the checkpoint has fewer
positions than a prompt needs, a copy with more is used. `over_target` is p99 divided by the target; the bar is 1.3.
Writes bench/results/beside.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.bench.machine import stolen_s
from bench.common import save
from bench.load import HTTP, MODEL
from bench.peers.interference import InterferenceLoad, figures, watched
from bench.up import up

BAR, STREAMS, CONTEXT, TOGETHER = 1.3, 4, 128, 16384
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "kv_memory": "2GiB", "http": HTTP, "served_model_name": MODEL}
_ROOM = 8192
_ALONE = InterferenceLoad(streams=STREAMS, context=CONTEXT, alone_s=20.0, prompts=1, tokens=CONTEXT)


@contextlib.contextmanager
def with_positions(checkpoint: Path, positions: int) -> Iterator[Path]:
    """The checkpoint, or a copy of it that has so many positions; its files are links."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["max_position_embeddings"] >= positions:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in checkpoint.iterdir():
            if file.name != "config.json":
                (Path(folder) / file.name).symlink_to(file.resolve())
        config["max_position_embeddings"] = positions
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def watch(arguments: Sequence[str], model: Path, longest: int, loads: Sequence[InterferenceLoad]) -> list[Any]:
    """Figures of each load, on one fleet; see `bench.peers.interference.figures`."""
    found = []
    with up(arguments, model=model, max_model_len=longest, **SETTINGS) as router:
        for load in loads:
            stolen, began = stolen_s(), time.monotonic()
            gaps = asyncio.run(watched(f"http://{router.http}", load))
            about = {"seconds": round(time.monotonic() - began, 1), "stolen_s": round(stolen_s() - stolen, 2)}
            found.append({**figures(gaps), **about})
            print(f"{load.tokens}: {found[-1]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--up", default="--mixed=1", help="arguments of `baton up`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--multiple", type=float, default=3.0)
    parser.add_argument("--limit", type=float, default=600.0)
    given = parser.parse_args()
    arguments, longest = shlex.split(given.up), max(given.lengths) + _ROOM
    with with_positions(given.checkpoint, longest) as model:
        (alone,) = watch(arguments, model, longest, [_ALONE])
        target = given.multiple * alone["alone"]["p50_ms"]
        if target:
            arguments.append(f"--itl-target-ms={target:.1f}")
        loads = [
            InterferenceLoad(STREAMS, CONTEXT, 5.0, max(1, TOGETHER // tokens), tokens, limit_s=given.limit)
            for tokens in given.lengths
        ]
        found = watch(arguments, model, longest, loads)
    results = {"step_alone_ms": alone["alone"]["p50_ms"], "target_ms": target or None, "bar": BAR, "lengths": {}}
    for tokens, each in zip(given.lengths, found, strict=True):
        over = each["loaded"]["p99_ms"] / target if target else None
        results["lengths"][str(tokens)] = {**each, "over_target": over, "met": None if over is None else over <= BAR}
    save("beside", results)


if __name__ == "__main__":
    main()
