"""Several routers: what the parent does when one can't be started again."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import ConfigError
from router import processes


@pytest.mark.parametrize("error", [OSError("no memory"), ConfigError("processes: router 0 ended with status 2")])
async def test_a_router_that_does_not_start_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_S", 0)
    tried, again = [error], asyncio.Event()

    async def start() -> None:
        if tried:
            raise tried.pop()
        again.set()
        await asyncio.Event().wait()

    child = processes._Child(0, [], "127.0.0.1:0")
    monkeypatch.setattr(child, "start", start)
    keeping = asyncio.create_task(child.keep())
    await asyncio.wait_for(again.wait(), 60)
    keeping.cancel()


async def test_a_router_that_had_served_is_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART_S", 3600)
    monkeypatch.setattr(processes, "STEADY_S", 0)
    child, ends = processes._Child(0, [], "127.0.0.1:0"), 0
    again = asyncio.Event()

    async def start() -> None:
        nonlocal ends
        ends += 1
        child._listens_since = asyncio.get_running_loop().time()
        if ends == 2:
            again.set()
            await asyncio.Event().wait()

    await start()
    monkeypatch.setattr(child, "start", start)
    keeping = asyncio.create_task(child.keep())
    await asyncio.wait_for(again.wait(), 60)
    keeping.cancel()
