"""The router's own threads: results, errors, who waits, and who left."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.tokenizer import Tokenizer
from router.request import TextPrompt
from router.serving.threads import WAITING_BYTES, TenantThreads
from router.serving.validator import RequestValidator, ServedModel

WAIT_S = 60


class Gate:
    """Work that goes on when it is let through; `begun` names what has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(WAIT_S)
        return name


@contextlib.asynccontextmanager
async def threads(capacity: int = 9, count: int = 2) -> AsyncIterator[tuple[TenantThreads, Gate]]:
    made, gate = TenantThreads(capacity, count), Gate()
    try:
        yield made, gate
    finally:
        gate.open.set()
        made.close()


def waits(made: TenantThreads, gate: Gate, tenant: str) -> asyncio.Task[str]:
    return asyncio.create_task(made.run(tenant, lambda: gate.work(tenant)))


async def test_one_tenants_work_leaves_a_thread_to_another() -> None:
    async with threads() as (made, gate):
        flood = [waits(made, gate, "flood") for _ in range(4)]
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            assert await made.run("other", lambda: "served") == "served"
            assert gate.begun == ["flood"]
            gate.open.set()
            assert await asyncio.gather(*flood) == ["flood"] * 4


async def test_work_that_nobody_waits_for_does_not_begin_and_errors_come_back() -> None:
    def fails() -> None:
        raise InvalidRequest("text", "is wrong")

    async with threads() as (made, gate), asyncio.timeout(WAIT_S):
        first, left = waits(made, gate, "a"), waits(made, gate, "a")
        failing = asyncio.create_task(made.run("a", fails))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        gate.open.set()
        assert await first == "a"
        with pytest.raises(InvalidRequest):
            await failing
        assert gate.begun == ["a"]


async def test_running_work_keeps_its_thread_without_its_caller() -> None:
    async with threads() as (made, gate), asyncio.timeout(WAIT_S):
        first = waits(made, gate, "a")
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        second = waits(made, gate, "a")
        assert await made.run("b", lambda: len(gate.begun)) == 1
        assert not second.done()
        gate.open.set()
        assert await second == "a"


async def test_no_thread_needs_to_be_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with threads() as (made, gate), asyncio.timeout(WAIT_S):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        first, second = waits(made, gate, "a"), waits(made, gate, "b")
        gate.open.set()
        assert await asyncio.gather(first, second) == ["a", "b"]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            TenantThreads(9)


async def test_a_tenants_queue_is_bounded() -> None:
    async with threads(capacity=2) as (made, gate):
        tasks = [waits(made, gate, "a") for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(
            Overloaded, match=r"^queue_capacity: 2 requests wait to be tokenized, 2 are allowed"
        ) as refusal:
            made.check("a", 1)
        assert refusal.value.retry_after
        made.check("b", 1)
        gate.open.set()
        await asyncio.gather(*tasks)


async def test_waiting_texts_of_a_tenant_are_bounded() -> None:
    """Texts of one size are held by calls that wait, whose number alone would allow gigabytes."""
    size = WAITING_BYTES // 2

    class Tokens:
        def check_size(self, *_: object) -> None:
            pass

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            gate.work(text[:1])
            return []

    async with threads(capacity=1000) as (made, gate), asyncio.timeout(WAIT_S):
        validator = RequestValidator(ServedModel("m", 300, (), cast(Tokenizer, Tokens())), lambda: 10**9, made)

        def call(tenant: str) -> asyncio.Task[list[int]]:
            return asyncio.create_task(validator.tokenize(TextPrompt(lambda: b"a" * size), size, tenant))

        running, first, second = (call("a") for _ in range(3))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=rf"^waiting_bytes: .*{WAITING_BYTES} bytes wait.*{size} more") as refusal:
            await call("a")
        assert refusal.value.retry_after
        other = call("b")
        first.cancel()
        await asyncio.wait([first])
        third = call("a")
        await asyncio.sleep(0)
        assert not third.done(), "it has the place of the one that left"
        gate.open.set()
        await asyncio.gather(running, second, other, third)
        made.check("a", 100 * WAITING_BYTES)
