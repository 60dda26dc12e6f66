"""Fleets on one CUDA device, over HTTP: closed loops of clients, and streams beside long prompts.

    python -m bench.gpu_serve [--fleets mixed disaggregated] [--clients 1 8 32 128] [--requests 400] [--help]

The model has Llama-3.2-1B's shape and random weights, which are written to a temporary folder. A mixed worker, and a
prefill and a decode worker that share the device, serve it in turns. Each client of a closed loop asks for the next
completion when the last one has ended; prompts have 128 to 384 tokens and outputs 32 to 96. Then four streams are
watched beside prompts of 4,096 and 65,536 tokens at the mixed worker. Writes bench/results/gpu-serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench import checkpoint
from bench.common import save
from bench.gpu import LLAMA_8B, TINY, gpu
from bench.load import HTTP, MODEL, connect, percentile, stream
from bench.peers.interference import InterferenceLoad, figures, watched
from bench.up import up

LLAMA_1B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SHAPES = {"llama-1b": LLAMA_1B, "tiny": TINY}
FLEETS = {"mixed": ["--mixed=1"], "disaggregated": ["--prefill=1", "--decode=1"]}
CLIENTS = (1, 8, 32, 128)
PROMPT, OUTPUT = range(128, 385), range(32, 97)
STREAMS, CONTEXT = 4, 128
PROMPTS = {4096: 4, 65536: 1}
"""Number of prompts of each length beside which streams are watched."""
LONGEST = 73_728
PROCESSES = 8
"""Most processes of clients: one can't read as many tokens as a GPU computes."""

Finished = tuple[float, list[float], int]
"""Time at which a completion was asked for, times of its events, and number of its tokens."""


async def closed_loop(base: str, clients: int, requests: int, vocabulary: int) -> list[Finished]:
    """The ends of so many completions; each client asks for the next one when the last one has ended."""
    draw, left, found = random.Random(time.time_ns()), iter(range(requests)), list[Finished]()

    async def run() -> None:
        for _ in left:
            prompt, tokens = draw.choices(range(10, vocabulary), k=draw.choice(PROMPT)), draw.choice(OUTPUT)
            began, times = time.perf_counter(), list[float]()
            await stream(client, prompt, tokens, times)
            found.append((began, times, tokens))

    async with connect(base) as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(run())
    return found


def measure(base: str, clients: int, requests: int, vocabulary: int) -> dict[str, Any]:
    """Figures of so many completions, by clients in several processes, after some that do not count."""
    processes = min(clients, PROCESSES)
    found = list[Finished]()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for count in (2 * clients, requests):
            shares = [(len(range(i, clients, processes)), len(range(i, count, processes))) for i in range(processes)]
            asked = [pool.submit(_closed_loop, base, *share, vocabulary) for share in shares]
            found = [each for one in asked for each in one.result()]
    seconds = max(times[-1] for _, times, _ in found) - min(began for began, _, _ in found)
    first = [1e3 * (times[0] - began) for began, times, _ in found]
    gaps = [1e3 * (later - earlier) for _, times, _ in found for earlier, later in itertools.pairwise(times)]
    return {
        "clients": clients,
        "requests": len(found),
        "requests_per_s": len(found) / seconds,
        "tokens_per_s": sum(tokens for *_, tokens in found) / seconds,
        "ttft_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "between_events_ms": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)},
    }


def _closed_loop(base: str, clients: int, requests: int, vocabulary: int) -> list[Finished]:
    return asyncio.run(closed_loop(base, clients, requests, vocabulary))


def beside(base: str, lengths: Sequence[int], vocabulary: int) -> dict[str, Any]:
    """Time between tokens of streams alone, and beside prompts of each length."""
    loads = {
        tokens: InterferenceLoad(STREAMS, CONTEXT, 2.0, PROMPTS.get(tokens, 1), tokens, limit_s=60.0)
        for tokens in lengths
    }
    return {str(tokens): figures(asyncio.run(watched(base, load, vocabulary))) for tokens, load in loads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--fleets", choices=FLEETS, nargs="+", default=list(FLEETS))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(PROMPTS))
    given = parser.parse_args()
    device, raw = torch.device(given.device), SHAPES[given.shape]
    vocabulary = raw["vocab_size"]
    settings = {
        "device": given.device,
        "dtype": "bfloat16",
        "kv_memory": "8GiB" if device.type == "cuda" else "256MiB",
        "http": HTTP,
        "served_model_name": MODEL,
        "max_model_len": LONGEST,
        "slots": 128,
        "processes": 4,
    }
    results: dict[str, Any] = {"gpu": gpu(device), "shape": given.shape, "fleets": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint.write(Path(folder), raw, device=given.device)
        for name in given.fleets:
            results["fleets"][name] = []
            with up(FLEETS[name], model=model, **settings) as router:
                for clients in given.clients:
                    requests = min(given.requests, 16 * clients)
                    row = measure(f"http://{router.http}", clients, requests, vocabulary)
                    results["fleets"][name].append(row)
                    print(f"{name}: {row}", flush=True)
                    save("gpu-serve", results)
        if given.lengths:
            with up(FLEETS["mixed"], model=model, **settings) as router:
                results["beside"] = beside(f"http://{router.http}", given.lengths, vocabulary)
        save("gpu-serve", results)


if __name__ == "__main__":
    main()
