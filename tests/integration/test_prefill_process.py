"""`python -m prefill_svc` as a supervisor sees it, on the bundled checkpoint and the real engine."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from baton.pb import prefill_pb2, prefill_pb2_grpc
from baton.request import SamplingParams
from baton.rpc.channel import control_channel
from baton.rpc.convert import sampling_to_proto

START_S = 60


async def start(*flags: str) -> Process:
    command = [sys.executable, "-m", "prefill_svc", "--threads", "1", *flags]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def said(process: Process) -> str:
    """All of stderr, once the process has ended."""
    async with asyncio.timeout(START_S):
        _, stderr = await process.communicate()
    return stderr.decode()


async def test_listens_serves_drains_and_exits_with_zero() -> None:
    process = await start("--dtype", "float32", "--kv-memory", "16MiB")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            word, *pairs = (await process.stdout.readline()).decode().split()
            addresses = dict(pair.split("=") for pair in pairs)
            assert (word, sorted(addresses)) == ("listening", ["control", "kv", "ops"])
            async with control_channel(addresses["control"]) as channel:
                events = [event async for event in prefill(channel)]
        assert events[-1].done.first_tokens[0].token.token_id > 0
        process.send_signal(signal.SIGTERM)
        text = await said(process)
        assert process.returncode == 0
        assert "draining after SIGTERM" in text
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def prefill(channel: Any) -> Any:
    request = prefill_pb2.PrefillRequest(
        request_id="r",
        prompt_token_ids=range(50, 90),
        choice_indexes=[0],
        sampling=sampling_to_proto(SamplingParams(max_tokens=4, temperature=0.0)),
    )
    return prefill_pb2_grpc.PrefillStub(channel).Prefill(request)


async def test_bad_settings_are_named_on_one_line_and_end_with_two() -> None:
    process = await start("--model", "/nowhere")
    text = await said(process)
    assert process.returncode == 2
    assert "Traceback" not in text
    assert all(name in text.splitlines()[-1] for name in ("prefill: ", "/nowhere"))
