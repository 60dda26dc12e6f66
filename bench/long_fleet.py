"""A prompt of a million tokens through a fleet, whose prefill worker is killed; writes bench/results/long-fleet.json.

    python -m bench.long_fleet [--tokens 1000000] [--kill-at 0.9] [--outputs 24]

Two prefill workers, a decode worker, a router and an embedded Valkey, with the small Llama of `bench.long` in float32.
The worker that computes the prompt is killed with SIGKILL at `--kill-at` of it; the other one finds what is in Valkey
and computes the rest. Meanwhile a short prompt comes every `--every` seconds. The results are the times, the tokens
that were computed again, and the largest memory of each process.

Then the plain functions of `bench.long` compute the same tokens in this process, without Baton's engine, kernels,
pages, cache or transfer. The bench fails if the tokens differ. `least_gap` is the smallest distance between the two
best logits of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from redis import Redis
from torch import Tensor

from baton import AsyncClient
from baton.bench.stats import shares
from baton.kv.embedded import embedded_valkey
from baton.model.decoder import Decoder
from baton.model.load import load_model
from baton.request import Usage
from bench.children import Child
from bench.common import save
from bench.long import SHAPE, PlainModel, draw_prompt, write_checkpoint
from bench.overtake import ask
from bench.services import Services

KV_BYTES = SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
"""Of a token."""

ROOM_TOKENS = 1 << 16
PLAIN_CHUNK, PLAIN_SEGMENT = 512, 1024


@dataclass
class LongRequest:
    """What a client saw of the long prompt; times in seconds since the call."""

    done_at_kill: int = 0
    killed_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    usage: Usage | None = None


def cpu_seconds(process: Child) -> float:
    """User and system time of a process so far."""
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> int:
    """The largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


async def run_long(
    client: AsyncClient, prompt: list[int], outputs: int, kill_at: int, kill: Callable[[], None]
) -> LongRequest:
    """Generate; `kill` is called once, when `kill_at` tokens of the prompt are computed."""
    seen, began = LongRequest(), time.perf_counter()
    stream = client.generate(prompt, max_tokens=outputs, temperature=0.0, ignore_eos=True, report_progress=True)
    async for delta in stream:
        now = time.perf_counter() - began
        if delta.progress is not None:
            print(f"{now:.0f} s: {delta.progress.tokens_done}", file=sys.stderr, flush=True)
            if not seen.done_at_kill and delta.progress.tokens_done >= kill_at:
                seen.done_at_kill, seen.killed_s = delta.progress.tokens_done, now
                kill()
        seen.token_ids += [token.token_id for token in delta.tokens]
        seen.arrivals_s += [now] * len(delta.tokens)
        seen.usage = delta.usage or seen.usage
    return seen


@contextlib.asynccontextmanager
async def short_prompts(client: AsyncClient, every: float) -> AsyncIterator[list[float]]:
    """Milliseconds to the first token of short prompts, one every `every` seconds until the block ends."""
    rng, found = random.Random(1), list[float]()

    async def send() -> None:
        while True:
            await asyncio.sleep(every)
            found.append(await ask(client, rng))

    sending = asyncio.create_task(send())
    try:
        yield found
    finally:
        sending.cancel()
        await asyncio.wait({sending})


