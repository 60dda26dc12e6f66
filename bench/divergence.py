"""How often bfloat16 greedy output depends on its batch: the same prompts alone, and many at once.

In float32 a request's tokens depend on nothing but the request, and the tests hold that. In bfloat16 the last bits of
the logits depend on the shapes of the matrix products, so that a near-tie may fall the other way and everything after
it differs. This measures how often: the share of requests that differ, and the chance per token that a sequence parts
from its twin.

    python -m bench.divergence [--model DIR] [--requests 64] [--tokens 64] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

from baton import AsyncClient
from bench.common import running_fleet, save


async def outputs(target: str, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
    """Greedy tokens of every prompt, `concurrency` requests at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(target) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with gate:
                completion = await client.complete(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
                return list(completion.token_ids)

        return await asyncio.gather(*map(one, prompts))


def compare(alone: list[list[int]], together: list[list[int]]) -> dict[str, Any]:
    """Shares of requests that differ, and partings per token that was generated before a parting."""
    parted, agreed = 0, 0
    for one, other in zip(alone, together, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        parted += same < len(one)
        agreed += same
    return {
        "requests": len(alone),
        "requests_that_differ": parted,
        "share_of_requests": round(parted / len(alone), 4),
        "partings_per_token": round(parted / (agreed + parted), 6),
    }


async def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    generator = random.Random(arguments.seed)
    flags = ["--dtype", dtype, "--redis", "none"] + (["--model", arguments.model] if arguments.model else [])
    with running_fleet(*flags) as ready:
        async with AsyncClient(ready["grpc"]) as client:
            vocabulary = (await client.get_model()).vocab_size
        prompts = [
            [generator.randrange(vocabulary) for _ in range(generator.randint(16, 256))]
            for _ in range(arguments.requests)
        ]
        alone = await outputs(ready["grpc"], prompts, arguments.tokens, 1)
        again = await outputs(ready["grpc"], prompts, arguments.tokens, 1)
        together = await outputs(ready["grpc"], prompts, arguments.tokens, arguments.concurrency)
    return {"alone_twice": compare(alone, again), "alone_and_together": compare(alone, together)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save("divergence", {dtype: asyncio.run(measure(arguments, dtype)) for dtype in ("bfloat16", "float32")})


if __name__ == "__main__":
    main()
