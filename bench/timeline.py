"""Where each millisecond of one request goes: its latency account, KV arriving at decode, tokens at the client.

One long prompt through router, prefill and decode, each worker with half of the cores. While it runs the decode
worker's counter of received bytes is read again and again, which shows how much of the transfer hides behind prefill.
Several requests warm the fleet up and tell the spread; the one with the median time to first token is drawn.

    python -m bench.timeline --model DIR [--tokens 4096] [--outputs 16] [--rounds 5] [--plot docs/timeline.svg]

Needs the extra `bench` for the picture.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton import Client
from baton.request import Timings
from bench.common import save
from bench.services import Services, Worker, counters

POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Told:
    """One request: seconds since it was sent of each token, and of each reading of the bytes received."""

    timings: Timings
    tokens: list[float]
    received: list[tuple[float, float]]

    @property
    def exposed_ms(self) -> float:
        """From the end of prefill to the second token: the rest of the transfer, the wait for a slot, a step."""
        return (self.tokens[1] - self.tokens[0]) * 1e3


class Watched:
    """Reads a worker's received bytes from a thread until the block ends."""

    def __init__(self, worker: Worker, began: float) -> None:
        self._worker, self._began = worker, began
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.readings: list[tuple[float, float]] = []

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._end.wait(POLL_S):
            found = counters([self._worker.ops], "baton_transfer_bytes_total", "direction").get("received", 0.0)
            self.readings.append((time.perf_counter() - self._began, found))


def tell(client: Client, worker: Worker, prompt: list[int], outputs: int) -> Told:
    """Send one request and watch it."""
    began = time.perf_counter()
    arrivals: list[float] = []
    with Watched(worker, began) as watched:
        for delta in client.generate(prompt, max_tokens=outputs, temperature=0.0, ignore_eos=True, cache="off"):
            arrivals += [time.perf_counter() - began] * len(delta.tokens)
            timings = delta.timings_ms
    assert timings is not None, "an answer ends with its account"
    first = watched.readings[0][1]
    return Told(timings, arrivals, [(at, bytes_ - first) for at, bytes_ in watched.readings])


def draw(told: Told, prompt_tokens: int, path: Path) -> None:
    """The account as bars, the bytes as a curve, the tokens as marks, over one axis of milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    bars, curve = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    at = 0.0
    for name in ("line", "prefill", "transfer", "slot_wait", "decode"):
        width = getattr(told.timings, name)
        bars.barh(0, width, left=at, label=f"{name.replace('_', ' ')} {width:.1f} ms")
        at += width
    bars.plot([token * 1e3 for token in told.tokens], [0.55] * len(told.tokens), "k|", label="tokens at the client")
    bars.set(yticks=[], ylim=(-0.5, 0.8), title=f"One request of {prompt_tokens} tokens, {len(told.tokens)} out")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=6, fontsize="x-small", frameon=False)
    curve.plot([at * 1e3 for at, _ in told.received], [bytes_ / 1e6 for _, bytes_ in told.received])
    curve.axvline(told.tokens[0] * 1e3, color="grey", linestyle=":")
    curve.set(xlabel="milliseconds since the request was sent", ylabel="KV at decode, MB")
    figure.savefig(path)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 2) // 2)
    randomly = random.Random(1)
    with Services(model=options.model, threads=threads, kv_memory=1 << 30) as services:
        decode = services.worker("decode", slots=4)
        router = services.router([services.worker("prefill")], [decode])
        with Client(router) as client:
            prompts = [
                [randomly.randrange(1000, 100_000) for _ in range(options.tokens)] for _ in range(options.rounds + 1)
            ]
            told = [tell(client, decode, prompt, options.outputs) for prompt in prompts][1:]
    told.sort(key=lambda one: one.tokens[0])
    middle = told[len(told) // 2]
    if options.plot:
        draw(middle, options.tokens, options.plot)
    step = statistics.median(
        later - earlier for one in told for earlier, later in zip(one.tokens[1:], one.tokens[2:], strict=False)
    )
    exposed = statistics.median(one.exposed_ms for one in told)
    ttft = statistics.median(one.tokens[0] for one in told) * 1e3
    save(
        "timeline",
        {
            "prompt_tokens": options.tokens,
            "ttft_ms": ttft,
            "step_ms": step * 1e3,
            "second_token_after_first_ms": exposed,
            "exposed_transfer_ms": exposed - step * 1e3,
            "exposed_share_of_ttft": (exposed - step * 1e3) / ttft,
            "accounts_ms": [asdict(one.timings) for one in told],
            "mb_at_first_token": [
                round(max((bytes_ for at, bytes_ in one.received if at <= one.tokens[0]), default=0.0) / 1e6, 1)
                for one in told
            ],
            "mb_in_all": [round(one.received[-1][1] / 1e6, 1) for one in told],
        },
    )


if __name__ == "__main__":
    main()
