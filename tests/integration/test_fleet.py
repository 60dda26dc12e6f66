"""A fleet of real workers: deaths, damaged transfers, other dtypes and peers change no answer; progress is told."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from prometheus_client import REGISTRY

import prefill_svc.progress
from baton import AsyncClient, bundled
from baton.completion import Completion
from baton.engine.fake import FakeEngine, expected_tokens
from baton.request import PrefillProgress
from baton.telemetry.metrics import UNSHARED_TOKENS
from baton.transfer.export import Export
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.fleet import SECRET, Fleet
from tests.metrics import count, sample
from tests.prefill import WAIT_S, Gate, fetch_all
from tests.redis_server import running as redis

START_S = 60
LONG = 250
STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"seed": 8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 0.8, "seed": 9, "logprobs": 3},
    "choices": {"seed": 10, "n": 2},
    "minimum": {"seed": 11, "min_tokens": LONG},
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
    settings = {"max_tokens": LONG, "ignore_eos": "min_tokens" not in sampling, **sampling}
    async for delta in client.generate(prompt_ids(20), timeout=240, **settings):
        completion.add(delta)
        deltas += 1
        if deltas == 5:
            begun.set()
    return completion


async def read_http(base: str, begun: asyncio.Event) -> tuple[str, str]:
    """Text and end of the greedy stream over HTTP, as read; sets `begun` at the fifth event with text."""
    text, events, end = "", 0, ""
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=240) as client:
        more = {"ignore_eos": True}
        stream = await client.completions.create(
            model="m", prompt=prompt_ids(20), max_tokens=LONG, temperature=0, stream=True, extra_body=more
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            end = chunk.choices[0].finish_reason or end
            events += 1
            if events == 5:
                begun.set()
    return text, end


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

        app = await fleet.start_router([prefill], [doomed, survivor], max_attempts=1, http="127.0.0.1:0")
        both = asyncio.Event()
        app.pool.subscribe(both.set)
        async with asyncio.timeout(START_S):
            while len(app.pool.fleet.decode) < 2:
                both.clear()
                await both.wait()
        client = await fleet.client(app)
        before = replays("lost"), replays("fault")
        # Streams are shared out between the two workers, so of two the same one is on the worker that dies.
        over_http = ("http 0", "http 1")
        begun = {name: asyncio.Event() for name in (*streams, *over_http)}
        base = f"http://{app.http_address}"
        async with asyncio.TaskGroup() as group:
            reading = {name: group.create_task(read(client, streams[name], begun[name])) for name in streams}
            http = [group.create_task(read_http(base, begun[name])) for name in over_http]
            for event in begun.values():
                await event.wait()
            doomed.kill()
        greedy = expected["greedy"].choices[0]
        assert [task.result() for task in http] == [(greedy.text, "length")] * 2
        found = {name: task.result() for name, task in reading.items()}
        for name, completion in expected.items():
            assert told(found[name]) == told(completion), name
            assert logprobs(found[name]) == pytest.approx(logprobs(completion), abs=1e-3), name
        assert replays("lost") - before[0] >= 2
        assert replays("fault") == before[1]


SETTINGS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
Frames = AsyncGenerator[bytes, None]


def faults() -> float:
    """Faults of all kinds that were caught."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "baton_transfer_faults_total")


async def flip_one_bit(frames: Frames) -> Frames:
    first = True
    async for frame in frames:
        data = bytearray(frame)
        if first:
            data[-1] ^= 1
        first = False
        yield bytes(data)


async def lose_one_frame(frames: Frames) -> Frames:
    index = 0
    async for frame in frames:
        if index != 1:
            yield frame
        index += 1


