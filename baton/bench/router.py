"""The delay that the router adds to each token, and the CPU time that a token costs it.

    simulated workers ─one message a step──▶ router (a core of its own) ──a message a token──▶ clients
        emission time of each step                  CPU seconds                     arrival time of each token

All are real processes on this machine and speak real gRPC. Emission and arrival are read from CLOCK_MONOTONIC, which
all processes of a Linux machine share, so they can be compared: the time from a step's emission to a token's arrival is
two hops and the router. The same clients then receive the same steps from the workers directly, which is one hop. The
delay that the router adds to a token is the time of this token through the router, minus the median time of the direct
hop. So the percentiles are over tokens, and their tail contains the tail of workers and clients too. With two cores or
more, the router has a core of its own.

A round has four runs: few streams, through the router and directly; as many streams as a large batch has, whose tokens
of one step leave the router together; and few streams together with a client that has stopped reading.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton import bundled
from baton.bench.children import Child, child, pinned
from baton.bench.machine import CPU_TICK_S, cpu_s
from baton.bench.pairing import medians
from baton.bench.results import Provenance
from baton.bench.router_workers import TOKENS, token_of
from baton.bench.stats import shares
from baton.errors import Unavailable

_SETTLE_S = 0.5
_MAX_TOKENS = 1 << 19

Say = Callable[[str], None]


@dataclass(frozen=True)
class RouterBench:
    """What is measured: numbers of streams, milliseconds of a step, measured seconds of each run."""

    streams: int = 8
    burst_streams: int = 256
    step_ms: float = 30.0
    seconds: float = 3.0
    rounds: int = 3
    processes: int = 1


@dataclass(frozen=True)
class _RouterRun:
    """The messages of one run; times are in nanoseconds, and only those in the window count."""

    steps: Sequence[tuple[int, int]]
    streams: Sequence[Sequence[tuple[int, Sequence[int]]]]
    begin: int
    end: int
    cpu_s: float
    slow_most_tokens: int

    def deliveries(self, *, skip: int) -> Iterator[tuple[int, int]]:
        """Step and arrival of each token in the window; the first `skip` tokens of a stream belong to no step."""
        times = [at for at, _ in self.steps]
        for stream in self.streams:
            seen = 0
            for at, tokens in stream:
                for token in tokens:
                    seen += 1
                    if seen > skip and self.begin <= at < self.end:
                        yield _step_of(token, bisect.bisect_right(times, at) - 1), at


def measure(bench: RouterBench, say: Say = lambda what: None) -> Generator[dict[str, Any], None, None]:
    """What is known after each round; `say` is told which one begins. Every number is the median of the rounds'.

    Raises Unavailable when a process does not start, or next to nothing came in the time.
    """
    cores = sorted(os.sched_getaffinity(0))
    provenance = Provenance()
    about = {
        "pinned": {"router": cores[:-1] or cores, "workers_and_clients": cores[-1:]},
        "step_ms": bench.step_ms,
        "processes": bench.processes,
    }
    rounds: list[dict[str, Any]] = []
    with pinned(cores[-1:]):
        while len(rounds) < bench.rounds:
            say(f"round {len(rounds) + 1} of {bench.rounds}")
            rounds.append(_round(bench, cores))
            yield {**provenance.report(), **about, "rounds": len(rounds), **medians(rounds)}


def _round(bench: RouterBench, cores: Sequence[int]) -> dict[str, Any]:
    few = _through(bench, cores, bench.streams)
    direct = _direct(bench, bench.streams)
    beside = _through(bench, cores, bench.streams, slow=1)
    burst = _through(bench, cores, bench.burst_streams)
    via, hop = _latencies(few, skip=1), _latencies(direct, skip=0)
    return {
        "few": {
            "streams": bench.streams,
            "through_ms": _shares(via),
            "direct_ms": _shares(hop),
            "added_ms": _shares(added(via, hop)),
            "tokens_per_cpu_s": _per_cpu_s(few),
        },
        "slow_client": {
            "streams": bench.streams,
            "itl_alone_ms": _shares(_gaps(few)),
            "itl_beside_ms": _shares(_gaps(beside)),
            "tokens_in_its_longest_message": beside.slow_most_tokens,
        },
        "burst": {
            "streams": bench.burst_streams,
            "first_to_last_ms": _shares(_spreads(burst, bench.burst_streams)),
            "emission_to_last_ms": _shares(_spreads(burst, bench.burst_streams, from_emission=True)),
            "tokens_per_s": _tokens(burst) / (burst.end - burst.begin) * 1e9,
            "tokens_per_cpu_s": _per_cpu_s(burst),
            "messages_per_token": _messages(burst) / _tokens(burst),
        },
    }


def _through(bench: RouterBench, cores: Sequence[int], streams: int, *, slow: int = 0) -> _RouterRun:
    model = f"--model={bundled.path()}"
    with _workers(bench.step_ms) as (where, workers):
        flags = [model, f"--prefill={where['prefill']}", f"--decode={where['decode']}", "--log-level=error"]
        flags += [f"--prefill-limit={streams}"] + ([f"--processes={bench.processes}"] if bench.processes > 1 else [])
        command = [sys.executable, "-m", "router", *flags]
        with child(command, name="the router", cores=cores[:-1] or cores) as router:
            return _count(bench, [router.listening()["grpc"]], streams, slow, workers, router.pid)


def _direct(bench: RouterBench, streams: int) -> _RouterRun:
    with _workers(bench.step_ms) as (where, workers):
        return _count(bench, [where["decode"]], streams, 0, workers, workers.pid)


def _count(bench: RouterBench, targets: Sequence[str], streams: int, slow: int, workers: Child, pid: int) -> _RouterRun:
    """Run clients for the bench's time; `pid` is the process whose CPU time counts."""
    numbers = [f"--streams={streams}", f"--slow={slow}", f"--max-tokens={_MAX_TOKENS}"]
    command = [sys.executable, "-m", "baton.bench.router_clients", *targets, *numbers]
    with child(command, name="the clients") as clients:
        clients.line()
        time.sleep(_SETTLE_S)
        begin, before = time.monotonic_ns(), cpu_s(pid)
        time.sleep(bench.seconds)
        end, after = time.monotonic_ns(), cpu_s(pid)
        came = json.loads(clients.finish())
    steps = json.loads(workers.finish())
    return _RouterRun(
        steps=steps,
        streams=came["streams"],
        begin=begin,
        end=end,
        cpu_s=after - before,
        slow_most_tokens=max(came["slow_most_tokens_in_a_message"], default=0),
    )


