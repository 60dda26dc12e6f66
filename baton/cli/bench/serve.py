"""`baton bench serve`: sends load to a server, and measures its latencies and throughput."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from baton.cli.options import FAILED, INTERRUPTED, ReportFile, Seconds, connection, connection_options
from baton.config.options import usage_errors

if TYPE_CHECKING:
    from baton.bench.load.session import Load, LoadSettings

_EPILOG = (
    "TARGET is grpc://HOST:PORT for Baton, or http://HOST:PORT/v1/completions for any OpenAI-compatible server. A DIST "
    "of lengths is N or uniform:LOW:HIGH. Exit status: 0 measured, 1 no "
    "request finished or the server can't be reached, 2 bad usage, 130 Ctrl-C or SIGTERM."
)


class _Numbers(click.ParamType[list[float]]):
    """Numbers above 0, separated by commas."""

    name = "N[,N...]"

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        """The numbers, at least one."""
        try:
            numbers = [int(text) if self._whole else float(text) for text in str(value).split(",")]
        except ValueError:
            numbers = [0]
        if not all(0 < number < 1e6 for number in numbers):
            kind = "whole numbers" if self._whole else "numbers"
            self.fail(f"must be {kind} above 0 with commas between them, got {value!r}", param, ctx)
        return numbers


class _Body(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object."""
        try:
            body = value if isinstance(value, dict) else json.loads(value)
        except ValueError as error:
            self.fail(f"is not JSON: {error}", param, ctx)
        if not isinstance(body, dict):
            self.fail(f"must be an object, got {value!r}", param, ctx)
        return body


@click.command(epilog=_EPILOG)
@click.argument("target")
@click.option("--model", default="", help="Name of the served model.  [default: the only one of a Baton fleet]")
@click.option(
    "--rate", "--rates", "rates", type=_Numbers(whole=False), help="Poisson arrivals per second; R,R: a sweep."
)
@click.option("--concurrency", type=_Numbers(whole=True), help="Number of requests open at a time; N,N: a sweep.")
@click.option(
    "--max-concurrency",
    type=click.IntRange(1, 16384),
    help="Largest number of open requests, with --rate; later ones wait.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Number of requests to send, for each load.")
@click.option("--seconds", type=Seconds(), help="Time to send requests, for each load.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    help='JSON lines, {"text": ...} or {"token_ids": [...]}, with "max_tokens" and "cache_salt" if wanted.',
)
@click.option("--input-tokens", metavar="DIST", help="Length of prompts.  [default: 256]")
@click.option("--output-tokens", metavar="DIST", help="Length of outputs.  [default: 64]")
@click.option(
    "--shared-prefix", metavar="TOKENS[:GROUPS]", help="Tokens before each prompt, the same for all prompts of a group."
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=8),
    help="Prompts have token ids below this.  [default: the model's, or 1000]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of arrivals, lengths and prompts.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="Number of requests sent before the measurement.")
@click.option("--timeout", type=Seconds(), default=300.0, show_default=True, help="Seconds for each request.")
@click.option("--wait", type=Seconds(), help="Seconds to wait for a server that does not answer yet.  [default: none]")
@click.option(
    "--slo-ttft-ms",
    type=click.FloatRange(min=0),
    default=2000.0,
    show_default=True,
    help="Largest TTFT of a good request.",
)
@click.option(
    "--slo-itl-ms",
    type=click.FloatRange(min=0),
    default=50.0,
    show_default=True,
    help="Largest mean time between tokens of a good request.",
)
@click.option(
    "--connections",
    type=click.IntRange(1, 1024),
    help="Connections that requests use in turn; grpc:// only. Each reaches one process of a router with --processes."
    "  [default: 8]",
)
@click.option("--tokenizer", default="", metavar="FILE", help="Send prompts as text of this tokenizer.json; HTTP only.")
@click.option("--body", type=_Body(), default="{}", help="More fields of each HTTP request; null removes a field.")
@click.option("--json", "json_file", type=ReportFile(dash=True), help="File for the report; -: standard output.")
@connection_options
def serve(target: str, json_file: Path | None, **flags: Any) -> None:
    """Send load to the server at TARGET, and report its latencies and throughput.

    Prompts are random token ids, or come from a file; outputs are greedy and have exactly the requested length.
    Latencies are the client's: TTFT, ITL (between events), TPOT (a request's mean per token), end to end.
    """
    import gc

    from rich.console import Console

    from baton.bench.interrupts import at_interrupt, interrupt
    from baton.bench.load.outcome import RequestFailed
    from baton.cli.options import output

    settings = _settings(target, flags)
    console = Console(stderr=True, highlight=False, markup=False)
    # Objects that exist now stay: exclude them from garbage collections while requests are timed.
    gc.freeze()
    reports: list[dict[str, Any]] = []
    interrupted = False
    try:
        # Between runs; a run handles Ctrl-C itself.
        with usage_errors(), at_interrupt(interrupt):
            table = None if json_file == Path("-") else output()
            asyncio.run(_measure(settings, console, table, reports))
    except RequestFailed as error:
        click.echo(f"error: {target} does not serve: {error.kind}: {error}", err=True)
        sys.exit(FAILED)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing; in the checkout: pip install '.[bench]'") from None
    except KeyboardInterrupt:
        if not reports:
            raise
        interrupted = True
    _write(reports, many=len(settings.loads) > 1, json_file=json_file)
    if interrupted or any(each["interrupted"] for each in reports):
        sys.exit(INTERRUPTED)
    sys.exit(0 if any(each["requests"]["finished"] for each in reports) else FAILED)


