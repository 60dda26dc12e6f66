"""A finished request for people (the latency account) and for programs (one JSON object)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.client import Choice, Completion
from baton.request import TokenInfo, Usage

_SOURCES = {"pool": "pool", "host": "host memory", "redis": "Redis", "peer": "a decode worker"}
_ACCOUNT = {
    "queue": "queue",
    "prefill": "prefill",
    "transfer": "transfer",
    "slot_wait": "slot wait",
    "decode": "decode",
    "total": "total",
}
"""Fields of the timings, and their titles."""


def print_account(completion: Completion, console: Console | None = None) -> None:
    """Write where the request's time went, and its usage, to `console` (default: standard error)."""
    console = console or Console(stderr=True, highlight=False)
    if (timings := completion.timings_ms) is not None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in _ACCOUNT.values():
            table.add_column(title, justify="right")
        table.add_row(*(f"{getattr(timings, name):.1f} ms" for name in _ACCOUNT))
        console.print(table)
        console.print(f"first token {timings.first_token:.1f} ms, ITL {timings.mean_itl:.2f} ms", style="dim")
    if (usage := completion.usage) is not None:
        reasons = [choice.finish_reason.value for choice in completion.choices if choice.finish_reason]
        console.print(
            f"prompt {usage.prompt_tokens} tokens ({describe_cached(usage)}), "
            f"completion {usage.completion_tokens} tokens, finish reason {', '.join(reasons)}",
            style="dim",
            soft_wrap=not console.is_terminal,
        )


def describe_cached(usage: Usage) -> str:
    """The number of cached prompt tokens, where they came from, and how many decode already had."""
    counts = {words: getattr(usage.cached, name) for name, words in _SOURCES.items()}
    sources = ", ".join(f"{count} from {words}" for words, count in counts.items() if count)
    held = f"; {usage.cached.decode} held by decode" if usage.cached.decode else ""
    return f"{usage.cached_tokens} cached{': ' if sources else ''}{sources}{held}"


def as_json(completion: Completion) -> dict[str, Any]:
    """The completion as plain values: the first choice at the top, and all under `choices` if there are several."""
    usage, timings = completion.usage, completion.timings_ms
    result = {"request_id": completion.request_id} | (_choice(completion.choices[0]) if completion.choices else {})
    if completion.prompt_tokens:
        result["prompt_logprobs"] = [_token(token) for token in completion.prompt_tokens]
    result["usage"] = asdict(usage) if usage else None
    result["timings_ms"] = asdict(timings) if timings else None
    if len(completion.choices) > 1:
        result["choices"] = [{"index": choice.index} | _choice(choice) for choice in completion.choices]
    return result


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
        "stop": choice.stop,
        "logprobs": None if choice.logprobs is None else [_token(token) for token in choice.logprobs],
    }


def _token(token: TokenInfo) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top]
    return {"token_id": token.token_id, "logprob": token.logprob, "top": top}
