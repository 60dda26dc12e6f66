"""Rollouts under load, as a cluster does them: each worker and each router is replaced, one after the other.

    clients ── Service ── routers × 2 ── prefill × 2, decode × 2         all are processes, with the real engine

A rollout starts the successor, waits until it is ready, and sends SIGTERM to its predecessor, which has its grace
period; those of the three roles run at the same time. The rollout brings other weights of the same shape, so that KV
or tokens of two checkpoints in one request would make wrong tokens. `make rehearse` has rollouts that keep the
checkpoint as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.errors import BatonError
from baton.request import CachePolicy
from tests.checkpoints import assert_lively, greedy, load_reference, make_checkpoint, prompt_ids
from tests.forked import Forked, Forker

PAIR = 2
"""Processes of each role."""
ROLLOUTS = int(os.environ.get("TEST_ROLLOUTS", "1"))
"""Number of rollouts; the last one and every second before it bring the other weights."""
PROMPT, TOKENS = prompt_ids(40, 0), 100
CACHES = (CachePolicy.READ_WRITE, CachePolicy.OFF)
START_S, GRACE_S = 60.0, 60.0
AGE_S, DELAY_S = 0.4, 2.0
"""A router that isn't ready any more accepts requests until clients have left it."""
POLL_S = 0.1
CLIENTS = 4
MIXED = ("bad_frame", "corrupt_frame", "wrong_prefix", "stale_incarnation")
"""Faults of a transfer between workers that do not match."""
ROLES = ("prefill", "decode", "router")


def free_port(taken: set[int]) -> int:
    """A port outside the range of outgoing connections, so that it stays free while nobody listens there."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in taken:
                taken.add(port)
                return port


async def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body of an answer of an ops listener; OSError if nobody is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    if not head:
        raise ConnectionResetError
    return int(head.split()[1]), body


class Place:
    """Ports at which processes of a role run, one after the other."""

    def __init__(self, taken: set[int]) -> None:
        self.port, self.ops = free_port(taken), free_port(taken)
        self.log = Path()
        self.taken = False
        self.process: Forked | None = None
        self.metrics = ""
        """The metrics of the process as last seen."""
        self.ready = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def look(self) -> None:
        """Look at readiness and metrics."""
        try:
            self.ready = (await fetch(self.ops, "/ready"))[0] == 200
            self.metrics = (await fetch(self.ops, "/metrics"))[1]
        except OSError:
            self.ready = False


class Cluster:
    """Processes at a place more than run, so that a successor starts before its predecessor drains."""

    def __init__(self, forker: Forker, folder: Path) -> None:
        self._forker, self._folder = forker, folder
        taken: set[int] = set()
        self.places = {role: [Place(taken) for _ in range(PAIR + 1)] for role in ROLES}
        self.drained: list[tuple[str, str, str]] = []
        """Role, log and last metrics of each process that has ended."""
        self._starts = 0
        self._looked = asyncio.Event()

    @property
    def all_places(self) -> list[Place]:
        return [place for places in self.places.values() for place in places]

    def running(self, role: str) -> list[Place]:
        return [place for place in self.places[role] if place.process is not None]

    async def look(self) -> None:
        """Look at all processes again and again, as probes do."""
        while True:
            await asyncio.gather(*(place.look() for place in self.all_places if place.process is not None))
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(POLL_S)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until it is true after a look."""
        async with asyncio.timeout(START_S):
            while not true():
                await self._looked.wait()

    async def start(self, role: str, checkpoint: Path) -> Place:
        """Start a process at a free place, and wait until it is ready."""
        place = next(place for place in self.places[role] if not place.taken)
        place.taken = True
        flags = ["--model", str(checkpoint), "--served-model-name=m", f"--ops=127.0.0.1:{place.ops}", "--drain-s=60"]
        if role == "router":
            for each in ("prefill", "decode"):
                flags += [f"--{each}", ",".join(place.address for place in self.places[each])]
            flags += [f"--grpc={place.address}", f"--connection-age-s={AGE_S}", f"--drain-delay-s={DELAY_S}"]
        else:
            flags += [f"--control={place.address}", "--dtype=float32", "--kv-memory=16MiB", "--threads=1"]
        self._starts += 1
        place.log = self._folder / f"{self._starts}-{role}.log"
        place.process = await self._forker.start(place.log, "router" if role == "router" else f"{role}_svc", *flags)
        await self.until(lambda: place.ready or place.process.ended.done())
        assert place.ready, place.log.read_text()
        return place

    async def stop(self, role: str, place: Place) -> None:
        """Send SIGTERM, and wait for the end."""
        place.process.send(signal.SIGTERM)
        async with asyncio.timeout(GRACE_S):
            assert await place.process.ended == 0
        place.process, place.ready, place.taken = None, False, False
        self.drained.append((role, place.log.read_text(), place.metrics))

    async def roll_out(self, checkpoint: Path) -> None:
        """Replace all processes."""

        async def replace(role: str) -> None:
            for place in self.running(role):
                await self.start(role, checkpoint)
                await self.stop(role, place)

        async with asyncio.TaskGroup() as group:
            for role in ROLES:
                group.create_task(replace(role))

    def check_drains(self) -> None:
        """Fail if a process ended before its streams did, or if a stream met a fault."""
        assert len(self.drained) == ROLLOUTS * PAIR * len(ROLES)
        for role, log, metrics in self.drained:
            if role == "router":
                assert count(metrics, "baton_requests_total", "OK") > 0
                assert not any(count(metrics, "baton_replays_total", f'"{cause}"') for cause in ("fault", "lost"))
                warnings = [line for line in log.splitlines() if " WARNING " in line or " ERROR " in line]
                others = [line for line in warnings if "its fingerprint is" not in line and "draining" not in line]
                assert others == []
                # Each worker with other weights is named once, and the router's own drain.
                assert len(warnings) <= 2 * PAIR * ROLLOUTS + 1, warnings
            else:
                assert "drained\n" in log, log
                # A prefill worker that refuses a prompt while it drains has no KV for the fetch, which is no fault.
                assert not any(count(metrics, "baton_transfer_faults_total", f'"{kind}"') for kind in MIXED)

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[str]:
        """The address of a load balancer of connections, in front of the routers that are ready."""
        pipes: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await self.until(lambda: any(place.ready for place in self.places["router"]))
                ready = [place for place in self.places["router"] if place.ready]
                theirs, mine = await asyncio.open_connection("127.0.0.1", random.choice(ready).port)
                pipes.update((asyncio.create_task(pipe(reader, mine)), asyncio.create_task(pipe(theirs, writer))))
                return
            writer.close()

        async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                with contextlib.suppress(OSError):
                    while data := await source.read(1 << 16):
                        sink.write(data)
                        await sink.drain()
            finally:
                sink.close()

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in pipes:
                task.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)


