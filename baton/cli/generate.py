"""`baton generate`: one request, streamed to the terminal or printed as one JSON object; and its prompts and account.

Prompts may be in files: text, a conversation, or one prompt a line. A finished request is shown to people as its
latency account.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from baton.cli.options import (
    DEFAULT_GRPC,
    EXIT_HELP,
    INTERRUPTED,
    Seconds,
    TokenIds,
    connection,
    connection_options,
    fail,
    sampling_options,
)
from baton.client import Choice, Client, Completion, Delta
from baton.completion import Prompt
from baton.config.options import Address, usage_errors
from baton.errors import BatonError, InvalidRequest, preview
from baton.request import CACHE_TIERS, PARAMETERS, CachePolicy, PrefillProgress, TokenInfo, Usage
from baton.rpc import calls

_NO_TEXT = "no text: the model has no tokenizer, or all tokens are special ones; --json shows their ids"
_CACHING = ("cache", "cache_salt")
_POLICIES = [policy.value for policy in CachePolicy]

BAR_AFTER_S = 1.0
"""Seconds without output after which a progress bar appears."""


@click.command(epilog=EXIT_HELP)
@click.argument("prompt", required=False)
@click.option("--target", type=Address(), default=DEFAULT_GRPC, show_default=True, help="The router.")
@click.option("--model", default="", help="Name of the served model.  [default: the only one]")
@connection_options
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the prompt, in UTF-8.")
@click.option("--token-ids", type=TokenIds(), help="The prompt as token ids.")
@click.option("--chat", type=click.Path(path_type=Path), help="JSON file with a list of {role, content}.")
@sampling_options
@click.option("--cache", type=click.Choice(_POLICIES), help="Use of the prefix cache.  [default: read_write]")
@click.option("--cache-salt", help="Share cached prefixes only with requests of the same salt.")
@click.option("--timeout", type=Seconds(), help="Deadline in seconds.")
@click.option(
    "--json",
    "as_object",
    is_flag=True,
    help="Print one JSON object at the end, with `choices` if there are several; logprobs need it.",
)
@click.option("--quiet", is_flag=True, help="Print neither progress nor latency account.")
def generate(
    prompt: str | None,
    target: str,
    model: str,
    prompt_file: Path | None,
    token_ids: list[int] | None,
    chat: Path | None,
    timeout: float | None,
    as_object: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Complete PROMPT, or the prompt of --prompt-file, --token-ids or --chat.

    Sampling flags that are not given have the values of the model's generation_config.json, or else the defaults below.
    """
    reach = connection(flags)
    wanted = _prompt(prompt, prompt_file, token_ids, chat)
    for name in ("logprobs", "prompt_logprobs"):
        if flags[name] is not None and not as_object:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --json, which shows the report")
    sampling = {name: flags[name] for name in PARAMETERS if flags[name] not in (None, (), {})}
    caching = {name: flags[name] for name in _CACHING if flags[name] is not None}
    printer = _Printer(live=not as_object, several=sampling.get("n", 1) > 1)
    completion, bar = Completion(), _PromptBar(wanted=not (as_object or quiet))
    try:
        with usage_errors():
            client = Client(target, model=model, **reach)
        with client, bar:
            for delta in client.generate(wanted, timeout=timeout, report_progress=bar.wanted, **caching, **sampling):
                if delta.progress is not None:
                    bar.show(delta.progress)
                    continue
                bar.hide()
                completion.add(delta)
                printer.show(delta, completion)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BatonError as error:
        printer.end()
        fail(error)
    printer.end()
    if not (as_object or quiet or any(choice.text for choice in completion.choices)):
        click.echo(_NO_TEXT, err=True)
    if as_object:
        click.echo(json.dumps(as_json(completion), ensure_ascii=False))
    elif not quiet:
        print_account(completion)