@pytest.mark.parametrize(("tamper", "streams"), [(flip_one_bit, 1), (flip_one_bit, 2), (lose_one_frame, 1)])
async def test_a_damaged_transfer_never_changes_the_answer(
    tamper: Callable[[Frames], Frames], streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_ids(90)
    honest = Export.frames
    damaged = 0

    async def frames(self: Export, *kv_slice: Any) -> Frames:
        nonlocal damaged
        damaged += 1
        stream = honest(self, *kv_slice)
        async for frame in tamper(stream) if damaged <= streams else stream:
            yield frame

    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        client = await fleet.router([await fleet.prefill()], [await fleet.decode()])
        expected = await client.complete(prompt, **SETTINGS)
        before = faults()
        monkeypatch.setattr(Export, "frames", frames)
        found = await client.complete(prompt, **SETTINGS)
        after = faults()
    assert damaged >= streams
    assert found.token_ids == expected.token_ids
    assert after > before


async def refusal(app: Any) -> str:
    """Reason for the router's incomplete fleet, once it has refused a worker."""
    told = asyncio.Event()
    app.pool.subscribe(told.set)
    while "is refused" not in app.pool.describe_missing():
        await told.wait()
        told.clear()
    return str(app.pool.describe_missing())


async def test_kv_of_another_dtype_needs_to_be_asked_for(tmp_path: Path) -> None:
    prompt = prompt_ids(40)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32") as fleet:
        prefill = await fleet.prefill(kv_dtype="bfloat16")
        reason = await refusal(await fleet.start_router([prefill], [await fleet.decode()]))
        assert "k bfloat16" in reason
        assert "k float32" in reason
        same = await fleet.router([prefill], [await fleet.decode(kv_dtype="bfloat16")])
        converting = await fleet.router([prefill], [await fleet.decode(convert_kv=True)])
        short = {**SETTINGS, "max_tokens": 2}
        expected = await same.complete(prompt, **short)
        found = await converting.complete(prompt, **short)
    assert found.token_ids == expected.token_ids


async def test_a_follow_up_turn_is_fetched_from_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_all(monkeypatch)
    prompt = prompt_ids(100)
    async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32", page_size=16, block_size=16) as fleet:
        decode = await fleet.decode()
        first = await fleet.router([await fleet.prefill()], [decode])
        told = await first.complete(prompt, max_tokens=30, temperature=0, ignore_eos=True)
        turn = [*prompt, *(token.token_id for token in told.choices[0].tokens), *prompt_ids(20, seed=1)]
        # This router's prefill worker has seen nothing.
        second = await fleet.router([await fleet.prefill()], [decode])
        plain = await first.complete(turn, max_tokens=8, temperature=0, ignore_eos=True, cache="off")
        found = await second.complete(turn, max_tokens=8, temperature=0, ignore_eos=True)
        # All but the last output token has KV at decode; whole blocks of it are held.
        held = (len(prompt) + 29) // 16 * 16
        assert (found.usage.cached_tokens, found.usage.cached.peer, found.usage.cached.decode) == (held, held, held)
        assert found.choices[0].tokens == plain.choices[0].tokens


@pytest.mark.parametrize("converts", [True, False])
async def test_blocks_decoded_by_a_converting_worker_are_left_to_nobody(converts: bool, tmp_path: Path) -> None:
    """Its blocks would have the names of KV that was computed from a context in its own element type."""
    with redis("valkey", tmp_path) as server:
        async with Fleet(make_checkpoint("llama", tmp_path), dtype="float32", fleet_secret=SECRET) as fleet:
            prefill = await fleet.prefill(kv_dtype="bfloat16" if converts else "float32", redis="none")
            worker = await fleet.decode(redis=server.url, convert_kv=converts)
            client, unshared = await fleet.router([prefill], [worker]), count(UNSHARED_TOKENS)
            await client.complete(prompt_ids(100), max_tokens=40, temperature=0, ignore_eos=True)
            await worker.drain()
            await worker.cache.flush()
            shared = (server.client().dbsize() > 0, worker.engine.stats().cached > 0)
            assert shared == (not converts, not converts)
            assert count(UNSHARED_TOKENS) - unshared == (100 if converts else 0)


PROMPT = [(7 * i) % 1000 for i in range(40)]
CHUNK, LAYERS = 10, 2


async def test_a_client_that_asks_is_told_after_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_svc.progress, "INTERVAL_S", 0.0)
    gate = Gate()
    engine = FakeEngine(chunk_time=1.0, delay=gate, layers=LAYERS)
    async with asyncio.timeout(WAIT_S), Fleet(bundled.path(), stall_s=WAIT_S) as fleet:
        prefill = await fleet.prefill(engine=engine, chunk_size=CHUNK)
        client = await fleet.router([prefill], [await fleet.decode(engine=FakeEngine(layers=LAYERS))])
        sampling = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
        async with aclosing(client.generate(PROMPT, report_progress=True, **sampling)) as stream:
            # Each chunk begins only after the report on the one before was read.
            assert (await anext(stream)).progress == PrefillProgress(0, len(PROMPT))
            for done in range(CHUNK, len(PROMPT) + 1, CHUNK):
                gate.pass_layers(LAYERS)
                progress = (await anext(stream)).progress
                assert (progress.tokens_done, progress.tokens_total) == (done, len(PROMPT))
                assert progress.tokens_per_second > 0
                assert progress.seconds_left is not None
                assert (progress.seconds_left > 0) == (done < len(PROMPT))
            rest = [delta async for delta in stream]
        assert not [delta for delta in rest if delta.progress is not None]
        assert [token.token_id for delta in rest for token in delta.tokens] == expected_tokens(PROMPT, 3)

        gate.open()
        plain = [delta async for delta in client.generate([9, *PROMPT], **sampling)]
        assert not [delta for delta in plain if delta.progress is not None]
        async with aclosing(client.generate(PROMPT, report_progress=True, **sampling)) as stream:
            progress = (await anext(stream)).progress
        assert progress.tokens_done >= 32, "cached tokens are done"