async def measure(model: str, arguments: argparse.Namespace) -> tuple[list[int], dict[str, Any]]:
    """The tokens that the fleet generates, and what it took."""
    memory = (arguments.tokens + ROOM_TOKENS) * KV_BYTES
    common = {"dtype": "float32", "max_model_len": 1 << 20, "kv_memory": memory}
    async with embedded_valkey(2 * memory) as redis:
        with Services(model=model, redis=redis, **common) as services:
            workers = [services.worker("prefill", cache_memory=0, threads=arguments.threads) for _ in range(2)]
            decode = services.worker("decode", slots=8, threads=1)
            address = services.router(workers, [decode])
            names = dict(zip(("prefill 1", "prefill 2", "decode", "router"), services.processes, strict=True))
            memory_mib: dict[str, int] = {}

            def kill() -> None:
                name = max(("prefill 1", "prefill 2"), key=lambda name: cpu_seconds(names[name]))
                memory_mib[f"{name}, killed"] = peak_mib(names[name].pid)
                names.pop(name).signal(signal.SIGKILL)

            async with AsyncClient(address) as client, short_prompts(client, arguments.every) as shorts:
                prompt, kill_at = draw_prompt(arguments.tokens), int(arguments.kill_at * arguments.tokens)
                seen = await run_long(client, prompt, arguments.outputs, kill_at, kill)
            memory_mib |= {name: peak_mib(process.pid) for name, process in names.items()}
            memory_mib["valkey"] = peak_mib(Redis.from_url(redis, protocol=2).info("server")["process_id"])
    if seen.usage is None or not seen.done_at_kill:
        raise RuntimeError("the prompt was computed before a worker was killed")
    return seen.token_ids, {
        "tokens": arguments.tokens,
        "killed_at_token": seen.done_at_kill,
        "killed_s": round(seen.killed_s, 1),
        "cached_in_valkey": seen.usage.cached.redis,
        "computed_again": max(0, seen.done_at_kill - seen.usage.cached_tokens),
        "first_token_s": round(seen.arrivals_s[0], 1),
        "other_tokens_s": round(seen.arrivals_s[-1] - seen.arrivals_s[0], 3),
        "peak_memory_mib": memory_mib,
        "kv_memory_of_a_worker_mib": memory >> 20,
        "short_prompts": {"count": len(shorts), "first_token_ms": shares(shorts, digits=1)},
    }


def compute_kv(model: PlainModel, ids: Tensor, kv: Tensor, start: int) -> None:
    """Write K and V of a chunk that begins at position `start`; those before it are there."""
    x, last = model.decoder.embed(ids), len(model.decoder.layers) - 1
    for index in range(last):
        x += model.attend(index, model.append(index, x, kv, start), kv, start)
        x += model.mlp(index, x)
    model.append(last, x, kv, start)


def next_logits(model: PlainModel, token_id: int, kv: Tensor, position: int) -> Tensor:
    """Write K and V of one token; returns the logits after it, `[vocab]`."""
    x = model.decoder.embed(torch.tensor([token_id]))
    for index in range(len(model.decoder.layers)):
        x += model.attend(index, model.append(index, x, kv, position), kv, position)
        x += model.mlp(index, x)
    logits: Tensor = model.decoder.logits(x)[0]
    return logits


@torch.inference_mode()
def generate_plain(model: PlainModel, prompt: Sequence[int], outputs: int) -> tuple[list[int], float]:
    """The greedy continuation of `prompt`, and the smallest gap between the two best logits of a token."""
    kv, ids = model.new_kv(len(prompt) + outputs), torch.tensor(prompt)
    *_, newest = prompt
    for start in range(0, len(prompt) - 1, model.chunk):
        compute_kv(model, ids[start : min(start + model.chunk, len(prompt) - 1)], kv, start)
    token_ids, gaps = list[int](), list[float]()
    for position in range(len(prompt) - 1, len(prompt) + outputs - 1):
        best = next_logits(model, newest, kv, position).topk(2)
        newest = int(best.indices[0])
        token_ids.append(newest)
        gaps.append(float(best.values[0] - best.values[1]))
    return token_ids, min(gaps)


def compare(path: Path, prompt: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
    """Compute the tokens that were `found` again by plain functions. Raises RuntimeError if they differ."""
    model = PlainModel(cast(Decoder, load_model(path, dtype=torch.float32).decoder), PLAIN_CHUNK, PLAIN_SEGMENT)
    began = time.perf_counter()
    token_ids, gap = generate_plain(model, prompt, len(found))
    if token_ids != [*found]:
        raise RuntimeError(f"the fleet generated {found}, plain functions {token_ids}")
    return {"equal_tokens": len(found), "least_gap": round(gap, 4), "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--kill-at", type=float, default=0.9, help="share of the prompt")
    parser.add_argument("--outputs", type=int, default=24, help="tokens to generate")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between short prompts")
    parser.add_argument("--threads", type=int, default=2, help="of a prefill worker")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder))
        token_ids, results = asyncio.run(measure(str(path), arguments))
        save("long-fleet", results, "fleet")
        save("long-fleet", compare(path, draw_prompt(arguments.tokens), token_ids), "plain")


if __name__ == "__main__":
    main()
