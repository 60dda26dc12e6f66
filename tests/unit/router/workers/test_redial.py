"""Pauses before a router calls a lost worker again."""

import asyncio

import pytest

from baton.worker.status import WorkerRole
from router.workers import link as link_module
from router.workers.failures import WorkerLosses
from router.workers.link import WorkerLink


class _Clock:
    """A loop's time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class _Nobody:
    async def forget_prefixes(self, *_: object) -> None: ...

    def update_worker(self, *_: object) -> None: ...

    def update_view(self, *_: object) -> None: ...


@pytest.mark.parametrize("known", [True, False])
async def test_calls_are_frequent_while_a_successor_is_expected(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    link = WorkerLink("127.0.0.1:1", WorkerRole.PREFILL, "r", _Nobody(), WorkerLosses())
    clock, watches = _Clock(), 0

    async def watch() -> str:
        nonlocal watches
        watches += 1
        # The first watch ends as that of a worker that was there, all others find nobody.
        link.status = object() if known and watches == 1 else None
        link.listed = watches < 200
        return "nobody is there"

    monkeypatch.setattr(link, "_watch", watch)
    monkeypatch.setattr(link, "_lose", lambda reason: setattr(link, "status", None))
    monkeypatch.setattr(link_module.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(link_module.asyncio, "sleep", clock.sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.time)
    await link.run()
    soon = [each for index, each in enumerate(clock.slept) if sum(clock.slept[:index]) < link_module._SOON_S]
    assert (max(soon) <= link_module._SOON_BACKOFF_S) is known
    assert clock.slept[-1] == link_module._MAX_BACKOFF_S
