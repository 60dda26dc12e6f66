"""A whole measurement: reach the server, warm it up, then one run for each load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from baton.bench.interrupts import at_interrupt
from baton.bench.load.report import Objectives, bar, report
from baton.bench.load.runner import LoadPlan, LoadRun
from baton.bench.load.targets import PROBE, TEXT_PROBE, Endpoint, GrpcTarget, Target, is_grpc, wait_until_ready
from baton.bench.load.workload import (
    Job,
    Lengths,
    Line,
    Prompts,
    Shared,
    find_unknown_token,
    lengths,
    poisson,
    prompt_jobs,
    random_jobs,
    random_texts,
)
from baton.errors import ConfigError

DEFAULT_VOCAB = 1000
"""Used if the server does not report it; every model has at least this many ids."""
_WARMUP_USERS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A load: either `rate` (requests per second, Poisson) or `concurrency` (users of a closed loop)."""

    rate: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of a measurement.

    `prompts` are those of the file named `prompt_file`, in place of random ones. `max_concurrency` caps open loops.
    """

    endpoint: Endpoint
    loads: Sequence[Load]
    requests: int | None = None
    seconds: float | None = None
    inputs: Lengths = field(default_factory=lambda: lengths("256"))
    outputs: Lengths = field(default_factory=lambda: lengths("64"))
    shared: Shared | None = None
    prompts: Sequence[Line] = ()
    prompt_file: str | None = None
    max_concurrency: int | None = None
    vocab_size: int | None = None
    seed: int = 0
    warmup: int = 0
    timeout_s: float = 300.0
    wait_s: float = 0.0
    objectives: Objectives = field(default_factory=Objectives)

    @property
    def texts(self) -> bool:
        """Whether all prompts are texts. Then the server need not accept token ids."""
        return bool(self.prompts) and all(isinstance(each.prompt, str) for each in self.prompts)


def connect(endpoint: Endpoint) -> AbstractAsyncContextManager[Target]:
    """A target as a context that ends its connections. Raises ConfigError, naming a setting that can't be used."""
    if is_grpc(endpoint.url):
        return GrpcTarget(endpoint)
    # aiohttp comes with an extra.
    from baton.bench.load.http_target import http_target

    return http_target(endpoint)


async def measure(settings: LoadSettings, console: Console) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a report for each load when it is complete; the last one says if Ctrl-C or SIGTERM ended its run.

    Raises RequestFailed if the server can't serve a small request, ConfigError for settings that can't be used.
    """
    async with connect(settings.endpoint) as target:
        with console.status(f"waiting for {settings.endpoint.url}"):
            await wait_until_ready(target, settings.wait_s, settings.timeout_s, TEXT_PROBE if settings.texts else PROBE)
        told = await target.vocab_size()
        if told is not None and (problem := find_unknown_token(settings.prompts, told)):
            raise ConfigError(f"prompt_file: {problem}")
        vocab_size = settings.vocab_size or told or DEFAULT_VOCAB
        if settings.warmup:
            with console.status(f"warming up: {settings.warmup} requests"):
                await _warmed(target, settings, vocab_size)
        for number, load in enumerate(settings.loads):
            seed = f"{settings.seed}/{number}"
            most = settings.max_concurrency
            run = LoadRun(LoadPlan(load.concurrency, settings.requests, settings.seconds, settings.timeout_s, most))
            interrupt = partial(asyncio.get_running_loop().call_soon_threadsafe, run.interrupt)
            with at_interrupt(interrupt):
                async with bar(run, console):
                    await run.send_all(target, _jobs(settings, load, seed, vocab_size))
                # Here too a signal must not lose what is complete.
                workload = _workload(settings, load, vocab_size)
                found = report(run, settings.endpoint.url, workload, settings.objectives)
                await asyncio.sleep(0)
            yield {**found, "interrupted": run.interrupted}
            if run.interrupted:
                return


async def _warmed(target: Target, settings: LoadSettings, vocab_size: int) -> None:
    seed = f"{settings.seed}/warmup"
    plan = LoadPlan(_WARMUP_USERS, settings.warmup, None, settings.timeout_s)
    if settings.texts:
        jobs = random_texts(seed, settings.outputs)
    else:
        jobs = random_jobs(Prompts(seed, vocab_size, settings.shared), seed, settings.inputs, settings.outputs)
    await LoadRun(plan).send_all(target, jobs)


def _jobs(settings: LoadSettings, load: Load, seed: str, vocab_size: int) -> Iterator[Job]:
    prompts = Prompts(seed, vocab_size, settings.shared)
    due = None if load.rate is None else poisson(load.rate, random.Random(f"{seed}/arrivals"))
    if settings.prompts:
        return prompt_jobs(settings.prompts, seed, settings.outputs, due)
    return random_jobs(prompts, seed, settings.inputs, settings.outputs, due)


def _workload(settings: LoadSettings, load: Load, vocab_size: int) -> dict[str, Any]:
    """Requests that were sent, with all that is needed to send them again."""
    own: dict[str, Any]
    if settings.prompts:
        own = {"prompt_file": settings.prompt_file, "prompts": len(settings.prompts)}
        own["output_tokens"] = settings.outputs.text
    else:
        own = {"input_tokens": settings.inputs.text, "output_tokens": settings.outputs.text}
        shared = settings.shared
        own["shared_prefix"] = f"{shared.tokens}:{shared.groups}" if shared else None
    return {
        "model": settings.endpoint.model,
        "connections": settings.endpoint.connections if is_grpc(settings.endpoint.url) else None,
        "rate": load.rate,
        "concurrency": load.concurrency,
        "max_concurrency": settings.max_concurrency,
        **own,
        "requests": settings.requests,
        "seconds": settings.seconds,
        "vocab_size": vocab_size,
        "seed": settings.seed,
        "warmup": settings.warmup,
        "timeout_s": settings.timeout_s,
    }