class Load:
    """Clients, each with one stream after the other on a connection of its own."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self._known = known
        self.seen: list[str] = []
        """The checkpoint of each answer, in order; "" if its tokens are wrong."""
        self.errors: list[str] = []
        self.stopped = False

    async def run(self, address: str, number: int) -> None:
        async with AsyncClient(address) as client:
            while not self.stopped:
                number += 1
                count = random.randrange(1, TOKENS)
                try:
                    answer = await client.complete(
                        PROMPT, cache=CACHES[number % 2], max_tokens=count, temperature=0, ignore_eos=True, timeout=120
                    )
                except BatonError as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    continue
                tokens = answer.token_ids
                self.seen.append(next((name for name, all_ in self._known.items() if all_[:count] == tokens), ""))


def count(metrics: str, name: str, labels: str = "") -> float:
    """The sum of the samples of a counter whose labels contain `labels`."""
    samples = re.findall(rf"^{name}(\{{.*?\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for found, value in samples if labels in found)


def references(checkpoints: list[Path]) -> dict[str, list[int]]:
    """By the name of the checkpoint: its greedy tokens."""
    found: dict[str, list[int]] = {}
    for checkpoint in checkpoints:
        assert_lively(reference := greedy(load_reference(checkpoint), PROMPT, TOKENS), TOKENS)
        found[checkpoint.name] = reference.token_ids
    return found


@pytest.mark.long
async def test_replacing_every_process_loses_no_stream_and_mixes_no_checkpoints(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        forker = await stack.enter_async_context(Forker.running())
        used, other = (make_checkpoint("llama", tmp_path / f"weights-{seed}", seed=seed) for seed in (0, 1))
        computing = asyncio.create_task(asyncio.to_thread(references, [used, other]))
        cluster = Cluster(forker, tmp_path)
        looking = asyncio.create_task(cluster.look())
        stack.callback(looking.cancel)
        await asyncio.gather(*(cluster.start(role, used) for role in ROLES for _ in range(PAIR)))
        load = Load(await computing)
        clients = [
            asyncio.create_task(load.run(await stack.enter_async_context(cluster.service()), number))
            for number in range(CLIENTS)
        ]
        await cluster.until(lambda: len(load.seen) >= 2 * CLIENTS)
        assert set(load.seen) == {used.name}
        for left in reversed(range(ROLLOUTS)):
            if left % 2 == 0:
                used, other = other, used
            await cluster.roll_out(used)
        at = len(load.seen)
        await cluster.until(lambda: len(load.seen) >= at + 4 * CLIENTS)
        load.stopped = True
        await asyncio.gather(*clients)
        assert load.errors == []
        assert "" not in load.seen, "tokens of neither checkpoint alone"
        assert set(load.seen[at:]) == {used.name}
        cluster.check_drains()
