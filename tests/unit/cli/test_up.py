"""`baton up` supervises: real processes, with stubs in the services' place."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.process.supervisor import bind_to_parent
from tests.processes import gone

STUB = Path(__file__).with_name("stub_up.py")


class Up:
    """A running `baton up` whose standard error is collected."""

    def __init__(self, *flags: str, **behaviour: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environ |= {f"STUB_{role.upper()}": way for role, way in behaviour.items()}
        self.process = subprocess.Popen(
            bind_to_parent([sys.executable, str(STUB), "up", "--grpc=127.0.0.1:0", "--redis=none", *flags]),
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
        with self._changed:
            assert self._changed.wait_for(lambda: re.search(pattern, self.log), 60), self.log
            return re.search(pattern, self.log)  # type: ignore[return-value]

    def pids(self, count: int) -> list[int]:
        """Pids that stubs have logged, once there are `count`."""
        self.until(rf"(?s)(\| pid=\d+.*){{{count}}}")
        return [int(pid) for pid in re.findall(r"\| pid=(\d+)", self.log)]

    def pid_of(self, name: str) -> int:
        """Pid of a stub that runs services, the first of that name."""
        return int(self.until(rf"{name} +\| pid=(\d+) argv")[1])

    def end(self) -> int:
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


def start(ups: list[Up], *flags: str, **behaviour: str) -> Up:
    ups.append(Up(*flags, **behaviour))
    return ups[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_and_stop(ups: list[Up], number: int) -> None:
    up = start(ups, "--prefill=2", "--decode-tp=2")
    assert re.fullmatch(
        r"ready grpc=127\.0\.0\.1:\d+ ops=\S+ model=bundled prefill=2 decode=1 decode_tp=2\n", up.ready()
    )
    pids = up.pids(4)
    up.process.send_signal(number)
    assert up.end() == 0
    assert gone(pids, 0)
    assert up.process.stdout.read() == ""


@pytest.mark.parametrize("cut", [False, True])
def test_the_router_drains_first_and_a_second_signal_cuts_that_short(ups: list[Up], cut: bool) -> None:
    up = start(ups, router="busy")
    up.ready()
    pids = up.pids(3)
    up.process.send_signal(signal.SIGINT)
    up.until(r"router +\| drains\n")
    # A child that dies meanwhile is still wanted.
    os.kill(up.pid_of("decode-0"), signal.SIGKILL)
    pids = up.pids(4)
    assert "stops" not in up.log
    if cut:
        up.process.send_signal(signal.SIGINT)
    else:
        os.kill(up.pid_of("router"), signal.SIGUSR1)
    assert up.end() == 0
    assert gone(pids, 0)
    first, *others = re.findall(r"(\S+) +\| stops after (\S+)\n", up.log)
    assert first == ("router", "SIGTERM" if cut else "SIGUSR1")
    assert {name for name, _ in others} <= {"prefill-0", "decode-0"}
    assert ("prefill-0", "SIGTERM") in others


def test_each_line_carries_its_name_and_each_child_its_flags(ups: list[Up]) -> None:
    up = start(ups, "--slots=7", "--chunk-size=16", "--drain-s=7")
    up.ready()
    prefill = up.until(r"prefill-0 \| pid=\d+ argv=(.*)")[1].split()
    decode = up.until(r"decode-0 +\| pid=\d+ argv=(.*)")[1].split()
    router = up.until(r"router +\| pid=\d+ argv=(.*)")[1].split()
    assert {"--worker-id=prefill-0", "--chunk-size=16", "--control=127.0.0.1:0"} <= set(prefill)
    assert {"--worker-id=decode-0", "--slots=7", "--control=127.0.0.1:0"} <= set(decode)
    assert {"--prefill=127.0.0.1:1", "--decode=127.0.0.1:1", "--grpc=127.0.0.1:0"} <= set(router)
    assert "--drain-s=7.0" in {*prefill} & {*decode} & {*router}
    # The store and the secret are not on command lines.
    for name in ("prefill-0", "decode-0", "router"):
        up.until(rf"{name} +\| redis=none secret=64")


def test_workers_are_given_one_file_for_packed_weights(ups: list[Up]) -> None:
    up = start(ups, "--prefill=2")
    up.ready()
    given = {
        up.until(rf"{name} +\| pid=.* --packed-weights=(\S+)")[1] for name in ("prefill-0", "prefill-1", "decode-0")
    }
    assert len(given) == 1
    file = given.pop()
    assert file.startswith(f"/proc/{up.process.pid}/fd/")
    assert os.path.getsize(file) == 0
    own = start(ups, "--packed-weights=/dev/shm/own")
    own.ready()
    assert own.until(r"decode-0 +\| pid=.* --packed-weights=(\S+)")[1] == "/dev/shm/own"


def test_mixed_workers_are_started_and_restarted_as_others(ups: list[Up]) -> None:
    up = start(ups, "--prefill=1", "--mixed=2")
    assert " prefill=1 mixed=2\n" in up.ready()
    given = {name: up.until(rf"{name} +\| pid=.* argv=(.*)")[1].split() for name in ("prefill-0", "mixed-1", "router")}
    weights = [[flag for flag in given[name] if flag.startswith("--packed-weights=")] for name in given]
    assert weights[0] == weights[1] != weights[2] == []
    # Nothing may come from variables, which could name decode workers elsewhere.
    assert {"--prefill=127.0.0.1:1", "--decode=", "--mixed=127.0.0.1:1,127.0.0.1:1"} <= set(given["router"])
    os.kill(up.pid_of("mixed-0"), signal.SIGKILL)
    up.until(r"up +\| mixed-0 was killed by SIGKILL; its last line: pid=.*; it is started again at once\n")
    pids = up.pids(5)
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert gone(pids, 0)


def test_the_routers_death_is_named_and_ends_all(ups: list[Up]) -> None:
    up = start(ups)
    up.ready()
    pids = up.pids(3)
    os.kill(up.pid_of("router"), signal.SIGKILL)
    assert up.end() == 1
    assert "\nerror: router was killed by SIGKILL; its last line: " in up.log
    assert gone(pids, 0)


def test_a_worker_that_dies_is_started_again_where_it_was(ups: list[Up]) -> None:
    victim = "prefill-1"
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


def test_a_child_that_does_not_start_is_named_with_the_end_of_its_output(ups: list[Up]) -> None:
    up = start(ups, decode="die")
    assert up.ready() == ""
    assert up.end() == 1
    assert up.log.splitlines()[-1] == (
        "error: decode-0 ended with exit status 3; its last line: the checkpoint is damaged"
    )
    assert up.log.count("the checkpoint is damaged") == 2


def test_settings_that_services_refuse_are_reported_once(ups: list[Up]) -> None:
    up = start(ups, prefill="refuse", decode="refuse")
    assert up.end() == 2
    assert re.fullmatch("error: (prefill|decode): device: cuda is not available", up.log.splitlines()[-1])
    assert up.log.count("not available") == 1


def test_a_router_that_listens_and_does_not_serve_is_named(ups: list[Up]) -> None:
    up = start(ups, router="absent")
    assert up.end() == 1
    assert up.log.splitlines()[-1] == "error: the router at 127.0.0.1:1 does not serve: UNAVAILABLE"
    assert "Traceback" not in up.log


def test_a_child_that_never_listens_runs_into_the_limit(ups: list[Up]) -> None:
    up = start(ups, "--start-timeout=4", prefill="mute")
    assert up.end() == 1
    # On a busy machine, decode-0 needs seconds too.
    assert re.search(r"^up +\| waiting for prefill-0(, decode-0)?: [123] of 4 s$", up.log, re.MULTILINE)
    late = r"error: not ready after 4 s \(--start-timeout\): prefill-0(, decode-0)?"
    assert re.fullmatch(late, up.log.splitlines()[-1])
    assert gone(up.pids(2), 0)


def test_a_signal_while_starting_ends_all(ups: list[Up]) -> None:
    up = start(ups, prefill="mute")
    pids = up.pids(2)
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert gone(pids, 0)
