"""`python -m prefill_svc` and `-m decode_svc` as a supervisor sees them, with the real engine, and their memory."""

import asyncio
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import psutil
import pytest

from baton.config.worker import DecodeConfig
from baton.errors import ConfigError
from baton.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.process.supervisor import parse_listeners
from baton.request import SamplingParams
from baton.rpc.channel import control_channel
from baton.rpc.convert import sampling_to_proto
from baton.worker import start as worker_start
from baton.worker.status import WIRE_VERSION
from decode_svc.app import run
from tests.checkpoints import make_checkpoint
from tests.kernels import needs_native
from tests.processes import gone

START_S = 60


async def start(module: str, *flags: str) -> Process:
    command = [sys.executable, "-m", module, "--threads", "1", *flags]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def said(process: Process) -> str:
    """All of stderr, once the process has ended."""
    async with asyncio.timeout(START_S):
        _, stderr = await process.communicate()
    return stderr.decode()


async def prefills(process: Process, channel: grpc.aio.Channel) -> None:
    """A prompt is computed; then the process is told to end."""
    request = prefill_pb2.PrefillRequest(
        request_id="r",
        prompt_token_ids=range(50, 90),
        choice_indexes=[0],
        sampling=sampling_to_proto(SamplingParams(max_tokens=4, temperature=0.0)),
    )
    events = [event async for event in prefill_pb2_grpc.PrefillStub(channel).Prefill(request)]
    assert events[-1].done.first_tokens[0].token.token_id > 0
    process.send_signal(signal.SIGTERM)


async def holds_pages_while_it_drains(process: Process, channel: grpc.aio.Channel) -> None:
    """The process is told to end while a router's session holds a reservation; the session ends well."""
    key = decode_pb2.AttemptKey(request_id="r")
    session = decode_pb2_grpc.DecodeStub(channel).Session()
    await session.write(decode_pb2.SessionUp(hello=decode_pb2.Hello(router_id="x", wire_version=WIRE_VERSION)))
    reserve = decode_pb2.Reserve(key=key, context_tokens=20, max_new_tokens=5, choices=1)
    await session.write(decode_pb2.SessionUp(reserve=reserve))
    assert (await session.read()).reserved[0].granted
    process.send_signal(signal.SIGTERM)
    await session.write(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=key)))
    ended = []
    while (down := await session.read()) is not grpc.aio.EOF:
        ended += down.ended
    assert ended == [key]
    assert await session.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(("module", "use"), [("prefill_svc", prefills), ("decode_svc", holds_pages_while_it_drains)])
async def test_serves_drains_and_ends(module: str, use: Callable[[Process, grpc.aio.Channel], Awaitable[None]]) -> None:
    process = await start(module, "--dtype", "float32", "--kv-memory", "16MiB")
    try:
        async with asyncio.timeout(START_S):
            word, *pairs = (await process.stdout.readline()).decode().split()
            addresses = dict(pair.split("=") for pair in pairs)
            assert (word, sorted(addresses)) == ("listening", ["control", "kv", "ops"])
            async with control_channel(addresses["control"]) as channel:
                await use(process, channel)
        text = await said(process)
        assert process.returncode == 0
        assert "draining after SIGTERM" in text
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@needs_native
async def test_ranks_end_with_their_leader_killed_or_drained() -> None:
    """Two workers of two ranks: one is killed, the other one drains."""
    flags = ("--dtype", "float32", "--kv-memory", "16MiB", "--tensor-parallel", "2")
    killed, drained = await asyncio.gather(start("decode_svc", *flags), start("mixed_svc", *flags))
    try:
        async with asyncio.timeout(START_S):
            lines = [(await each.stdout.readline()).decode() for each in (killed, drained)]
            ranks = [child.pid for each in (killed, drained) for child in psutil.Process(each.pid).children()]
            assert len(ranks) == 2
            killed.kill()
            async with control_channel(parse_listeners(lines[1])["control"]) as channel:
                await holds_pages_while_it_drains(drained, channel)
        await said(drained)
        assert drained.returncode == 0
        assert gone(ranks, within_s=5.0)
    finally:
        for each in (killed, drained):
            if each.returncode is None:
                each.kill()
            await each.communicate()


@pytest.mark.parametrize("listener", ["control", "kv", "ops"])
async def test_a_taken_port_is_named_before_the_model_is_loaded(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_start, "_build", lambda config: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^{listener}: {address} is already in use$"):
            async with run(DecodeConfig(**{listener: address})):
                pytest.fail("it has started")


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        ("prefill_svc", ["--model", "/nowhere"], ["prefill: ", "/nowhere"]),
        ("decode_svc", ["--control", "0.0.0.0:0"], ["decode: ", "0.0.0.0:0", "--insecure"]),
    ],
)
async def test_bad_settings_are_named_and_end_with_two(module: str, flags: list[str], words: list[str]) -> None:
    process = await start(module, *flags)
    text = await said(process)
    assert process.returncode == 2
    assert "Traceback" not in text
    assert all(name in text.splitlines()[-1] for name in words)


KV = 16 << 20


def proportional(process: Process) -> int:
    """Bytes of a process's memory; what it shares is divided by those that share it."""
    return int(re.findall(r"^Pss: +(\d+) kB", of(process, "smaps_rollup"), re.MULTILINE)[0]) << 10


def of(process: Process, name: str) -> str:
    """Figures from the kernel about a process."""
    return Path(f"/proc/{process.pid}/{name}").read_text(encoding="utf-8")


async def listening(module: str, checkpoint: Path, *flags: str) -> Process:
    process = await start(
        module, f"--model={checkpoint}", f"--kv-memory={KV}", "--kernels=native", "--dtype=float32", *flags
    )
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        assert (await process.stdout.readline()).startswith(b"listening")
    return process


@needs_native
async def test_two_workers_hold_weights_once(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(
        "qwen2", tmp_path, tied=True, hidden_size=768, intermediate_size=3072, num_hidden_layers=3, vocab_size=20_000
    )
    weights = (checkpoint / "model.safetensors").stat().st_size
    assert weights > 100 << 20
    shared = f"--packed-weights={tmp_path / 'packed'}"
    workers = []
    try:
        for module, *flags in (("prefill_svc", shared), ("decode_svc", shared), ("decode_svc",)):
            workers.append(await listening(module, checkpoint, *flags))
        sizes = [proportional(worker) for worker in workers]
        maps = [of(worker, "maps") for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            await worker.communicate()
    # A worker without its weights: a runtime and a KV pool.
    rest = sizes[2] - weights
    assert sum(sizes[:2]) < weights + 2 * rest + weights // 4
    assert not any("model.safetensors" in each for each in maps)
    assert sizes[2] > weights
