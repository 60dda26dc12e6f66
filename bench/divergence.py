"""How often output depends on the batch, or on a replay: the same requests twice, greedy and seeded.

In float32 a request's tokens depend on nothing but the request, and the tests hold that. In bfloat16 the last bits of
the logits may depend on the shapes of the matrix products, so that a near-tie may fall the other way and everything
after it differs. This measures how often: the share of requests that differ, and the chance per token that a sequence
parts from its twin, first between requests alone and many at once. Prompts are pieces of the standard library's source,
of 16 to 256 tokens.

Then "replay": all requests at once, undisturbed and with their decode worker drained at once in mid-stream, so that
another goes on with all of them. The KV of what the first has generated is computed there by prefill, in chunks,
instead of step by step: in bfloat16 it is rounded otherwise. Tokens are counted from the replay on.

    python -m bench.divergence [--model DIR] [--requests 64] [--tokens 64] [--concurrency 32]
    python -m bench.divergence --part replay [--model DIR] [--requests 64] [--replay-tokens 200]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from baton import AsyncClient, bundled
from baton.completion import Completion
from bench.common import running_fleet, save
from tests.fleet import Fleet

MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0}}
DTYPES = ("bfloat16", "float32")
REPLAY_MODES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9}}


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
    results = {}
    with running_fleet("--dtype", dtype, "--redis", "none", "--model", str(model_of(arguments))) as ready:
        asked = await prompts(ready["grpc"], arguments.requests, arguments.seed)
        for name, mode in MODES.items():
            alone = await outputs(ready["grpc"], asked, mode, arguments.tokens, 1)
            together = await outputs(ready["grpc"], asked, mode, arguments.tokens, arguments.concurrency)
            results[name] = compare(alone, together)
    return results


class Streams:
    """The same prompts in every mode of REPLAY_MODES, all at once; how many tokens each has so far."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]], tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._asked = [(name, mode, seed, p) for name, mode in REPLAY_MODES.items() for seed, p in enumerate(prompts)]
        self.counts = [0] * len(self._asked)
        self.late = asyncio.Event()
        """Set when one of them has three quarters of its tokens."""

    async def run(self) -> dict[str, list[list[int]]]:
        """Tokens of every prompt, by mode."""
        found = await asyncio.gather(*(self._one(number) for number in range(len(self._asked))))
        names = [name for name, *_ in self._asked]
        return {mode: [ids for ids, name in zip(found, names, strict=True) if name == mode] for mode in REPLAY_MODES}

    async def _one(self, number: int) -> list[int]:
        _, mode, seed, prompt = self._asked[number]
        completion = Completion()
        async for delta in self._client.generate(prompt, max_tokens=self._tokens, seed=seed, ignore_eos=True, **mode):
            completion.add(delta)
            self.counts[number] = len(completion.token_ids)
            if self.counts[number] >= self._tokens * 3 // 4:
                self.late.set()
        return list(completion.token_ids)


async def replay(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Undisturbed streams against those whose decode worker was drained in mid-stream."""
    model = model_of(arguments)
    slots = len(REPLAY_MODES) * arguments.requests
    async with Fleet(model, dtype=dtype, kv_memory=1 << 30) as fleet:
        prefill = await fleet.prefill()
        # Placement prefers the worker with more free memory, so that the first one gets all streams.
        first, second = await fleet.decode(slots=slots, kv_memory=3 << 30), await fleet.decode(slots=slots)
        app = await fleet.start_router([prefill], [first, second])
        asked = await prompts(app.address, arguments.requests, arguments.seed)
        client = await fleet.client(app)
        undisturbed = await Streams(client, asked, arguments.replay_tokens).run()
        before = _replays()
        streams = Streams(client, asked, arguments.replay_tokens)
        reading = asyncio.create_task(streams.run())
        await streams.late.wait()
        had = list(streams.counts)
        await first.service.drain(0)
        moved = await reading
        replayed = int(_replays() - before)
    results: dict[str, Any] = {"streams": len(had), "replays": replayed, "tokens": arguments.replay_tokens}
    for number, name in enumerate(REPLAY_MODES):
        counts = had[number * len(asked) : (number + 1) * len(asked)]
        rest = [[ids[n:] for n, ids in zip(counts, each[name], strict=True)] for each in (undisturbed, moved)]
        heads = [[ids[:n] for n, ids in zip(counts, each[name], strict=True)] for each in (undisturbed, moved)]
        results[name] = {
            **compare(*rest),
            "differ_before_the_replay": compare(*heads)["requests_that_differ"],
            "tokens_before_the_replay": [min(counts), max(counts)],
        }
    return results


def _replays() -> float:
    return REGISTRY.get_sample_value("baton_replays_total", {"cause": "drain"}) or 0.0


def flags(description: str | None) -> argparse.ArgumentParser:
    """What says which prompts are continued, and how far."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def model_of(arguments: argparse.Namespace) -> Path:
    """The checkpoint that they name, or the one that Baton brings."""
    return Path(arguments.model or bundled.path())


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--replay-tokens", type=int, default=200)
    parser.add_argument("--part", choices=("batch", "replay"), default="batch")
    arguments = parser.parse_args()
    run = replay if arguments.part == "replay" else measure
    save("divergence", {dtype: asyncio.run(run(arguments, dtype)) for dtype in DTYPES}, part=arguments.part)


if __name__ == "__main__":
    main()
