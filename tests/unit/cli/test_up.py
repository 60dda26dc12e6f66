"""`baton up` supervises: real processes, with stubs in the services' place."""

from __future__ import annotations

import asyncio
import io
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from baton.cli import fleet
from baton.launcher import bound_to_me

STUB = Path(__file__).with_name("stub_up.py")


class Up:
    """A running `baton up` whose standard error is collected."""

    def __init__(self, *flags: str, **behaviour: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environ |= {f"STUB_{role.upper()}": way for role, way in behaviour.items()}
        self.process = subprocess.Popen(
            bound_to_me([sys.executable, str(STUB), "up", "--grpc=127.0.0.1:0", "--redis=none", *flags]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.log = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._changed:
                self.log += line
                self._changed.notify_all()

    def ready(self) -> str:
        return self.process.stdout.readline()

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a match in the log."""
        with self._changed:
            assert self._changed.wait_for(lambda: re.search(pattern, self.log), 60), self.log
            return re.search(pattern, self.log)

    def pids(self, count: int) -> list[int]:
        """Pids that stubs have logged, once there are `count`."""
        self.until(rf"(?s)(\| pid=\d+.*){{{count}}}")
        return [int(pid) for pid in re.findall(r"\| pid=(\d+)", self.log)]

    def pid_of(self, name: str) -> int:
        """Pid of a stub that runs services, the first of that name."""
        return int(self.until(rf"{name} +\| pid=(\d+) argv")[1])

    def end(self) -> int:
        """Exit status."""
        status = self.process.wait(60)
        self._reader.join(60)
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(60)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def ups() -> Iterator[list[Up]]:
    started: list[Up] = []
    yield started
    for up in started:
        up.close()


def gone(pids: list[int], within: float = 60.0) -> bool:
    """Whether these processes, children of nobody here, have ended or end in time."""
    until = time.monotonic() + within
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
        finally:
            os.close(fd)
    return True


def start(ups: list[Up], *flags: str, **behaviour: str) -> Up:
    ups.append(Up(*flags, **behaviour))
    return ups[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_and_stop(ups: list[Up], number: int) -> None:
    up = start(ups, "--prefill=2")
    assert re.fullmatch(r"ready grpc=127\.0\.0\.1:\d+ ops=\S+ model=bundled prefill=2 decode=1\n", up.ready())
    pids = up.pids(4)
    up.process.send_signal(number)
    assert up.end() == 0
    assert gone(pids, 0)
    assert up.process.stdout.read() == ""


def test_each_line_carries_its_name_and_each_child_its_flags(ups: list[Up]) -> None:
    up = start(ups, "--slots=7", "--chunk-size=16")
    up.ready()
    prefill = up.until(r"prefill-0 \| pid=\d+ argv=(.*)")[1].split()
    decode = up.until(r"decode-0 +\| pid=\d+ argv=(.*)")[1].split()
    router = up.until(r"router +\| pid=\d+ argv=(.*)")[1].split()
    assert {"--worker-id=prefill-0", "--chunk-size=16", "--control=127.0.0.1:0"} <= set(prefill)
    assert {"--worker-id=decode-0", "--slots=7", "--control=127.0.0.1:0"} <= set(decode)
    assert {"--prefill=127.0.0.1:1", "--decode=127.0.0.1:1", "--grpc=127.0.0.1:0"} <= set(router)
    # The store and the secret are not on command lines.
    for name in ("prefill-0", "decode-0", "router"):
        up.until(rf"{name} +\| redis=none secret=64")


def test_the_routers_death_is_named_and_ends_all(ups: list[Up]) -> None:
    up = start(ups)
    up.ready()
    pids = up.pids(3)
    os.kill(up.pid_of("router"), signal.SIGKILL)
    assert up.end() == 1
    assert "\nerror: router was killed by SIGKILL; its last line: " in up.log
    assert gone(pids, 0)


@pytest.mark.parametrize("victim", ["prefill-1", "decode-0"])
def test_a_worker_that_dies_is_started_again_where_it_was(ups: list[Up], victim: str) -> None:
    up = start(ups, "--prefill=2", "--threads=1")
    up.ready()
    up.pids(4)
    os.kill(up.pid_of(victim), signal.SIGKILL)
    up.until(rf"up +\| {victim} was killed by SIGKILL; its last line: pid=.*; it is started again at once\n")
    pids = up.pids(5)
    first, second = (set(found.split()) for found in re.findall(rf"{victim} +\| pid=\d+ argv=(.*)", up.log))
    anywhere = {f"--{name}=127.0.0.1:0" for name in ("control", "kv", "ops")}
    assert first - second == anywhere
    assert second - first == {"--control=127.0.0.1:1", "--kv=127.0.0.1:2", "--ops=127.0.0.1:3"}
    os.kill(pids[-1], signal.SIGKILL)
    up.until(rf"{victim} was killed by SIGKILL; .*; it is started again in 1 s\n")
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert gone(pids, 0)


async def test_the_pause_grows_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PAUSE_S", 0.02)
    monkeypatch.setattr(fleet, "MOST_PAUSE_S", 0.05)
    lines = _Lines(count=8)
    async with fleet.Fleet(lines) as keeper:
        command = [sys.executable, "-S", "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"]
        keeper.keep(await keeper.start("w", command, os.environ), command, os.environ)
        await asyncio.wait_for(lines.enough.wait(), 60)
    said = [line for line in lines.seen if line.startswith("up | ")]
    pauses = ("at once", "in 0.02 s", "in 0.04 s", "in 0.05 s")
    told = "up | w ended with exit status 3; its last line: no; it is started again {}"
    assert said[:4] == [told.format(pause) for pause in pauses]
    assert not keeper.death.done() or keeper.death.cancelled()


async def test_a_child_that_had_served_is_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PAUSE_S", 3600.0)
    monkeypatch.setattr(fleet, "STEADY_S", 0.0)
    lines = _Lines(count=6)
    async with fleet.Fleet(lines) as keeper:
        command = [sys.executable, "-S", "-c", "import sys; print('listening x=1'); print('no', file=sys.stderr)"]
        keeper.keep(await keeper.start("w", command, os.environ), command, os.environ)
        await asyncio.wait_for(lines.enough.wait(), 60)
    said = [line for line in lines.seen if line.startswith("up | ")]
    assert said[:3] == ["up | w ended with exit status 0; its last line: no; it is started again at once"] * 3


async def test_one_that_can_not_be_started_has_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PAUSE_S", 0.02)
    monkeypatch.setattr(fleet, "STEADY_S", 0.0)
    lines = _Lines(count=4)
    async with fleet.Fleet(lines) as keeper:
        command = [sys.executable, "-S", "-c", "import sys; print('listening x=1'); print('no', file=sys.stderr)"]
        child = await keeper.start("w", command, os.environ)

        async def refuse(*_: object) -> fleet.Child:
            raise OSError(12, "no memory")

        monkeypatch.setattr(keeper, "_launch", refuse)
        keeper.keep(child, command, os.environ)
        await asyncio.wait_for(lines.enough.wait(), 60)
    assert [line.rpartition("; ")[2] for line in lines.seen[1:4]] == [
        "it is started again at once",
        "it is started again in 0.02 s",
        "it is started again in 0.04 s",
    ]


class _Lines(io.StringIO):
    """A log that says when it has so many lines."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.enough, self._count = asyncio.Event(), count

    @property
    def seen(self) -> list[str]:
        return self.getvalue().splitlines()

    def flush(self) -> None:
        if len(self.seen) >= self._count:
            self.enough.set()


def test_a_child_that_does_not_start_is_named_with_its_last_words(ups: list[Up]) -> None:
    up = start(ups, decode="die")
    assert up.ready() == ""
    assert up.end() == 1
    assert up.log.splitlines()[-1] == (
        "error: decode-0 ended with exit status 3; its last line: the checkpoint is damaged"
    )
    assert up.log.count("the checkpoint is damaged") == 2


def test_a_child_that_never_listens_runs_into_the_limit(ups: list[Up]) -> None:
    up = start(ups, "--start-timeout=1.5", prefill="mute")
    assert up.end() == 1
    assert "not ready after 1.5 s (--start-timeout)" in up.log
    assert gone(up.pids(2), 0)


def test_a_signal_while_starting_ends_all(ups: list[Up]) -> None:
    up = start(ups, prefill="mute")
    pids = up.pids(2)
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert gone(pids, 0)


def test_who_ignores_sigterm_is_killed(ups: list[Up]) -> None:
    up = start(ups, decode="deaf", router="deaf")
    up.ready()
    pids = up.pids(3)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert gone(pids, 0)


def test_grandchildren_go_too(ups: list[Up]) -> None:
    up = start(ups, decode="parent")
    up.ready()
    pids = up.pids(4)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert gone(pids)


def test_a_death_is_noticed_though_a_grandchild_holds_the_pipes_and_the_grandchild_goes(ups: list[Up]) -> None:
    up = start(ups, decode="parent")
    up.ready()
    grandchild = int(up.until(r"decode-0 +\| pid=(\d+)\n")[1])
    os.kill(up.pid_of("decode-0"), signal.SIGKILL)
    up.until("decode-0 was killed by SIGKILL")
    assert gone([grandchild])
    pids = up.pids(6)
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert gone(pids)


def test_killing_the_supervisor_leaves_no_orphan(ups: list[Up]) -> None:
    up = start(ups, decode="deaf")
    up.ready()
    pids = up.pids(3)
    up.process.kill()
    assert gone(pids)


@pytest.mark.parametrize("killed", [False, True])
def test_a_killed_valkey_is_started_again_and_ends_with_the_fleet(ups: list[Up], killed: bool) -> None:
    up = start(ups, "--redis=embedded")
    up.ready()
    with Redis.from_url(up.until(r"redis=(unix://\S+)")[1]) as client:
        first = int(client.info("server")["process_id"])
    os.kill(first, signal.SIGKILL)
    up.until(r"up +\| the embedded Valkey was killed by signal 9: .* it is started again in 1 s \(end 1\)\n")
    up.until(r"up +\| the embedded Valkey is there again, and empty, after 1 ends\n")
    with Redis.from_url(up.until(r"redis=(unix://\S+)")[1]) as client:
        second = int(client.info("server")["process_id"])
    assert second != first
    pids = [second, *up.pids(3)]
    if killed:
        up.process.kill()
        assert gone(pids)
        shutil.rmtree(Path(up.until(r"redis=unix://(\S+)")[1]).parent)
    else:
        up.process.send_signal(signal.SIGTERM)
        assert up.end() == 0
        assert gone(pids, 0)
        assert up.log.count("embedded Valkey") == 2, "its end with the fleet is no death"
