"""A conversation of growing length, turn by turn: what prefill computes, where the rest comes from, what is moved.

Each turn's prompt is the whole conversation so far, the answers included, and a new question, as token ids. Told twice:
on one prefill worker, and with the turns going to two prefill workers in turn, which share Redis. Tokens by source and
bytes are counters of the workers' own, read before and after each turn; the client's usage must agree with them.

    python -m bench.conversation [--model DIR] [--turns 5] [--first 512] [--question 96] [--answer 48]

With ideal caching a turn computes its question, and the last token of the answer before, whose KV nobody needed; plus
what lies beyond the last full block of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from typing import Any

from baton import AsyncClient
from baton.completion import Completion
from baton.kv.embedded import embedded_valkey
from bench.common import save
from bench.services import Services, Worker, counters, grown

SOURCES = ("computed", "pool", "host", "redis", "peer")
SETTLE_S, QUIET_S = 10.0, 0.4


@dataclass(frozen=True)
class Fleet:
    """Where the workers tell their metrics, and the routers that the turns go to, one after the other."""

    prefill: list[Worker]
    decode: list[Worker]
    routers: list[str]

    def prefill_tokens(self) -> dict[str, float]:
        """Prompt tokens by source, over all prefill workers."""
        return counters([worker.ops for worker in self.prefill], "baton_prefill_tokens_total", "source")

    def received(self) -> float:
        """Bytes of KV that decode has got."""
        found = counters([worker.ops for worker in self.decode], "baton_transfer_bytes_total", "direction")
        return found.get("received", 0.0)

    def blocks(self) -> dict[str, float]:
        """What became of prefix blocks, over all workers."""
        return counters([each.ops for each in (*self.prefill, *self.decode)], "baton_prefix_blocks_total", "outcome")


async def settled(fleet: Fleet) -> None:
    """Wait until no worker stores blocks any more, as a reader of the answer would."""
    before, end = fleet.blocks(), asyncio.get_running_loop().time() + SETTLE_S
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(QUIET_S)
        now = fleet.blocks()
        if now == before:
            return
        before = now


async def converse(fleet: Fleet, arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One row a turn."""
    chosen, history, rows = random.Random(seed), list[int](), []
    for turn in range(arguments.turns):
        async with AsyncClient(fleet.routers[turn % len(fleet.routers)]) as client:
            vocabulary = (await client.get_model()).vocab_size
            length = arguments.question if turn else arguments.first
            prompt = history + [chosen.randrange(4, vocabulary) for _ in range(length)]
            tokens, received = fleet.prefill_tokens(), fleet.received()
            answer = await client.complete(prompt, max_tokens=arguments.answer, temperature=0.0, ignore_eos=True)
        await settled(fleet)
        told = grown(tokens, fleet.prefill_tokens())
        rows.append(_row(turn, prompt, len(history), told, fleet.received() - received, answer))
        history = [*prompt, *answer.token_ids]
    return rows


def _row(
    turn: int, prompt: list[int], before: int, told: dict[str, float], received: float, answer: Completion
) -> dict[str, Any]:
    usage = answer.usage
    if usage is None:
        raise RuntimeError("no usage came")
    row = {"turn": turn + 1, "prompt": len(prompt), "new": len(prompt) - before}
    row |= {source: int(told.get(source, 0)) for source in SOURCES}
    row |= {"decode_reused": usage.cached.decode, "bytes_moved": int(received)}
    row["usage_agrees"] = (
        all(getattr(usage.cached, source) == row[source] for source in SOURCES[1:])
        and sum(row[source] for source in SOURCES) == len(prompt)
    )  # fmt: skip
    return row


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, prefill_workers in (("same workers", 1), ("alternating prefill workers", 2)):
        with embedded_valkey(1 << 30) as server:
            common: dict[str, Any] = {"redis": server, "threads": arguments.threads}
            with Services(model=arguments.model, **common) as services:
                prefill = [services.worker("prefill", kv_memory=arguments.kv_memory) for _ in range(prefill_workers)]
                decode = [services.worker("decode", slots=2, kv_memory=arguments.kv_memory)]
                routers = [services.router([worker], decode) for worker in prefill]
                found[name] = await converse(Fleet(prefill, decode, routers), arguments, arguments.seed)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """One line a turn."""
    per_token = rows[0]["bytes_moved"] / rows[0]["prompt"] or 1.0
    lines = [f"{'turn':>4} {'prompt':>7} {'new':>5} {'computed':>8} {'pool':>6} {'host':>6} {'redis':>6} {'peer':>6}"]
    lines[0] += f" {'decode':>7} {'MB moved':>9} {'as tokens':>9}  usage"
    for row in rows:
        line = f"{row['turn']:4} {row['prompt']:7} {row['new']:5} {row['computed']:8} {row['pool']:6} {row['host']:6}"
        line += f" {row['redis']:6} {row['peer']:6} {row['decode_reused']:7} {row['bytes_moved'] / 1e6:9.2f}"
        lines.append(f"{line} {row['bytes_moved'] / per_token:9.0f}  {'agrees' if row['usage_agrees'] else 'DIFFERS'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="default: the bundled checkpoint")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--question", type=int, default=96)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", default="128MiB")
    parser.add_argument("--seed", type=int, default=1)
    results = asyncio.run(measure(parser.parse_args()))
    save("prefix-conversation", results)
    for name, rows in results.items():
        print(f"\n{name}\n{table(rows)}")


if __name__ == "__main__":
    main()
