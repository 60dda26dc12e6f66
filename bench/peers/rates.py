"""Engines side by side: prefill and decode of every peer in turns, with probes of the machine beside Baton's.

In each round each case is run by all peers before the next case begins, in an order that moves on with the round. A
ratio is Baton's rate over the peer's in the same round; of all rounds the median is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from baton.bench.roofline import ModelShape, decode_bytes, prefill_flops

PEERS = ("baton", "vllm", "llama", "transformers")
SLOW = ("llama", "transformers")
"""Are asked for long prompts in the first round only: no bar is about them there, and they take minutes."""

LONG_TOKENS = 8192
BYTES = 2
"""Of a bfloat16."""

Case = dict[str, int]


class Asked(Protocol):
    """A runner, as `bench.peers.process.Runner`."""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command."""


def decode_cases(quick: bool) -> list[Case]:
    """Batches at contexts; steps that keep each run at about a second."""
    steps = {1: 16, 8: 12, 32: 8}
    if quick:
        return [{"batch": batch, "context": 128, "steps": 3} for batch in (1, 8)]
    # Batch 1 is all bandwidth, which moves most: it has two turns.
    return [
        {"batch": batch, "context": context, "steps": steps[batch]}
        for context in (128, 1024)
        for batch in (1, 8, 32, 1)
    ]


def prefill_cases(quick: bool) -> list[Case]:
    """Prompt lengths."""
    return [{"tokens": tokens} for tokens in ((128, 512) if quick else (128, 512, 2048, LONG_TOKENS))]


def measure(
    runners: Mapping[str, Asked],
    command: str,
    cases: Sequence[Case],
    rounds: int,
    shape: ModelShape,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Rates of all cases by name; see `summary`."""
    samples: dict[str, dict[str, list[float]]] = {}
    shares: dict[str, list[float]] = {}
    for number in range(rounds):
        for case in cases:
            name = case_name(case)
            tell(f"{command} {name}, round {number + 1}")
            for peer in _order(list(runners), number):
                if number and peer in SLOW and case.get("tokens", 0) >= LONG_TOKENS:
                    continue
                before = runners[peer].ask("probe") if peer == "baton" else {}
                seconds = runners[peer].ask(command, **case)["seconds"]
                if peer == "baton":
                    after = runners[peer].ask("probe")
                    shares.setdefault(name, []).append(share(case, seconds, before, after, shape))
                samples.setdefault(name, {}).setdefault(peer, []).append(rate(case, seconds))
    return {name: summary(found, shares.get(name, [])) for name, found in samples.items()}


def summary(found: Mapping[str, Sequence[float]], shares: Sequence[float]) -> dict[str, Any]:
    """Medians of the peers' tokens a second, ratios of Baton's to theirs, and the share of the machine's peak."""
    ours = found.get("baton", ())
    ratios = {
        peer: statistics.median(mine / theirs for mine, theirs in zip(ours, values, strict=False))
        for peer, values in found.items()
        if peer != "baton" and ours
    }
    return {
        "tokens_per_s": {peer: statistics.median(values) for peer, values in found.items()},
        "ratios": ratios,
        "of_peak": statistics.median(shares) if shares else None,
        "rounds": {peer: list(values) for peer, values in found.items()},
    }


def rate(case: Case, seconds: float) -> float:
    """Tokens a second."""
    return case.get("tokens", case.get("batch", 0) * case.get("steps", 0)) / seconds


def share(
    case: Case, seconds: float, before: Mapping[str, float], after: Mapping[str, float], shape: ModelShape
) -> float:
    """MFU of a prefill (causal operations only) or MBU of decode steps, against the mean of two probes."""
    if tokens := case.get("tokens"):
        return prefill_flops(shape, tokens) / seconds * 2 / (before["flops_per_s"] + after["flops_per_s"])
    at = case["context"] + case["steps"] // 2
    moved = decode_bytes(shape, case["batch"], at, shape.step_weights * BYTES, shape.kv_token_bytes(BYTES))
    return moved * case["steps"] / seconds * 2 / (before["bytes_per_s"] + after["bytes_per_s"])


def case_name(case: Case) -> str:
    """Such as "b8 c128" or "2048"."""
    return str(case["tokens"]) if "tokens" in case else f"b{case['batch']} c{case['context']}"


def _order(peers: list[str], number: int) -> list[str]:
    turn = number % len(peers)
    return peers[turn:] + peers[:turn]
