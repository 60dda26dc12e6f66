"""How often output depends on the batch: the same requests alone, and many at once, greedy and seeded.

In float32 a request's tokens depend on nothing but the request, and the tests hold that. In bfloat16 the last bits of
the logits may depend on the shapes of the matrix products, so that a near-tie may fall the other way and everything
after it differs. This measures how often: the share of requests that differ, and the chance per token that a sequence
parts from its twin. Prompts are pieces of the standard library's source, of 16 to 256 tokens.

    python -m bench.divergence [--model DIR] [--requests 64] [--tokens 64] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path
from typing import Any

from baton import AsyncClient
from bench.common import running_fleet, save

MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0}}


async def prompts(target: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of pieces of source text."""
    generator = random.Random(seed)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    async with AsyncClient(target) as client:
        found: list[list[int]] = []
        while len(found) < count:
            ids = await client.tokenize(generator.choice(files).read_text(errors="replace")[:60_000])
            length = generator.randint(16, 256)
            start = generator.randrange(max(1, len(ids) - length))
            found.append(ids[start : start + length])
        return found


async def outputs(
    target: str, prompts: list[list[int]], mode: dict[str, Any], tokens: int, concurrency: int
) -> list[list[int]]:
    """Tokens of every prompt, `concurrency` requests at a time; a prompt's number is its seed."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(target) as client:

        async def one(seed: int, prompt: list[int]) -> list[int]:
            async with gate:
                completion = await client.complete(prompt, max_tokens=tokens, seed=seed, ignore_eos=True, **mode)
                return list(completion.token_ids)

        return await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))


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
    flags = ["--dtype", dtype, "--redis", "none"] + (["--model", arguments.model] if arguments.model else [])
    results = {}
    with running_fleet(*flags) as ready:
        asked = await prompts(ready["grpc"], arguments.requests, arguments.seed)
        for name, mode in MODES.items():
            alone = await outputs(ready["grpc"], asked, mode, arguments.tokens, 1)
            together = await outputs(ready["grpc"], asked, mode, arguments.tokens, arguments.concurrency)
            results[name] = compare(alone, together)
    return results


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
