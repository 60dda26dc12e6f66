"""The supervisor over real processes: tiny scripts that say what they do."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.errors import Unavailable
from baton.process.supervisor import SupervisedProcess, Supervisor, SupervisorTimes, parse_listeners, ready_line
from tests.processes import gone

WAIT_S = 60.0
SERVE = "print('listening a=1:2 b=3:4'); print(f'pid={os.getpid()}', file=sys.stderr); signal.pause()"
FAIL = "print('because', file=sys.stderr); sys.exit(3)"
DRAIN = (
    "signal.signal(10, lambda *_: (print('finishes'), sys.exit()));"
    "signal.signal(15, lambda *_: (signal.signal(15, lambda *_: sys.exit()), print('drains')));"
    "print('listening a=1:2'); [signal.pause() for _ in range(9)]"
)
DEAF = "signal.signal(15, lambda *_: print('ignored')); print('listening a=1:2'); [signal.pause() for _ in range(9)]"
# Of two processes that write at the same time, one's line may come into the midst of the other's.
PARENT = (
    "print('listening a=1:2'); subprocess.Popen([sys.executable, '-S', '-c', 'import os, signal;"
    " signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()'])"
)


def script(code: str) -> list[str]:
    return [sys.executable, "-S", "-u", "-c", f"import os, signal, subprocess, sys\n{code}"]


class Lines:
    """Lines from children and their supervisor, in order, and a wait for more."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
        self._tasks.add(asyncio.create_task(self._tell()))

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, pattern: str, count: int = 1) -> list[str]:
        """The first `count` matches, as soon as there are so many."""

        def found() -> list[str]:
            return [match[match.lastindex or 0] for line in self.lines if (match := re.search(pattern, line))]

        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: len(found()) >= count)
        return found()[:count]


