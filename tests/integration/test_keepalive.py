"""A peer that is silent for good is noticed in seconds; a stream that is merely quiet lives on."""

import asyncio
import os
import signal
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import control_channel, kv_channel
from baton.rpc.server import listen

SERVE = """
import asyncio
from baton.rpc.server import listen

async def main():
    async with listen("127.0.0.1:0", insecure=False, add=lambda server: None, services=[]) as listener:
        print(listener.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def watch(channel: grpc.aio.Channel) -> Any:
    """A stream on which nothing more will be said."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await call.read()
    return call


async def test_stopped_and_quiet_peers() -> None:
    stopped = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, stdout=asyncio.subprocess.PIPE)
    try:
        address = (await stopped.stdout.readline()).decode().strip()
        async with (
            listen("127.0.0.1:0", insecure=False, add=lambda server: None, services=[]) as alive,
            control_channel(alive.address) as control,
            kv_channel(alive.address) as kv,
            control_channel(address) as dead,
        ):
            quiet = [asyncio.create_task((await watch(channel)).read()) for channel in (control, kv)]
            silent = await watch(dead)
            os.kill(stopped.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(silent.read(), 60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            # A server that objects to pings says so at the third: six seconds of quiet have passed.
            done, _ = await asyncio.wait(quiet, timeout=2.5)
            assert not done
            for task in quiet:
                task.cancel()
            await asyncio.gather(*quiet, return_exceptions=True)
    finally:
        stopped.kill()
        await stopped.wait()
