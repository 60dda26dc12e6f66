"""A decode worker is killed under running streams: what clients read is what they would have read without."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton import AsyncClient
from baton.completion import Completion
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import Fleet
from tests.metrics import sample

START_S = 60
LONG = 250
STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95, "ignore_eos": True},
    "penalties": {
        "temperature": 0.7,
        "seed": 8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "ignore_eos": True,
    },
    "logprobs": {"temperature": 0.8, "seed": 9, "logprobs": 3, "ignore_eos": True},
    "choices": {"temperature": 1.0, "seed": 10, "n": 2, "ignore_eos": True},
    "minimum": {"temperature": 1.0, "seed": 11, "min_tokens": LONG},
}


@dataclass
class Victim:
    """A decode worker in a process of its own."""

    addresses: SimpleNamespace
    process: asyncio.subprocess.Process

    def kill(self) -> None:
        """Kill as the kernel does."""
        self.process.send_signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def victim(checkpoint: Path) -> AsyncIterator[Victim]:
    command = [sys.executable, "-m", "decode_svc", "--model", str(checkpoint), "--served-model-name", "m"]
    flags = ["--dtype", "float32", "--kv-memory", "64MiB", "--threads", "1"]
    process = await asyncio.create_subprocess_exec(*command, *flags, stdout=PIPE, env=os.environ)
    try:
        async with asyncio.timeout(START_S):
            _, *pairs = (await process.stdout.readline()).decode().split()
        yield Victim(SimpleNamespace(**dict(pair.split("=") for pair in pairs)), process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def replays(cause: str) -> float:
    return sample("baton_replays_total", cause=cause)


async def read(client: AsyncClient, sampling: dict[str, Any], begun: asyncio.Event) -> Completion:
    """A stream, as read; sets `begun` at the fifth delta."""
    completion, deltas = Completion(), 0
    async for delta in client.generate(prompt_ids(20), max_tokens=LONG, timeout=240, **sampling):
        completion.add(delta)
        deltas += 1
        if deltas == 5:
            begun.set()
    return completion


def told(completion: Completion) -> list[tuple[Any, ...]]:
    """Output of each choice at a client, without the numbers of log-probabilities."""
    return [
        (choice.text, choice.finish_reason, choice.stop, choice.token_ids, [len(t.top) for t in choice.tokens])
        for choice in completion.choices
    ]


def logprobs(completion: Completion) -> list[float]:
    """Log-probabilities of tokens and their alternatives, whose last bits depend on the batch."""
    return [
        number
        for choice in completion.choices
        for token in choice.tokens
        for number in (token.logprob or 0.0, *(logprob for _, logprob in token.top))
    ]


async def test_streams_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    async with Fleet(checkpoint, dtype="float32") as fleet, victim(checkpoint) as doomed:
        prefill = await fleet.prefill()
        survivor = await fleet.decode(kv_memory=32 << 20)
        calm = await fleet.router([prefill], [survivor])
        streams = dict(STREAMS)
        async with asyncio.TaskGroup() as group:
            undisturbed = {name: group.create_task(read(calm, s, asyncio.Event())) for name, s in streams.items()}
        expected = {name: task.result() for name, task in undisturbed.items()}
        # A stop string that comes late in the greedy stream, so that the kill comes before it.
        text = expected["greedy"].text
        stop = next(text[at : at + 6] for at in range(len(text) // 2, len(text)) if text.index(text[at : at + 6]) == at)
        streams["stop string"] = {**STREAMS["greedy"], "stop": [stop]}
        expected["stop string"] = await read(calm, streams["stop string"], asyncio.Event())

        app = await fleet.start_router([prefill], [doomed, survivor], max_attempts=1)
        both = asyncio.Event()
        app.pool.subscribe(both.set)
        async with asyncio.timeout(START_S):
            while len(app.pool.fleet.decode) < 2:
                both.clear()
                await both.wait()
        client = await fleet.client(app)
        before = replays("lost"), replays("fault")
        begun = {name: asyncio.Event() for name in streams}
        async with asyncio.TaskGroup() as group:
            reading = {name: group.create_task(read(client, streams[name], begun[name])) for name in streams}
            for event in begun.values():
                await event.wait()
            doomed.kill()
        found = {name: task.result() for name, task in reading.items()}
        for name, completion in expected.items():
            assert told(found[name]) == told(completion), name
            assert logprobs(found[name]) == pytest.approx(logprobs(completion), abs=1e-3), name
        assert replays("lost") - before[0] >= 2
        assert replays("fault") == before[1]
