"""How promptly health answers while prefill and decode are both busy.

Keeps a fleet loaded with long prompts and long outputs, calls grpc.health.v1 on router, prefill and decode in turn, and
reports the latencies.

    python -m bench.health [--model DIR] [--seconds 30] [--concurrency 16]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient
from baton.bench.stats import percentile
from bench.common import running_fleet, save

INTERVAL_S = 0.01


async def load(target: str, seed: int, prompt_tokens: int, output_tokens: int) -> None:
    """One client that always has a request under way."""
    generator = random.Random(seed)
    async with AsyncClient(target) as client:
        vocabulary = (await client.get_model()).vocab_size
        while True:
            prompt = [generator.randrange(vocabulary) for _ in range(prompt_tokens)]
            await client.complete(prompt, max_tokens=output_tokens, temperature=0, ignore_eos=True)


async def probe(address: str, until: float) -> list[float]:
    """Seconds that each health check took."""
    took = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.perf_counter() < until:
            began = time.perf_counter()
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            took.append(time.perf_counter() - began)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise RuntimeError(f"{address} says {answer.status}")
            await asyncio.sleep(INTERVAL_S)
    return took


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = ["--model", arguments.model] if arguments.model else []
    with running_fleet(*flags) as ready:
        loads = [
            asyncio.create_task(load(ready["grpc"], seed, arguments.prompt_tokens, arguments.output_tokens))
            for seed in range(arguments.concurrency)
        ]
        try:
            until = time.perf_counter() + arguments.seconds
            names = ("grpc", "prefill-0", "decode-0")
            found = await asyncio.gather(*(probe(ready[name], until) for name in names))
            for task in loads:
                if task.done():
                    task.result()
        finally:
            for task in loads:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*loads, return_exceptions=True)
    return {
        {"grpc": "router"}.get(name, name.removesuffix("-0")): {
            "checks": len(took),
            **{f"p{share}_ms": round(percentile(took, share / 100) * 1e3, 2) for share in (50, 90, 99, 100)},
        }
        for name, took in zip(names, found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    save("health", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