async def _measure(settings: LoadSettings, console: Any, table: Any, reports: list[dict[str, Any]]) -> None:
    """Append the report of each load to `reports`, and show it when it is complete."""
    from baton.bench.load.report import print_report, warnings
    from baton.bench.load.session import measure

    # Closed here in any case, for example when the reader of standard output goes away.
    async with aclosing(measure(settings, console)) as runs:
        async for each in runs:
            reports.append(each)
            if table is not None:
                print_report(each, table)
            for warning in warnings(each):
                click.echo(f"warning: {warning}", err=True)


def _write(reports: list[dict[str, Any]], *, many: bool, json_file: Path | None) -> None:
    text = json.dumps(reports if many else reports[0])
    try:
        if json_file == Path("-"):
            click.echo(text)
        elif json_file is not None:
            json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(str(error)) from None


def _settings(target: str, flags: dict[str, Any]) -> LoadSettings:
    """Settings from the flags; raises click.UsageError for flags that exclude each other."""
    from baton.bench.load.report import Objectives
    from baton.bench.load.session import LoadSettings
    from baton.bench.load.targets import CONNECTIONS, Endpoint, is_grpc

    try:
        grpc = is_grpc(target)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'TARGET'") from None
    if grpc and (flags["tokenizer"] or flags["body"]):
        raise click.UsageError("--tokenizer and --body are for http:// targets")
    if not grpc and flags["connections"] is not None:
        raise click.UsageError("--connections is for grpc:// targets: over HTTP each open request has one")
    reach = connection(flags)
    if not grpc and _from_environment("api_key"):
        # BATON_API_KEY is only for Baton.
        reach["api_key"] = None
    connections = flags["connections"] or CONNECTIONS
    endpoint = Endpoint(target, flags["model"], reach, flags["body"], flags["tokenizer"], connections)
    loads = _loads(flags)
    more: dict[str, Any] = {"shared": _shared(flags["shared_prefix"]), **_prompts(flags)}
    for name, field in (("input_tokens", "inputs"), ("output_tokens", "outputs")):
        if flags[name] is not None:
            more[field] = _lengths(name, flags[name])
    once = None if flags["seconds"] else len(more.get("prompts", ())) or None
    return LoadSettings(
        endpoint,
        loads,
        requests=flags["requests"] or once,
        seconds=flags["seconds"],
        max_concurrency=flags["max_concurrency"],
        vocab_size=flags["vocab_size"],
        seed=flags["seed"],
        warmup=flags["warmup"],
        timeout_s=flags["timeout"],
        wait_s=flags["wait"] or 0.0,
        objectives=Objectives(flags["slo_ttft_ms"], flags["slo_itl_ms"]),
        **more,
    )


def _from_environment(parameter: str) -> bool:
    return click.get_current_context().get_parameter_source(parameter) is ParameterSource.ENVIRONMENT


def _loads(flags: dict[str, Any]) -> list[Load]:
    from baton.bench.load.session import Load

    rates, concurrency = flags["rates"], flags["concurrency"]
    if (rates is None) == (concurrency is None):
        raise click.UsageError("give one of --rate, --concurrency")
    if concurrency is not None and flags["max_concurrency"] is not None:
        raise click.UsageError("--max-concurrency is for --rate: --concurrency is a cap of its own")
    both = flags["requests"] is not None and flags["seconds"] is not None
    if both or (flags["requests"] is None and flags["seconds"] is None and flags["prompt_file"] is None):
        raise click.UsageError("give one of --requests, --seconds")
    return [Load(rate=rate) for rate in rates or ()] + [Load(concurrency=int(each)) for each in concurrency or ()]


def _prompts(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings of --prompt-file."""
    file = flags["prompt_file"]
    if file is None:
        return {}
    from baton.bench.load.workload import PromptFileError, read

    for name in ("input_tokens", "shared_prefix", "vocab_size"):
        if flags[name] is not None:
            raise click.UsageError(
                f"--{name.replace('_', '-')} does not go with --prompt-file, which contains the prompts"
            )
    try:
        return {"prompts": read(file), "prompt_file": file.name}
    except (OSError, UnicodeDecodeError, PromptFileError) as error:
        raise click.BadParameter(f"{str(file)!r}: {error}", param_hint="'--prompt-file'") from None


def _lengths(name: str, text: str) -> Any:
    from baton.bench.load.workload import lengths

    try:
        return lengths(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'--{name.replace('_', '-')}'") from None


def _shared(text: str | None) -> Any:
    from baton.bench.load.workload import Shared

    if text is None:
        return None
    numbers = text.split(":")
    if len(numbers) > 2 or not all(each.isdecimal() and 0 < int(each) < 2**31 for each in numbers):
        raise click.BadParameter(f"must be TOKENS[:GROUPS], got {text!r}", param_hint="'--shared-prefix'")
    return Shared(*map(int, numbers))
