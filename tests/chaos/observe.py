"""Ledgers, statuses and counters of a fleet's processes. They are asked directly, past the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from baton.ledger import Ledger
from baton.pb import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.rpc.admin import ledger_from_proto
from tests.chaos.fleet import Fleet

ATTEMPTS_FAILED = "baton_attempts_failed_total"
SERVED = {"p": "baton_prefill_tokens_total", "d": "baton_decode_tokens_total"}
SERVED["m"] = SERVED["d"]
"""Counter that rises when a worker does its work, by the first letter of its name."""


async def ledger(fleet: Fleet, name: str, timeout: float = 3.0) -> Ledger | None:
    """The ledger of a process; None if it does not answer."""
    try:
        stub = admin_pb2_grpc.AdminStub(fleet.channel(name))
        answer = await stub.Ledger(admin_pb2.LedgerRequest(), timeout=timeout, metadata=fleet.metadata(name))
        return ledger_from_proto(answer)
    except grpc.aio.AioRpcError:
        return None


async def pages_used(fleet: Fleet, name: str, timeout: float = 3.0) -> int | None:
    """Pages that a worker counts as used in its Watch, which knows nothing of the ledger; None without an answer."""
    call = worker_pb2_grpc.WorkerStub(fleet.channel(name)).Watch(worker_pb2.WatchRequest(), timeout=timeout)
    try:
        status = await call.read()
        return None if status is grpc.aio.EOF else int(status.load.pages_used)
    except grpc.aio.AioRpcError:
        return None
    finally:
        call.cancel()


async def counter(fleet: Fleet, name: str, metric: str, timeout: float = 2.0) -> float | None:
    """A counter, summed over its labels; None if the process does not answer."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.ops[name])
            try:
                writer.write(b"GET /metrics HTTP/1.0\r\nHost: ops\r\n\r\n")
                text = (await reader.read()).decode()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@dataclass
class Leak:
    """Resources that a fleet without requests still holds."""

    bytes: int = 0
    violations: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Processes whose ledger could not be read."""

    @property
    def clean(self) -> bool:
        """Whether nothing is held and everybody answered."""
        return not (self.bytes or self.violations or self.lines or self.silent)


async def leak(fleet: Fleet) -> Leak:
    found = Leak()
    for name in [*fleet.workers, *fleet.routers]:
        book = await ledger(fleet, name)
        if book is None:
            found.silent.append(name)
            continue
        found.bytes += sum(entry.bytes for entry in book.entries)
        found.lines += [f"{name}: {entry}" for entry in book.entries]
        if book.violation:
            found.violations.append(f"{name}: {book.violation}")
        if name in fleet.workers:
            used = await pages_used(fleet, name)
            kept = book.pages_total - book.pages_free - book.pages_cached
            if used or kept:
                found.lines.append(f"{name}: {used} pages used by its status, {kept} by its ledger")
    return found


async def settle(fleet: Fleet, bound: float) -> tuple[Leak, float]:
    """Wait until nothing is held any more, `bound` seconds at most: what is left, and how long it took."""
    began = time.monotonic()
    while True:
        left = await leak(fleet)
        waited = time.monotonic() - began
        if left.clean or waited > bound:
            return left, waited
        await asyncio.sleep(0.25)


def rank_faults(fleet: Fleet) -> tuple[int, list[str]]:
    """Number of ranks without a worker, and workers that do not have all of their ranks, in words."""
    leaders = {fleet.processes[name].pid: name for name in fleet.workers}
    found = Counter(leaders.get(rank.ppid(), "") for rank in fleet.all_ranks())
    return found[""], [
        f"{name} has {1 + found[name]} ranks" for name in fleet.workers if 1 + found[name] != fleet.shape.ranks(name)
    ]


class Detector:
    """Notes when routers first see an attempt fail after a moment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.first = 0.0
        """Monotonic time of the first failure seen; 0 while none was."""

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Detector]:
        """Look while the block lasts."""
        before = {name: await counter(self._fleet, name, ATTEMPTS_FAILED) or 0.0 for name in self._fleet.routers}
        task = asyncio.create_task(self._watch(before))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, before: dict[str, float]) -> None:
        while not self.first:
            for name, count in before.items():
                now = await counter(self._fleet, name, ATTEMPTS_FAILED, timeout=0.5)
                if now is not None and now > count:
                    self.first = time.monotonic()
            await asyncio.sleep(0.1)
