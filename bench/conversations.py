"""Conversations of growing length, on fleets that `baton up` starts with any arguments.

    python -m bench.conversations CHECKPOINT --up=--mixed=1 "--up=--prefill=1 --decode=1" [--rounds 3]

Each of `--users` users has a conversation of `--turns` turns: the prompt of a turn is the whole conversation so far,
answers included, and a new question, as token ids. Answers have as many tokens as the question. The fleets are running
at the same time, and get the same prompts in turns. For each turn, by its number: the median time to its first token,
prompt tokens that were computed, requests whose KV was transferred, and the growth of the router's placement counters.
A request counts as transferred if its latency account has more than a millisecond of transfer. Ratios are those of the
first fleet over each other one, by round. Writes bench/results/conversations.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton import AsyncClient
from bench.common import save
from bench.pairing import spread, turned
from bench.up import Router, up

COUNTERS = r"baton_placements_total|baton_replays_total"
"""Counters of the router whose growth is shown."""

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, "kv_memory": "1GiB"}
_TRANSFER_MS = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one user: milliseconds to its first token and to its end, tokens of its prompt, and the rest."""

    number: int
    first_token_ms: float
    total_ms: float
    prompt: int
    computed: int
    transferred: bool


@dataclass(frozen=True, slots=True)
class Conversations:
    """Sizes: tokens of the first question, and of every later question and answer."""

    users: int
    turns: int
    first: int
    each: int


async def converse(router: Router, sizes: Conversations, seed: str) -> list[Turn]:
    """All turns of all users."""
    async with AsyncClient(router.grpc) as client:
        vocabulary = (await client.get_model()).vocab_size
        users = (_user(client, sizes, random.Random(f"{seed}/{user}"), vocabulary) for user in range(sizes.users))
        return [turn for turns in await asyncio.gather(*users) for turn in turns]


async def _user(client: AsyncClient, sizes: Conversations, draw: random.Random, vocabulary: int) -> list[Turn]:
    history: list[int] = []
    turns = []
    for number in range(1, sizes.turns + 1):
        history += draw.choices(range(10, vocabulary), k=sizes.each if history else sizes.first)
        answer = await client.complete(history, max_tokens=sizes.each, temperature=0.0, ignore_eos=True)
        if answer.usage is None or answer.timings_ms is None:
            raise RuntimeError("an answer has no usage or no account of its latency")
        usage, took = answer.usage, answer.timings_ms
        computed = usage.prompt_tokens - usage.cached_tokens
        moved = took.transfer > _TRANSFER_MS
        turns.append(Turn(number, took.first_token, took.total, usage.prompt_tokens, computed, moved))
        history += answer.token_ids
    return turns


def by_turn(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One row for each turn's number."""
    rows = []
    for number in sorted({turn.number for turn in turns}):
        own = [turn for turn in turns if turn.number == number]
        rows.append(
            {
                "turn": number,
                "ttft_ms": round(statistics.median(turn.first_token_ms for turn in own), 1),
                "total_ms": round(statistics.median(turn.total_ms for turn in own), 1),
                "prompt": sum(turn.prompt for turn in own),
                "computed": sum(turn.computed for turn in own),
                "transferred": sum(turn.transferred for turn in own),
                "requests": len(own),
            }
        )
    return rows


def summary(rounds: Mapping[str, Sequence[Sequence[Turn]]], grown: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Turns of all rounds together, by fleet, and the ratios of the first fleet to the others, by round."""
    first, *others = rounds

    def ratio(other: str, name: str) -> dict[str, Any] | None:
        pairs = zip(rounds[first], rounds[other], strict=True)
        return spread([_median(mine, name) / _median(theirs, name) for mine, theirs in pairs])

    return {
        "fleets": {
            fleet: {"turns": by_turn([turn for each in found for turn in each]), "counters": dict(grown[fleet])}
            for fleet, found in rounds.items()
        },
        "ratios": {
            f"{first} over {other}": {name: ratio(other, name) for name in ("first_token_ms", "total_ms")}
            for other in others
        },
    }


def _median(turns: Sequence[Turn], name: str) -> float:
    return float(statistics.median(getattr(turn, name) for turn in turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--up", action="append", required=True, help="arguments of `baton up`; once for each fleet")
    for name, default in (("rounds", 3), ("users", 4), ("turns", 8), ("first", 256), ("each", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = Conversations(given.users, given.turns, given.first, given.each)
    rounds: dict[str, list[list[Turn]]] = {fleet: [] for fleet in given.up}
    with contextlib.ExitStack() as stack:
        routers = {
            fleet: stack.enter_context(up(shlex.split(fleet), model=given.checkpoint, **SETTINGS)) for fleet in given.up
        }
        before = {fleet: router.counters(COUNTERS) for fleet, router in routers.items()}
        for number in range(given.rounds):
            for fleet in turned(given.up, number):
                rounds[fleet].append(asyncio.run(converse(routers[fleet], sizes, str(number))))
                print(f"round {number + 1}, {fleet}: {by_turn(rounds[fleet][-1])}", flush=True)
        after = {fleet: router.counters(COUNTERS) for fleet, router in routers.items()}
    grown = {
        fleet: {name: value - before[fleet].get(name, 0.0) for name, value in found.items()}
        for fleet, found in after.items()
    }
    save("conversations", summary(rounds, grown))


if __name__ == "__main__":
    main()
