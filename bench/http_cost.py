"""CPU time of the router for a streamed token, over HTTP and over gRPC, in turns on one fleet.

    python -m bench.http_cost [--rounds 5] [--streams 16] [--tokens 256]

The bar is 1.5 times that of gRPC. Writes bench/results/http-cost.json; exit status 1: the bar is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from baton import AsyncClient, bundled
from bench.common import save
from bench.up import Router, up

BAR = 1.5
STREAM_S = 300.0
PROMPT = list(range(300, 332))
CPU = "process_cpu_seconds_total"


def cpu_s(router: Router) -> float:
    return sum(router.counters(CPU).values())


async def over_grpc(router: Router, tokens: int) -> None:
    async with AsyncClient(router.grpc) as client:
        stream = client.generate(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True, timeout=STREAM_S)
        assert sum([len(delta.tokens) async for delta in stream]) == tokens


async def over_http(router: Router, tokens: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        httpx2.AsyncClient(base_url=f"http://{router.http}", timeout=STREAM_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        last = [line async for line in response.aiter_lines() if line][-1]
    assert last == "data: [DONE]"


def cost_us(router: Router, send: Callable[[Router, int], Awaitable[None]], streams: int, tokens: int) -> float:
    """Microseconds of the router's CPU for each token of so many streams at a time."""

    async def all_streams() -> None:
        await asyncio.gather(*(send(router, tokens) for _ in range(streams)))

    before = cpu_s(router)
    asyncio.run(all_streams())
    return 1e6 * (cpu_s(router) - before) / (streams * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    sends = {"grpc": over_grpc, "http": over_http}
    with up(["--http=127.0.0.1:0"], model=bundled.path()) as router:
        for send in sends.values():
            cost_us(router, send, given.streams, 16)
        rounds = [
            {name: cost_us(router, send, given.streams, given.tokens) for name, send in sends.items()}
            for _ in range(given.rounds)
        ]
    medians = {name: statistics.median(each[name] for each in rounds) for name in sends}
    ratio = statistics.median(each["http"] / each["grpc"] for each in rounds)
    load: dict[str, Any] = {"streams": given.streams, "tokens": given.tokens}
    save("http-cost", {"load": load, "us_per_token": medians, "ratio": ratio, "bar": BAR, "rounds": rounds})
    sys.exit(0 if ratio <= BAR else 1)


if __name__ == "__main__":
    main()
