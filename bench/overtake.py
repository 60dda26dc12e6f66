"""What a long prompt costs short ones on the same prefill worker; writes bench/results/long-overtake.json.

    python -m bench.overtake [--layers 2 16] [--tokens 400000] [--shorts 120] [--every 0.5]

A fleet of one prefill worker, one decode worker and a router, with the small Llama of `bench.long` in float32 and one
compute thread a worker. Short prompts of 64 tokens come at random times, `--every` seconds apart on average: first
alone, then while a long prompt is computed. The times are milliseconds from the call to the first token.

The long prompt begins far enough from its end that it runs until the last short one has its token; then it is
cancelled. `--layers`: the run is made for each of these depths, since a short prompt waits for one layer of the long
prompt's chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from baton import AsyncClient
from baton.bench.stats import shares
from bench.common import save
from bench.long import SHAPE, write_checkpoint
from bench.services import Services

SHORT_TOKENS, OUTPUT_TOKENS = 64, 8
SLOTS = 8


class LongPrompt:
    """A long prompt that a fleet computes until the end of the block."""

    def __init__(self, client: AsyncClient, ids: list[int]) -> None:
        self._client, self._ids = client, ids
        self._computed = asyncio.Event()
        self.done = 0

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Enter once its first tokens are computed. Raises RuntimeError if it ended within the block."""
        task = asyncio.create_task(self._follow())
        try:
            begun = asyncio.create_task(self._computed.wait())
            await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
            yield self
            if task.done():
                task.result()
                raise RuntimeError("the long prompt ended before the short ones: --tokens is too small")
        finally:
            for each in (task, begun):
                each.cancel()
            await asyncio.gather(task, begun, return_exceptions=True)

    async def _follow(self) -> None:
        async for delta in self._client.generate(self._ids, max_tokens=1, report_progress=True):
            if delta.progress is not None and delta.progress.tokens_done:
                self.done = delta.progress.tokens_done
                self._computed.set()


def draw(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(1, SHAPE["vocab_size"]) for _ in range(count)]


async def ask(client: AsyncClient, rng: random.Random) -> float:
    """Milliseconds to the first token of a new short prompt."""
    prompt = draw(rng, SHORT_TOKENS)
    began, first = time.perf_counter(), 0.0
    async for delta in client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True):
        first = first or (time.perf_counter() if delta.tokens else 0.0)
    return 1e3 * (first - began)


async def short_prompts(client: AsyncClient, rng: random.Random, count: int, every: float) -> dict[str, float]:
    """Percentiles of the time to the first token of `count` prompts in an open loop."""
    tasks = []
    for _ in range(count):
        await asyncio.sleep(rng.uniform(0, 2 * every))
        tasks.append(asyncio.create_task(ask(client, rng)))
    return shares(await asyncio.gather(*tasks), digits=1)


async def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Short prompts alone and beside a long one, on a fleet of their own."""
    rng = random.Random(arguments.seed)
    common = {"dtype": "float32", "threads": 1, "max_model_len": arguments.tokens + 64, "redis": "none"}
    with Services(model=model, **common) as services:
        memory = arguments.kv_memory
        prefill = services.worker("prefill", kv_memory=memory)
        decode = services.worker("decode", kv_memory=memory, slots=SLOTS)
        router = services.router([prefill], [decode])
        async with AsyncClient(router) as client:
            await short_prompts(client, rng, 8, 0.05)
            alone = await short_prompts(client, rng, arguments.shorts, arguments.every)
            async with LongPrompt(client, draw(rng, arguments.tokens)).running() as long:
                first = long.done
                beside = await short_prompts(client, rng, arguments.shorts, arguments.every)
                computed = [first, long.done]
    return {"alone_ms": alone, "beside_ms": beside, "long_prompt_computed": computed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--shorts", type=int, default=120)
    parser.add_argument("--every", type=float, default=0.5, help="seconds")
    parser.add_argument("--kv-memory", default="4GiB", help="of each worker")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as folder:
            model = str(write_checkpoint(Path(folder), layers))
            save("long-overtake", asyncio.run(measure(model, arguments)), f"{layers}_layers")


if __name__ == "__main__":
    main()
