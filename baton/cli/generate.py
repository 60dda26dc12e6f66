"""`baton generate`: one request, streamed to the terminal or printed as one JSON object."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from baton.cli.account import as_json, print_account
from baton.cli.failures import EXIT_HELP, INTERRUPTED, fail
from baton.cli.options import DEFAULT_GRPC, Seconds, TokenIds, connection, connection_options, sampling_options
from baton.cli.prompts import read_messages, read_text
from baton.client import Client, Completion, Delta
from baton.completion import Prompt
from baton.config.options import Address, usage_errors
from baton.errors import BatonError
from baton.request import PARAMETERS, CachePolicy, PrefillProgress

_CACHING = ("cache", "cache_salt")
_POLICIES = [policy.value for policy in CachePolicy]

BAR_AFTER_S = 1.0
"""Seconds without output after which a prompt is worth a progress bar."""


@click.command(epilog=EXIT_HELP)
@click.argument("prompt", required=False)
@click.option("--target", type=Address(), default=DEFAULT_GRPC, show_default=True, help="The router.")
@click.option("--model", default="", help="Name of the served model.  [default: the only one]")
@connection_options
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the prompt, in UTF-8.")
@click.option("--token-ids", type=TokenIds(), help="The prompt as token ids.")
@click.option("--chat", type=click.Path(path_type=Path), help="JSON file with a list of {role, content}.")
@sampling_options
@click.option("--cache", type=click.Choice(_POLICIES), help="How the prefix cache is used.  [default: read_write]")
@click.option("--cache-salt", help="Share cached prefixes only with requests of the same salt.")
@click.option("--timeout", type=Seconds(), help="Deadline in seconds.")
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object at the end; logprobs need it.")
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
    """Complete PROMPT, or the prompt of --prompt-file, --token-ids or --chat."""
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
    if as_object:
        click.echo(json.dumps(as_json(completion), ensure_ascii=False))
    elif not quiet:
        print_account(completion)


class _PromptBar:
    """Shows on standard error how much of a long prompt is computed, if `wanted` and if that is a terminal."""

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