class _PromptBar:
    """Shows the computed part of a long prompt on standard error, if `wanted` and if standard error is a terminal."""

    def __init__(self, *, wanted: bool) -> None:
        console = Console(stderr=True)
        self.wanted = wanted and sys.stderr.isatty() and console.is_interactive
        columns = (
            TextColumn("prompt"),
            BarColumn(bar_width=20, finished_style="bar.complete"),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("")
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def show(self, progress: PrefillProgress) -> None:
        """Draw the bar, if BAR_AFTER_S have passed."""
        if time.monotonic() < self._began + BAR_AFTER_S:
            return
        text = f"{progress.tokens_done:,}/{progress.tokens_total:,} tokens"
        if progress.seconds_left is not None:
            left = timedelta(seconds=round(progress.seconds_left))
            text += f", {progress.tokens_per_second:,.0f}/s, {left} left"
        self._bar.update(self._task, total=progress.tokens_total, completed=progress.tokens_done, description=text)
        self._bar.start()
        self._bar.refresh()

    def hide(self) -> None:
        """Take the bar away; the cursor is where it was before."""
        if self._bar.live.is_started:
            self._bar.stop()


class _Printer:
    """Writes text as it comes. If there are several choices, writes each one when it has ended."""

    def __init__(self, *, live: bool, several: bool) -> None:
        self._live, self._several = live, several
        self._column_0 = True

    def show(self, delta: Delta, completion: Completion) -> None:
        """Write the new text of this delta."""
        if not self._live:
            return
        if not self._several:
            self._write(delta.text)
        elif delta.finish_reason:
            self._write(f"[{delta.index}] {completion.choices[delta.index].text}")
            self.end()

    def end(self) -> None:
        """Begin a new line, unless the cursor is at the beginning of one."""
        if not self._column_0:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            # Bytes, so that text in any script reaches a terminal of any locale.
            click.echo(text.encode("utf-8", "replace"), nl=False)
            self._column_0 = text.endswith("\n")


def _prompt(text: str | None, file: Path | None, token_ids: list[int] | None, chat: Path | None) -> Prompt:
    given = [value for value in (text, file, token_ids, chat) if value is not None]
    if len(given) != 1:
        raise click.UsageError("give one of PROMPT, --prompt-file, --token-ids, --chat")
    if file is not None:
        return read_text("--prompt-file", file)
    if chat is not None:
        return read_messages(chat)
    return text if text is not None else token_ids or []


_FORMS = {
    "text": "a text that is not empty",
    "token_ids": "a list of token ids that is not empty",
    "messages": "a list of {role, content} that is not empty",
}
_SHOWN = 5


def read_text(flag: str, file: Path) -> str:
    """The content of the file that `flag` names; raises click.BadParameter."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise bad(flag, f"{str(file)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise bad(flag, f"{str(file)!r} is not valid UTF-8 at byte {error.start} (0x{byte:02x})") from None


def read_messages(file: Path) -> list[dict[str, str]]:
    """The conversation in the file of --chat: a JSON list of {role, content}; raises click.BadParameter."""
    try:
        messages = json.loads(read_text("--chat", file))
    except (ValueError, RecursionError) as error:
        raise bad("--chat", f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise bad("--chat", f"{str(file)!r} must hold a list of {{role, content}}")
    return messages


def read_prompts(file: Path) -> dict[int, Prompt]:
    """The prompts in the file of --prompt-file by their lines, from 1.

    A .jsonl file has one prompt in each line, any other file is one prompt. A line of .jsonl is an object with one of
    text, token_ids and messages; empty lines are passed over. Raises click.BadParameter naming each line that can't be
    a prompt.
    """
    text = read_text("--prompt-file", file)
    if file.suffix != ".jsonl":
        lines: dict[int, Any] = {1: text} if text else {}
    else:
        # Not `splitlines`: strings may contain other characters that Unicode treats as the end of a line.
        lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    found, problems = {}, []
    for number, line in lines.items():
        try:
            found[number] = _checked(line if file.suffix != ".jsonl" else _prompt_of(line))
        except InvalidRequest as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise bad("--prompt-file", f"{str(file)!r}, {'; '.join(problems[:_SHOWN])}{more}")
    if not found:
        raise bad("--prompt-file", f"{str(file)!r} holds no prompt")
    return found


def bad(flag: str, problem: str) -> click.BadParameter:
    """The error for the value of a flag."""
    return click.BadParameter(problem, param_hint=f"'{flag}'")


def _prompt_of(line: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("prompt", f"is not JSON: {error}") from None
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= _FORMS.keys():
        raise InvalidRequest("prompt", f"must be an object with one of {', '.join(_FORMS)}, got {preview(value)}")
    ((form, prompt),) = value.items()
    kind = str if form == "text" else list
    if not isinstance(prompt, kind) or not prompt or (form != "text" and _is_chat(prompt) != (form == "messages")):
        raise InvalidRequest(form, f"must be {_FORMS[form]}, got {preview(prompt)}")
    return prompt


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt[0], dict)


def _checked(prompt: Prompt) -> Prompt:
    """The prompt, after the checks of a client."""
    calls.generate_request("", prompt, {})
    return prompt


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
    """Write the latency account and the usage of a request to `console` (default: standard error)."""
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
    """The number of cached prompt tokens by tier, and the number that decode already had."""
    counts = {title: getattr(usage.cached, name) for name, title in CACHE_TIERS.items()}
    sources = ", ".join(f"{count} from {title}" for title, count in counts.items() if count)
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