@pytest.fixture
async def said(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Lines]:
    lines = Lines()

    handler, log = logging.Handler(), logging.getLogger("baton.process.supervisor")
    handler.emit = lambda record: lines.add("log", record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    caplog.set_level("INFO", log.name)
    yield lines
    log.removeHandler(handler)


async def started(group: Supervisor, code: str) -> SupervisedProcess:
    child = await group.start("w", script(code))
    async with asyncio.timeout(WAIT_S):
        await group.ready(child)
    return child


async def test_output_is_relayed_line_by_line_and_the_ready_line_taken(said: Lines) -> None:
    code = "print('loads'); print('listening a=1:2 b=3:4'); print('listening '); print('no end', end='')"
    async with Supervisor(said.add) as group:
        child = await group.start("w", script(code), {"PATH": ""})
        assert parse_listeners(await group.ready(child)) == {"a": "1:2", "b": "3:4"}
        await asyncio.wait_for(group.death, WAIT_S)
    assert said.lines == ["w: loads", "w: listening ", "w: no end"]


async def test_the_ready_line_may_be_json(said: Lines) -> None:
    line = ready_line("a=1:2 b=3:4", as_json=True)
    assert json.loads(line) == {"listening": {"a": "1:2", "b": "3:4"}}
    assert ready_line("a=1:2 b=3:4", as_json=False) == "listening a=1:2 b=3:4"
    async with Supervisor(said.add) as group:
        child = await started(group, f"print({line!r}); signal.pause()")
        assert parse_listeners(await group.ready(child)) == {"a": "1:2", "b": "3:4"}


async def test_a_death_is_told_with_its_last_line_and_ends_the_wait_for_others(said: Lines) -> None:
    async with Supervisor(said.add) as group:
        mute = await group.start("mute", script("signal.pause()"))
        await group.start("w", script(f"print('on standard output'); {FAIL}"))
        with pytest.raises(Unavailable, match=r"^w ended with exit status 3; its last line: because$"):
            await asyncio.wait_for(group.ready(mute), WAIT_S)
        assert group.death.result()[1:] == (3, "because")


async def test_the_pause_before_a_successor_grows_to_its_limit(said: Lines) -> None:
    async with Supervisor(said.add, SupervisorTimes(pause_s=0.02, max_pause_s=0.05)) as group:
        (await group.start("w", script(FAIL))).restart_on_death()
        pauses = await said.until("log: w ended with exit status 3; its last line: because; it is started (.*)", 4)
        assert not group.death.done()
    assert pauses == ["again at once", "again in 0.02 s", "again in 0.04 s", "again in 0.05 s"]


async def test_one_that_had_served_has_its_successor_at_once(said: Lines) -> None:
    async with Supervisor(said.add, SupervisorTimes(pause_s=3600.0, steady_s=0.0)) as group:
        (await started(group, SERVE)).restart_on_death(script(f"print('in its place'); {SERVE}"))
        for number in (1, 2, 3):
            pid = int((await said.until(r"w: pid=(\d+)", number))[-1])
            os.kill(pid, signal.SIGKILL)
            told = await said.until(rf"log: w was killed by SIGKILL; its last line: pid={pid}; (.*)")
            assert told == ["it is started again at once"]
            await said.until("w: in its place", number)
            await said.until("log: w is ready again", number)


async def test_a_successor_that_hangs_at_its_start_is_replaced(said: Lines, tmp_path: Path) -> None:
    """The first successor waits for ever, the second one serves."""
    came = tmp_path / "came"
    second = f"os.path.exists({str(came)!r}) or (open({str(came)!r}, 'w'), signal.pause()); {SERVE}"
    async with Supervisor(said.add, SupervisorTimes(steady_s=0.0, start_stall_s=0.5)) as group:
        child = await started(group, SERVE)
        child.restart_on_death(script(second))
        child.signal(signal.SIGKILL)
        await said.until("log: w hangs at its start: it uses no processor time")
        await said.until("log: w is ready again")
    assert came.exists()


@pytest.mark.parametrize("what", ["asyncio.create_subprocess_exec", "os.pipe"])
async def test_one_that_can_not_start_has_not_served(said: Lines, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "no memory")

    async with Supervisor(said.add, SupervisorTimes(pause_s=0.02, steady_s=0.0)) as group:
        child = await started(group, "print('listening a=1:2'); signal.pause()")
        monkeypatch.setattr(what, refuse)
        child.restart_on_death()
        child.signal(signal.SIGTERM)
        pauses = await said.until("w can't be started: no memory; it is started again in (.*)", 2)
        with pytest.raises(Unavailable, match="x can't be started: no memory"):
            await group.start("x", script(SERVE))
    assert pauses == ["0.02 s", "0.04 s"]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_stop_lets_children_drain_unless_a_second_one_cuts_that_short(said: Lines, cut: bool) -> None:
    async with asyncio.timeout(WAIT_S), Supervisor(said.add) as group:
        child = await started(group, DRAIN)
        child.restart_on_death()
        draining = asyncio.create_task(group.stop(3600.0))
        await said.until("w: drains")
        if cut:
            draining.cancel()
            await group.stop(3600.0)
        else:
            child.signal(signal.SIGUSR1)
            await draining
    # A child that ends at a stop has no successor.
    assert said.lines == (["w: drains"] if cut else ["w: drains", "w: finishes"])


async def test_a_child_that_ignores_sigterm_is_killed_at_the_second_stop(said: Lines) -> None:
    async with Supervisor(said.add, SupervisorTimes(kill_s=0.01)) as group:
        await started(group, DEAF)
        async with asyncio.timeout(WAIT_S):
            stopping = asyncio.create_task(group.stop(3600.0))
            await said.until("w: ignored")
            stopping.cancel()
            await group.stop(0.05)
    assert said.lines[:2] == ["w: ignored"] * 2


@pytest.mark.parametrize("pause", [3600.0, 0.0])
async def test_a_stop_ends_the_pause_and_overtakes_a_start(said: Lines, pause: float) -> None:
    async with asyncio.timeout(WAIT_S), Supervisor(said.add, SupervisorTimes(pause_s=pause)) as group:
        (await group.start("w", script(FAIL))).restart_on_death()
        await said.until("it is started again", 2)


@pytest.mark.parametrize("dies", [False, True])
async def test_processes_that_a_child_leaves_behind_go_with_it(said: Lines, dies: bool) -> None:
    """Although it ignores SIGTERM and holds the pipes."""
    async with Supervisor(said.add) as group:
        child = await started(group, f"{PARENT}; signal.pause()")
        pid = int((await said.until(r"w: (\d+)"))[0])
        if dies:
            child.signal(signal.SIGKILL)
            assert await asyncio.wait_for(group.death, WAIT_S)
    assert gone([pid])


RUN = """
import asyncio, sys
from baton.process.supervisor import Supervisor

async def main():
    async with Supervisor(lambda name, line: print(line, flush=True)) as group:
        await group.start("w", [sys.executable, "-S", "-u", "-c", sys.argv[1]])
        await group.death

asyncio.run(main())
"""


@contextlib.contextmanager
def supervised(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor with a child, in a process group of their own, and the child's pid."""
    command = [sys.executable, "-c", RUN, script(code)[-1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as run:
        try:
            yield run, int(run.stdout.readline().removeprefix("pid="))
        finally:
            run.kill()


def test_killing_the_supervisor_leaves_no_orphan() -> None:
    with supervised(SERVE + "; signal.pause()") as (run, pid):
        assert Path(f"/proc/{pid}").exists()
        run.kill()
        assert gone([pid])


def test_a_terminals_interrupt_reaches_the_supervisor_alone() -> None:
    code = "[signal.signal(number, lambda number, _: (print(number), sys.exit())) for number in (2, 15)]"
    with supervised(f"{code}; {SERVE}") as (run, pid):
        os.killpg(run.pid, signal.SIGINT)
        assert run.communicate(timeout=WAIT_S)[0] == "15\n"
        assert gone([pid])
