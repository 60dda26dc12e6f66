"""Times for which event loops of a fleet and locks of its page pools are held; writes bench/results/worker-loops.json.

    python -m bench.worker_loops [--tokens 1000000] [--rounds 2]

A router, a prefill and a decode worker with pools of 262,144 pages of 16 tokens, and an embedded Valkey get requests of
so many tokens, one kind after the other: see `KINDS`. The model has a sliding window, so that prompts of a million
tokens are computed within a minute; what loops and locks do depends on lengths, not on attention. A few long prompts
fill each pool, so that later ones replace cached blocks.

For each kind and process: the longest hold of the loop and of the lock, with the names that `bench.holds` gives them,
from the start of the requests until a second after their end. `control` is a process beside them that computes for
about 0.4 ms, 200 times a second: the longest CPU time of one such piece. This is what the machine alone adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

from baton import AsyncClient, bundled
from baton.completion import Prompt
from baton.kv.embedded import embedded_valkey
from baton.tokenizer import Tokenizer
from bench.children import child
from bench.common import save
from bench.services import Services

PAGES, PAGE = 1 << 18, 16
MORE = 20_000
SHORT, STREAMS = 512, 64
SETTLE_S = 1.0
SERVICES = ("prefill", "decode", "router")
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 4096,
    "sliding_window": 256,
    "max_position_embeddings": 1 << 21,
}
PAGE_BYTES = SHAPE["num_hidden_layers"] * 2 * SHAPE["head_dim"] * 4 * PAGE


WORDS = ["return", "the", "value", "self", "import", "of", "class", "def", "for", "name", "größe", "für", "日本"]


class Requests:
    """The kinds of requests, each over prompts of `tokens` random token ids, or of a text of about as many."""

    def __init__(self, client: AsyncClient, tokens: int) -> None:
        self._client = client
        self._rng = random.Random(1)
        self._tokens = tokens
        self._last: list[int] = []
        self._tokenizer = Tokenizer.load(bundled.path())

    async def idle(self) -> None:
        """No request."""

    async def new(self) -> None:
        """A prompt of which nothing is cached."""
        self._last = self._ids(self._tokens)
        await self._ask(self._last)

    async def cached(self) -> None:
        """The prompt before, and some tokens more."""
        self._last = self._last + self._ids(MORE)
        await self._ask(self._last)

    async def choices(self) -> None:
        """The prompt before, with four choices."""
        await self._ask(self._last, n=4)

    async def prompt_logprobs(self) -> None:
        """Send the previous prompt again, with log-probabilities of its tokens."""
        await self._ask(self._last[: self._tokens], prompt_logprobs=1)

    async def cancelled(self) -> None:
        """A prompt of which nothing is cached, cancelled while it is computed."""
        task = asyncio.create_task(self._ask(self._ids(self._tokens)))
        await asyncio.sleep(5 * SETTLE_S)
        task.cancel()
        await asyncio.wait({task})

    async def text(self) -> None:
        """A text, not only in ASCII."""
        await self._ask(self._text())

    async def chat(self) -> None:
        """The same text as a message."""
        await self._ask([{"role": "user", "content": self._text()}])

    async def tokenize(self) -> None:
        """The same text, with Tokenize."""
        await self._client.tokenize(self._text())

    async def short(self) -> None:
        """Many short prompts at once."""
        await asyncio.gather(*(self._ask(self._ids(SHORT), max_tokens=64) for _ in range(STREAMS)))

    async def _ask(self, prompt: Prompt, *, max_tokens: int = 16, **more: Any) -> None:
        async for _ in self._client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, seed=1, **more):
            pass

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(SHAPE["vocab_size"]), k=count)

    def _text(self) -> str:
        words = self._rng.choices(WORDS, k=10_000)
        count = self._tokens * len(words) // len(self._tokenizer.encode(" ".join(words)))
        return " ".join(self._rng.choices(WORDS, k=count))


KINDS: dict[str, Callable[[Requests], Awaitable[None]]] = {
    kind.__name__: kind
    for kind in (
        Requests.idle,
        Requests.new,
        Requests.cached,
        Requests.choices,
        Requests.prompt_logprobs,
        Requests.cancelled,
        Requests.text,
        Requests.chat,
        Requests.tokenize,
        Requests.short,
    )
}


def write_checkpoint(folder: Path) -> Path:
    """A small model with random weights, and the bundled tokenizer."""
    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(**SHAPE)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled.path() / name, folder)
    return folder


def control() -> None:
    """Compute short pieces, and answer each line of standard input with the longest since the last answer."""
    longest = 0.0
    while True:
        if select.select([sys.stdin], [], [], 0.005)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps({"held_ms": round(1e3 * longest, 2)}), flush=True)
            longest = 0.0
        began = time.thread_time()
        b"".join([b"%d" % number for number in range(3000)])
        longest = max(longest, time.thread_time() - began)


async def measure(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The longest holds by kind of request and by process."""
    common = {"dtype": "float32", "kv_memory": PAGES * PAGE_BYTES, "page_size": PAGE}
    found: dict[str, Any] = {}
    async with embedded_valkey(2 << 30) as redis:
        command = [sys.executable, "-c", "from bench.worker_loops import control; control()"]
        with Services(model=model, watched=True, redis=redis, **common) as services, child(command) as beside:
            prefill = services.worker("prefill")
            decode = services.worker("decode", slots=STREAMS)
            address = services.router([prefill], [decode]).grpc
            async with AsyncClient(address) as client:
                requests = Requests(client, tokens)
                for kind in [*KINDS] * rounds:
                    processes = {**dict(zip(SERVICES, services.processes, strict=True)), "control": beside}
                    for process in processes.values():
                        process.ask("longest")
                    await KINDS[kind](requests)
                    await asyncio.sleep(SETTLE_S)
                    for name, process in processes.items():
                        found.setdefault(kind, {}).setdefault(name, []).append(process.ask("longest"))
    return found


def main() -> None:
    """Measure a fleet, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_checkpoint(Path(folder)))
        save("worker-loops", asyncio.run(measure(model, arguments.tokens, arguments.rounds)))


if __name__ == "__main__":
    main()
