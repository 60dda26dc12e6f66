"""`python -m decode_svc` as a supervisor sees it, on the bundled checkpoint and the real engine."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process

import grpc
import pytest

from baton.config.decode import DecodeConfig
from baton.errors import ConfigError
from baton.pb import decode_pb2, decode_pb2_grpc
from baton.rpc.channel import control_channel
from baton.worker import start as worker_start
from baton.worker.status import WIRE_VERSION
from decode_svc.app import run

START_S = 60


async def start(*flags: str) -> Process:
    command = [sys.executable, "-m", "decode_svc", "--threads", "1", *flags]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def said(process: Process) -> str:
    """All of stderr, once the process has ended."""
    async with asyncio.timeout(START_S):
        _, stderr = await process.communicate()
    return stderr.decode()


async def test_listens_holds_pages_drains_and_exits_with_zero_while_a_router_is_connected() -> None:
    process = await start("--dtype", "float32", "--kv-memory", "16MiB")
    assert process.stdout is not None
    key = decode_pb2.AttemptKey(request_id="r")
    try:
        async with asyncio.timeout(START_S):
            word, *pairs = (await process.stdout.readline()).decode().split()
            addresses = dict(pair.split("=") for pair in pairs)
            assert (word, sorted(addresses)) == ("listening", ["control", "kv", "ops"])
            async with control_channel(addresses["control"]) as channel:
                session = decode_pb2_grpc.DecodeStub(channel).Session()
                await session.write(
                    decode_pb2.SessionUp(hello=decode_pb2.Hello(router_id="x", wire_version=WIRE_VERSION))
                )
                reserve = decode_pb2.Reserve(key=key, context_tokens=20, max_new_tokens=5, choices=1)
                await session.write(decode_pb2.SessionUp(reserve=reserve))
                assert (await session.read()).reserved[0].granted
                process.send_signal(signal.SIGTERM)
                await session.write(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(key=key)))
                assert await session.code() is grpc.StatusCode.OK
        text = await said(process)
        assert process.returncode == 0
        assert "draining after SIGTERM" in text
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("listener", ["control", "kv", "ops"])
async def test_a_taken_port_is_named_before_the_model_is_loaded(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_start, "_build", lambda config: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^{listener}: {address} is already in use$"):
            async with run(DecodeConfig(**{listener: address})):
                pytest.fail("it has started")


async def test_bad_settings_are_named_on_one_line_and_end_with_two() -> None:
    process = await start("--control", "0.0.0.0:0")
    text = await said(process)
    assert process.returncode == 2
    assert "Traceback" not in text
    assert all(name in text.splitlines()[-1] for name in ("decode: ", "0.0.0.0:0", "--insecure"))
