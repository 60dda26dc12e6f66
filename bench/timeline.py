"""Where each millisecond of one request goes: its latency account, KV arriving at decode, tokens at the client.

One long prompt through router, prefill and decode, each worker with half of the cores, several times after one that
warms the fleet up. All durations are of these requests: from their own latency accounts, and from when their tokens
came. So is the exposed transfer, from the end of prefill to decode's first step: what the account calls transfer and
slot wait.

One more request is drawn. While it runs, the decode worker's counter of received bytes is read every `--poll-ms`
milliseconds, which shows how much of the transfer hides behind prefill, to that resolution, and costs the worker some
time. No duration comes from it.

    python -m bench.timeline --model DIR [--tokens 4096] [--outputs 16] [--rounds 5] [--poll-ms 10] [--plot FILE]

Needs the extra `bench` for the picture.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton import Client
from baton.request import Timings
from bench.common import save
from bench.services import Services, Worker, counters

POLL_MS = 10.0


@dataclass(frozen=True, slots=True)
class Told:
    """One request: its account, and seconds since it was sent of each token."""

    timings: Timings
    tokens: list[float]

    @property
    def exposed_ms(self) -> float:
        """From the end of prefill to decode's first step: the rest of the transfer, and the wait for a slot."""
        return self.timings.transfer + self.timings.slot_wait

    @property
    def second_ms(self) -> float:
        """From the first token to the second, as the client saw it."""
        return (self.tokens[1] - self.tokens[0]) * 1e3


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was watched: seconds since it was sent of each reading, and the bytes that had come by then."""

    told: Told
    received: list[tuple[float, float]]

    def summary(self, poll_ms: float) -> dict[str, Any]:
        """How often was looked, and how much had come when the first token did."""
        times = [at for at, _ in self.received]
        first = self.told.tokens[0]
        return {
            "poll_interval_ms": poll_ms,
            "median_interval_ms": 1e3 * statistics.median(later - at for at, later in itertools.pairwise(times)),
            "mb_at_first_token": max((bytes_ for at, bytes_ in self.received if at <= first), default=0.0) / 1e6,
            "mb_in_all": self.received[-1][1] / 1e6,
            "account_ms": asdict(self.told.timings),
        }


class Watched:
    """Reads a worker's received bytes every `poll_ms` milliseconds, from a thread, until the block ends."""

    def __init__(self, worker: Worker, began: float, poll_ms: float) -> None:
        self._worker, self._began, self._poll_s = worker, began, poll_ms / 1e3
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.readings: list[tuple[float, float]] = []

    def __enter__(self) -> Watched:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._end.wait(self._poll_s):
            self._look()
        self._look()

    def _look(self) -> None:
        found = counters([self._worker.ops], "baton_transfer_bytes_total", "direction").get("received", 0.0)
        self.readings.append((time.perf_counter() - self._began, found))


def tell(client: Client, prompt: list[int], outputs: int) -> Told:
    """Send one request."""
    began = time.perf_counter()
    arrivals: list[float] = []
    for delta in client.generate(prompt, max_tokens=outputs, temperature=0.0, ignore_eos=True, cache="off"):
        arrivals += [time.perf_counter() - began] * len(delta.tokens)
        timings = delta.timings_ms
    assert timings is not None, "an answer ends with its account"
    return Told(timings, arrivals)


def watch(client: Client, worker: Worker, prompt: list[int], outputs: int, poll_ms: float) -> Seen:
    """Send one request and watch it."""
    with Watched(worker, time.perf_counter(), poll_ms) as watched:
        told = tell(client, prompt, outputs)
    before = watched.readings[0][1]
    return Seen(told, [(at, bytes_ - before) for at, bytes_ in watched.readings])


def report(told: Sequence[Told], seen: Seen, prompt_tokens: int, poll_ms: float) -> dict[str, Any]:
    """Medians over the requests that nobody watched, and what was seen of the one that was."""
    gaps = [later - at for one in told for at, later in itertools.pairwise(one.tokens[1:])]
    exposed, ttft = statistics.median(one.exposed_ms for one in told), statistics.median(one.tokens[0] for one in told)
    return {
        "prompt_tokens": prompt_tokens,
        "ttft_ms": 1e3 * ttft,
        "step_ms": 1e3 * statistics.median(gaps),
        "second_token_after_first_ms": statistics.median(one.second_ms for one in told),
        "exposed_transfer_ms": exposed,
        "exposed_share_of_ttft": exposed / (1e3 * ttft),
        "accounts_ms": [asdict(one.timings) for one in told],
        "watched": seen.summary(poll_ms),
    }


def draw(seen: Seen, prompt_tokens: int, path: Path) -> None:
    """The account as bars, the bytes as a curve, the tokens as marks, over one axis of milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    bars, curve = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    told, at = seen.told, 0.0
    for name in ("line", "prefill", "transfer", "slot_wait", "decode"):
        width = getattr(told.timings, name)
        bars.barh(0, width, left=at, label=f"{name.replace('_', ' ')} {width:.1f} ms")
        at += width
    bars.plot([token * 1e3 for token in told.tokens], [0.55] * len(told.tokens), "k|", label="tokens at the client")
    bars.set(yticks=[], ylim=(-0.5, 0.8), title=f"One request of {prompt_tokens} tokens, {len(told.tokens)} out")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=6, fontsize="x-small", frameon=False)
    curve.plot([at * 1e3 for at, _ in seen.received], [bytes_ / 1e6 for _, bytes_ in seen.received])
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
    parser.add_argument("--poll-ms", type=float, default=POLL_MS)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 2) // 2)
    randomly = random.Random(1)
    with Services(model=options.model, threads=threads, kv_memory=1 << 30) as services:
        decode = services.worker("decode", slots=4)
        router = services.router([services.worker("prefill")], [decode])
        with Client(router) as client:
            prompts = [
                [randomly.randrange(1000, 100_000) for _ in range(options.tokens)] for _ in range(options.rounds + 2)
            ]
            told = [tell(client, prompt, options.outputs) for prompt in prompts[:-1]][1:]
            seen = watch(client, decode, prompts[-1], options.outputs, options.poll_ms)
    if options.plot:
        draw(seen, options.tokens, options.plot)
    save("timeline", report(told, seen, options.tokens, options.poll_ms))


if __name__ == "__main__":
    main()