@contextlib.contextmanager
def _workers(step_ms: float) -> Iterator[tuple[dict[str, str], Child]]:
    command = [sys.executable, "-m", "baton.bench.router_workers", f"--step-ms={step_ms}"]
    with child(command, name="the workers") as process:
        yield process.listening(), process


def _step_of(token: int, latest: int) -> int:
    """The last step up to `latest` that had this token."""
    return latest - (token_of(latest) - token) % TOKENS


def _latencies(run: _RouterRun, *, skip: int) -> list[float]:
    """Milliseconds from emission to arrival."""
    return [(at - run.steps[step][0]) / 1e6 for step, at in run.deliveries(skip=skip)]


def added(through: Sequence[float], direct: Sequence[float]) -> list[float]:
    """The delay that the router adds to each token, in the unit of the arguments; see above."""
    hop = statistics.median_low(direct)
    return [each - hop for each in through]


def _gaps(run: _RouterRun) -> list[float]:
    """Milliseconds between two messages of a stream."""
    times = [[at for at, _ in stream if run.begin <= at < run.end] for stream in run.streams]
    return [(later - at) / 1e6 for stream in times for at, later in itertools.pairwise(stream)]


def _spreads(run: _RouterRun, streams: int, *, from_emission: bool = False) -> list[float]:
    """Milliseconds from a step's first token at the clients, or from its emission, to its last."""
    arrivals: dict[int, list[int]] = {}
    for step, at in run.deliveries(skip=1):
        arrivals.setdefault(step, []).append(at)
    return [
        (max(times) - (run.steps[step][0] if from_emission else min(times))) / 1e6
        for step, times in arrivals.items()
        if len(times) == streams
    ]


def _tokens(run: _RouterRun) -> int:
    return sum(1 for _ in run.deliveries(skip=1))


def _messages(run: _RouterRun) -> int:
    return sum(1 for stream in run.streams for at, _ in stream if run.begin <= at < run.end)


def _per_cpu_s(run: _RouterRun) -> float:
    # Less than a tick is told as none.
    return _tokens(run) / max(run.cpu_s, CPU_TICK_S)


def _shares(values: Sequence[float]) -> dict[str, float]:
    """Percentiles. Raises Unavailable if there are no values: the run was too short for the machine."""
    if not values:
        raise Unavailable("too few tokens came to tell anything: measure for more seconds")
    return shares(values)
